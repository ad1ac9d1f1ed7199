"""`Case`: one small sick model, with everything that is known about its illness.

In: what a family of cases writes down. Out: records, and the few helpers with which the families build them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from nandoctor.evidence.report import Verdict

Batch = dict[str, Tensor]
Phase = Literal["forward", "loss", "backward", "state", "input", "optimizer"]

Layer = TypeVar("Layer", bound=nn.Module)

Build = Callable[[], nn.Module]
Call = Callable[[nn.Module, Batch], Any]

LOSS = "<loss>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A sick model, the batch that it dies on, and the diagnosis that is true.

    `mechanism` is a row of the table of mechanisms. `build` and `batch` are deterministic; `batch` gives the arrays of
    the dump and `call` runs the model on them. `module` is the dotted path that owns the origin, "" the root and
    "<loss>" the loss function; for a non-finite weight or buffer its owner, for such a batch "". `op` is the aten name
    without overload, backend prefix or in-place underscore, "" where the origin is no operation. `line` is a piece of
    the source line that makes it, found on no other line of that file. `near_causes` are codes that a good doctor could
    defend as well, where a mechanism touches two of them. `repair` holds the fields in which the healthy twin differs.
    """

    name: str
    mechanism: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    call: Call
    loss: Callable[[Any, Batch], Tensor] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    train: bool = True
    loss_scale: float = 1.0
    phase: Phase = "forward"
    verdict: Verdict
    module: str = ""
    op: str = ""
    line: str = ""
    cause: str = ""
    near_causes: tuple[str, ...] = ()
    repair: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def causes(self) -> tuple[str, ...]:
        """Every cause code that is right."""
        return (self.cause, *self.near_causes)

    def twin(self) -> Case:
        """The nearest healthy case: a fix applied, or the weights or the data changed."""
        assert self.repair, f"{self.name} is healthy already"
        return healthy(dataclasses.replace(self, name=f"{self.name} (healthy)", **self.repair))


MECHANISMS = {
    "product": "product too large",
    "residual": "residual too large",
    "gate": "gate or scale too large",
    "square": "square or mean too large",
    "input": "input too large",
    "long-sum": "long sum",
    "exponential": "exp too large",
    "mask-constant": "mask constant",
    "full-row": "full mask row",
    "eps": "eps lost",
    "sigmoid": "saturated sigmoid",
    "ratio": "0/0, empty mean",
    "domain": "outside the domain",
    "form": "inf - inf, 0 * inf",
    "singularity": "gradient singularity",
    "where": "where trap",
    "gradient": "fp16 gradient",
    "function": "custom Function",
    "scale": "loss scale",
    "weights": "non-finite weights",
    "buffers": "non-finite buffers",
    "batch": "non-finite batch",
    "optimizer": "optimizer eps",
}
"""The rows of the table of mechanisms, by the first part of a case's name."""


PHASES: dict[str, Phase] = {
    **dict.fromkeys(("singularity", "where", "gradient", "function", "scale"), "backward"),
    **dict.fromkeys(("weights", "buffers"), "state"),
    **{"batch": "input", "optimizer": "optimizer"},
}
"""Where the cases of a row fail, if it is not in the forward."""


def case(
    name: str,
    build: Callable[[], nn.Module],
    batch: Callable[[], Batch],
    words: str,
    *,
    call: Call | None = None,
    **more: Any,
) -> Case:
    """A case of the corpus; the words are verdict, module, op and cause, where "." is the root and "-" no operation."""
    verdict, module, op, cause = words.split()
    row = name.partition("/")[0]
    return Case(
        name=name,
        mechanism=MECHANISMS[row],
        build=build,
        batch=batch,
        call=call or by_name(build),
        verdict=verdict,
        module="" if module == "." else module,
        op="" if op == "-" else op,
        cause=cause,
        **{"phase": PHASES.get(row, "forward"), **more},
    )


def by_name(build: Build) -> Call:
    """A `call` that gives the forward the arrays that its parameters are called by, or else all of them in a dict."""

    @cache
    def names() -> list[str]:
        return list(signature(type(build()).forward).parameters)

    def call(model: nn.Module, batch: Batch) -> Any:
        arrays = [batch[name] for name in names() if name in batch]
        return model(*arrays) if arrays else model(batch)

    return call


def healthy(case: Case) -> Case:
    """The same case with nothing to blame."""
    return dataclasses.replace(case, verdict="healthy", module="", op="", line="", cause="", near_causes=(), repair={})


def seeded(make: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    """A `build` that makes the same weights every time and leaves the global random state alone."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make(*args, **kwargs)

    return build


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Uniform numbers in [0, 1), the same every time."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def scaled(layer: Layer, factor: float) -> Layer:
    """The layer with its weights multiplied, as too many steps at too high a learning rate leave it."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(factor)
    return layer


def biased(layer: Layer, value: float | Tensor, *, unit: int | slice = slice(None)) -> Layer:
    """The layer with its bias set, or that of some of its units."""
    bias = layer.bias
    assert isinstance(bias, Tensor)
    with torch.no_grad():
        bias[unit] = value
    return layer
