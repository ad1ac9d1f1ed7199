"""No false alarm over torch's own database of its modules: what is finite in plain fp32 is healthy under the emulation.

In: the modules of `torch.nn` with the inputs that torch tests them with. Out: a verdict on each, in train and in eval.
"""

import copy
from pathlib import Path
from unittest import mock

import pytest
import torch

from nandoctor.dumps.dump import Dump
from nandoctor.pipeline import replay_dump
from nandoctor.step.settings import Settings
from nandoctor.tracing.tensor_stats import walk_tensors

pytest.importorskip("expecttest", reason="torch's own test tools import it")

# Importing torch's test tools freezes the flags of torch.backends for good, which other tests set.
with mock.patch("torch.backends.disable_global_flags"):
    from torch.testing._internal.common_modules import module_db

NUM_INPUTS = 4
"""Of each module, spread evenly: one loss alone has 857, the same few with every set of options."""

CHOSEN = [info for info in module_db if info.name != "nn.BCELoss"]
"""All but what CUDA's autocast refuses (see `test_banned_entries`)."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # torch remarks on some of its own inputs
    pytest.mark.parametrize("training", [True, False], ids=["train", "eval"]),
]


def module_inputs(info, training):
    """Inputs in float32 on a CPU, without those that only build the module."""
    torch.manual_seed(0)
    made = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=training)
    usable = [module_input for module_input in made if module_input.forward_input is not None]
    return usable[:: -(-len(usable) // NUM_INPUTS)] if usable else []


def prepare(info, module_input, training):
    """The module, and the call of it; some modules write to their input, so each call has its own."""
    build, forward = module_input.constructor_input, module_input.forward_input

    def call(model, batch):
        return model(*copy.deepcopy(forward.args), **copy.deepcopy(forward.kwargs))

    torch.manual_seed(0)
    return info.module_cls(*build.args, **build.kwargs).train(training), call


def replay(module, call, training):
    dump = Dump(path=Path("dump.pth"), nbytes=1, layout="plain", state=module.state_dict(), arrays={})
    return replay_dump(dump, Settings(model=module, call=call, mode="train" if training else "eval")).report


def plain_verdict(module, call):
    """What plain fp32 says: of an output without values nothing can be told."""
    tensors = [tensor for _, tensor in walk_tensors(call(module, {})) if tensor.numel()]
    if not tensors:
        return "cannot-tell"
    return "healthy" if all(bool(torch.isfinite(tensor).all()) for tensor in tensors) else "numerics"


@pytest.mark.parametrize("info", CHOSEN, ids=[info.name for info in CHOSEN])
def test_a_module_is_as_healthy_as_in_plain_fp32(info, training):
    for module_input in module_inputs(info, training):
        module, call = prepare(info, module_input, training)
        try:
            expected = plain_verdict(module, call)
        except RuntimeError:
            continue  # the database has inputs for other dtypes: torch itself refuses them
        assert replay(module, call, training).verdict == expected, module_input.desc
