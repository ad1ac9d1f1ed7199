"""Synthetic reports: a network of any depth that fails in any of the ways a report can tell."""

import math
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from unittest.mock import patch

from nandoctor.causes.registry import Page
from nandoctor.changes.clamp import ClampArgument
from nandoctor.changes.constant import SetArgument
from nandoctor.changes.keep_fp32 import KeepModule
from nandoctor.changes.setting import UseFormat
from nandoctor.evidence.dump_summary import ArraySummary, DumpSummary
from nandoctor.evidence.edits import OpSite
from nandoctor.evidence.formats import BF16, FP16, FP32
from nandoctor.evidence.report import (
    Cause,
    Check,
    Counterfactual,
    Environment,
    EpsUse,
    Evidence,
    FirstNonfinite,
    Fix,
    Fp32Module,
    Fp32Set,
    Fp32SetSearch,
    LayerRow,
    Link,
    NonfiniteElements,
    Origin,
    ReplayAttempt,
    Report,
    Reproduction,
    Runs,
    RunSummary,
    SourceExcerpt,
    StepSetting,
    TrialOutcome,
)
from nandoctor.evidence.trace import NonfiniteCounts, Place, SourceLine, TensorStats
from nandoctor.evidence.triage import Triage
from nandoctor.evidence.verification import FixChoice, Verification
from nandoctor.views.explain import catalogue_document, cause_document
from nandoctor.views.html import page_of
from nandoctor.views.inspect_dump import inspection_document
from nandoctor.views.report import report_document
from nandoctor.views.triage import triage_document
from nandoctor.views.verification import fix_document, verification_document

DOCUMENTS = {
    Verification: verification_document,
    FixChoice: fix_document,
    DumpSummary: inspection_document,
    Page: cause_document,
    tuple: catalogue_document,
}


def document(thing, level="screen", **more):
    """The blocks of any record; a report's and a triage's have a level."""
    if isinstance(thing, Report | Triage):
        return (report_document if isinstance(thing, Report) else triage_document)(thing, level, **more)
    return DOCUMENTS[type(thing)](thing, **more)


@lru_cache
def sketch_of(thing):
    """The page of a record, its figures made for their titles, and none written: a second for each page."""
    with patch("nandoctor.views.ranges.image_of", lambda *_: b""):
        return page_of(document(thing, "page"))


BATCH = 4
ROOT = Place(module="", type="UNet", call=0)


def counts(num_bad, *, kind="nan", samples=(2,)):
    return NonfiniteCounts(
        num_nan=num_bad if kind == "nan" else 0,
        num_posinf=num_bad if kind == "+inf" else 0,
        num_neginf=num_bad if kind == "-inf" else 0,
        num_zero=0,
        smallest=1e-3,
        first_bad_index=(samples[0], 0, 0, 0),
        samples=samples,
    )


def tensor(absmax=1.0, *, path="", dtype=FP16, nonfinite=None, shape=(BATCH, 16, 32, 32)):
    """Statistics of a tensor of this absmax; `nonfinite` is its counts, `absmax` None one without a finite value."""
    spread = {} if not absmax else {"p05": absmax / 300, "median": absmax / 12, "p95": absmax / 2}
    return TensorStats(
        path=path,
        shape=shape,
        dtype=dtype,
        numel=math.prod(shape),
        finite=nonfinite is None,
        min=None if absmax is None else -absmax / 2,
        max=absmax,
        absmax=absmax,
        counts=nonfinite,
        **spread,
    )


def row(module, type_name, output, *, depth=2, call=0, inputs=(), rel_err=3e-4, low=FP16):
    """One module call with one output, or with none where `output` is None."""
    outputs = () if output is None else (output,)
    known = output is not None and output.absmax is not None
    return LayerRow(
        place=Place(module=module, type=type_name, call=call),
        depth=depth,
        inputs=tuple(inputs),
        outputs=outputs,
        headroom_bits=low.headroom_bits(output.absmax) if known else None,
        rel_err=rel_err,
    )


def run(rows, *, dtype, policy="cuda", raised=None):
    output = rows[-1].outputs if rows else ()
    return RunSummary(
        dtype=dtype,
        policy=policy,
        training=True,
        seed=0,
        finite=all(row.finite for row in rows),
        raised=raised,
        elapsed_s=0.25,
        output=output,
        modules=tuple(rows),
    )


def magnitude(index):
    """A smooth and uneven profile of activations: no two neighbours alike."""
    return 3.0 * 2 ** (2.5 * math.sin(index / 5) + 1.2 * math.sin(index * 1.7))


def network(num_layers, *, nonfinite_from=None, low=FP16, growth=1.0):
    """The rows of both runs of `num_layers` leaves in blocks of four, those from `nonfinite_from` on non-finite."""
    autocast, fp32 = [], []
    for index in range(num_layers):
        block, place = divmod(index, 4)
        module = f"encoder.blocks.{block}.{('norm', 'attention', 'project', 'mlp')[place]}"
        type_name = ("ChannelNorm", "MultiheadAttention", "Linear", "Conv2d")[place]
        size = magnitude(index) * growth**index
        nonfinite = counts(8192) if nonfinite_from is not None and index >= nonfinite_from else None
        autocast.append(
            row(
                module,
                type_name,
                tensor(size, nonfinite=nonfinite, dtype=low),
                rel_err=None if nonfinite else 3e-4,
                low=low,
            )
        )
        fp32.append(row(module, type_name, tensor(size, dtype=FP32), low=low))
        if place == 3:  # the block returns what its last layer made
            block_place = Place(module=f"encoder.blocks.{block}", type="Block", call=0)
            autocast.append(replace(autocast[-1], place=block_place, depth=1))
            fp32.append(replace(fp32[-1], place=block_place, depth=1))
    autocast.append(replace(autocast[-1], place=ROOT, depth=0))
    fp32.append(replace(fp32[-1], place=ROOT, depth=0))
    return Runs(autocast=run(autocast, dtype=low), fp32=run(fp32, dtype=FP32))


def put(record, **changes):
    """`replace`, which takes the names of an inlined record as well: `put(row, module="norm")`."""
    for name in ("place", "elements"):
        inner = getattr(record, name, None)
        inlined = [item.name for item in fields(inner)] if is_dataclass(inner) else []
        if own := {key: changes.pop(key) for key in inlined if key in changes}:
            changes[name] = replace(inner, **own)
    return replace(record, **changes)


def first(nonfinite_row, **changes):
    """The record of a first non-finite output, as the row has it."""
    value = nonfinite_row.outputs[0]
    record = FirstNonfinite(
        run="autocast",
        phase="forward",
        place=nonfinite_row.place,
        where="output",
        seen_in=None,
        elements=NonfiniteElements(
            kinds=value.counts.kinds,
            num_bad=value.counts.num_bad,
            numel=value.numel,
            first_index=value.counts.first_bad_index,
            samples=value.counts.samples,
        ),
        inputs=(tensor(0.31, path="[0][0]"),),
        value=value,
        would_be=0.83,
    )
    return put(record, **changes)


def array(name="logit", num_nan=0, *, shape=(BATCH, 1, 32, 32), role="output"):
    return ArraySummary(name=name, shape=shape, dtype="float32", role=role, num_nan=num_nan, num_posinf=0, num_neginf=0)


def dump(**changes):
    summary = DumpSummary(
        path="NaN.pth",
        nbytes=187_000,
        layout="plain",
        num_weights=62,
        num_parameters=46_113,
        arrays=(array("image", role="input", shape=(BATCH, 3, 32, 32)), array(num_nan=1024)),
        scalars=(("step", "49"),),
        bad_weights=(),
        bad_buffers=(),
        missing=(),
    )
    return replace(summary, **changes)


def report(runs=None, **changes):
    """A report on these runs, healthy unless `changes` say otherwise."""
    made = Report(
        verdict="healthy",
        headline="The output is finite under fp16 autocast and in fp32",
        reproduction=Reproduction(
            grade="exact", output="logit", num_bad_saved=0, num_bad_replayed=0, numel=4096, max_rel_err=0.0
        ),
        first_nonfinite=None,
        runs=runs,
        dump=dump(),
        environment=Environment(nandoctor="0.1.0", torch="2.13.0", python="3.12.1", platform="Linux", device="cpu"),
        notes=("Replayed as model(image) in train mode, seed 0.",),
        next_steps=("nandoctor plot NaN.pth -o ranges.png",),
    )
    return replace(made, **changes)


def nonfinite_row(runs):
    return next(row for row in runs.autocast.modules if not row.finite)


AGREES = Reproduction(
    grade="exact", output="logit", num_bad_saved=1024, num_bad_replayed=1024, numel=4096, max_rel_err=0.0
)


def precision(num_layers=20, *, nonfinite_from=9, would_be=81234.0, low=FP16):
    """Non-finite from the layer `nonfinite_from` on under autocast, finite in fp32."""
    runs = network(num_layers, nonfinite_from=nonfinite_from, low=low)
    origin = nonfinite_row(runs)
    return report(
        runs,
        verdict="precision",
        headline=f"{origin.place.with_type} is the first to go non-finite under {low} autocast: NaN in 8192 of "
        "65536 elements (sample 2)",
        reproduction=AGREES,
        first_nonfinite=first(origin, would_be=would_be),
    )


def numerics():
    runs = network(20, nonfinite_from=9)
    fp32 = tuple(
        replace(row, outputs=other.outputs) for row, other in zip(runs.fp32.modules, runs.autocast.modules, strict=True)
    )
    runs = replace(runs, fp32=replace(runs.fp32, modules=fp32, finite=False))
    return replace(precision(), runs=runs, verdict="numerics", headline="fp32 is non-finite as well")


def residual():
    """A sum made in a block's own forward, first seen going into a layer of the next block."""
    made = precision()
    seen = first(
        nonfinite_row(made.runs), place=Place(module="encoder.blocks.1", type="Block", call=0), where="between"
    )
    norm = Place(module="encoder.blocks.2.norm", type="ChannelNorm", call=0)
    infinite = replace(seen.elements, kinds=("+inf",))
    return replace(made, first_nonfinite=replace(seen, seen_in=norm, elements=infinite))


def state():
    made = precision()
    buffers = tuple(array(f"norm{i}.running_var", 64, shape=(64,), role=None) for i in range(5))
    return replace(
        made,
        verdict="state",
        headline="The buffer norm0.running_var is NaN in 64 of 64 values",
        dump=dump(bad_buffers=buffers),
    )


def weights_only():
    return report(
        verdict="state",
        headline="1 of 62 saved tensors is non-finite: head.weight",
        reproduction=Reproduction(grade="no-reference"),
        dump=dump(layout="weights-only", arrays=(), bad_weights=(array("head.weight", 3, shape=(64, 64), role=None),)),
    )


def nonfinite_input():
    made = precision(nonfinite_from=0)
    seen = first(
        nonfinite_row(made.runs),
        phase="input",
        place=Place(module="", type="", call=0),
        where="batch",
        inputs=(),
        would_be=None,
        value=tensor(1.0, path="image", dtype=FP32, nonfinite=counts(12), shape=(BATCH, 3, 32, 32)),
    )
    return replace(
        made,
        verdict="input",
        headline="image is NaN in 12 of 12,288 values before any layer reads it",
        first_nonfinite=seen,
    )


def healthy(num_layers=20):
    return report(network(num_layers))


def not_reproduced():
    attempts = tuple(ReplayAttempt(training=True, seed=seed, grade="finite") for seed in range(4))
    reproduction = replace(AGREES, grade="finite", num_bad_replayed=0, attempts=attempts)
    headline = "The replay is finite, and the saved output is not"
    return report(network(20), verdict="not-reproduced", headline=headline, reproduction=reproduction)


def fixable():
    """A failure with all that a search for fixes can give."""
    made = precision()
    source = SourceLine(file="/home/them/net.py", line=45, text="return x / torch.sqrt(variance + 1e-8)")
    site = OpSite(module="encoder.blocks.2.attention", type="Block", op="add", nth=0)
    sound = TrialOutcome(finite=True, max_rel_err=6.2e-4)
    failing = TrialOutcome(finite=False, max_rel_err=None)
    edits = (
        (SetArgument(site=site, argument="other", was=1e-8, value=1e-5), "An eps that fp16 holds at net.py:45", True),
        (KeepModule(module="encoder.blocks.2.attention"), "encoder.blocks.2.attention in fp32", True),
        (UseFormat(format=BF16), "bf16 instead of fp16", True),
        (ClampArgument(site=site, argument="", low=-6e4, high=6e4), "Clamp what add returns", False),
    )
    patch = f"- {source.text}\n+ return x / torch.sqrt(variance + 1e-5)"
    headline = "1e-8 rounds to 0 in fp16, so MultiheadAttention divides 0 by 0"
    checks = (
        Check(name="output", status="passed", text="finite, 0.062 % off fp32"),
        Check(name="gradients", status="passed", text="finite, of the loss"),
        Check(name="samples in another order", status="passed", text="finite, 0.07 % off fp32"),
        Check(name="small noise on the inputs", status="not-checked", text="the budget was spent"),
    )
    return replace(
        made,
        headline=headline,
        arguments=("NaN.pth", "--model", "net.py:Net"),
        excerpt=SourceExcerpt(
            file=source.file, path="net.py", function="Attention.forward", first=44, line=45, end_line=45,
            lines=("        variance = x.var(1)", f"        {source.text}", ""), column=27, end_column=42,
        ),
        origin=origin(made, source=source),
        cause=Cause(
            code="eps-underflow",
            title="A small constant is lost in the lower precision",
            headline=headline,
            explanation="1e-8 rounds to zero in fp16, so div is evaluated at exactly 0; in fp32 it is not.",
            source=source,
            remark="1e-8 is 0 in fp16",
            evidence=(Evidence(name="eps", value=1e-8, text="the constant is 1e-8, used by add in fp16"),),
        ),
        chain=tuple(
            Link(place=Place(module=f"encoder.blocks.{block}", type="Block", call=0), op="add") for block in range(20)
        ),
        fixes=tuple(
            Fix(
            kind="source",
                edit=edit,
                title=title,
                patch=patch if rank == 0 else "",
                verified=verified,
                checks=checks if verified else (),
                outcome=sound if verified else failing,
                rank=rank,
            )
            for rank, (edit, title, verified) in enumerate(edits)
        ),
        counterfactuals=(
            Counterfactual(group="precision", setting=StepSetting(dtype=BF16), outcome=sound),
            Counterfactual(group="samples", setting=StepSetting(without=(2,)), outcome=sound),
            Counterfactual(group="mode", setting=StepSetting(training=False), outcome=failing),
        ),
        fp32_sets=Fp32SetSearch(
            sets=(Fp32Set(modules=(Fp32Module(module="encoder.blocks.2.attention", children=False),)),),
            complete=True,
        ),
        eps_audit=(
            EpsUse(
                place="op", module="encoder.blocks.2.attention", type="MultiheadAttention", name="other", value=1e-8,
                op="add", source=source, dtype=FP16, rounded=0.0, rel_err=1.0, effect="zero",
            ),
            EpsUse(
                place="op", module="norm", type="LayerNorm", name="eps", value=1e-5, dtype=FP32, rounded=1e-5,
                rel_err=0.0, effect="normal",
            ),
        ),
    )  # fmt: skip


def origin(made, **changes):
    """The origin at the first non-finite row."""
    nonfinite = nonfinite_row(made.runs)
    record = Origin(
        phase="forward",
        place=nonfinite.place,
        op="div",
        source=None,
        elements=NonfiniteElements(
            kinds=("nan",), num_bad=288, numel=nonfinite.outputs[0].numel, first_index=(2, 0, 11, 5), samples=(2,)
        ),
        would_be=None,
        inputs=(tensor(13.6, path="self"), tensor(1.27, path="other")),
        output=nonfinite.outputs[0],
    )
    return replace(record, **changes)


VERDICTS = {
    "precision": precision,
    "fixable": fixable,
    "numerics": numerics,
    "residual": residual,
    "state": state,
    "weights-only": weights_only,
    "input": nonfinite_input,
    "healthy": healthy,
    "not-reproduced": not_reproduced,
}
