"""What it means that a forward or a loss raised: a call that does not fit, too little memory, a NaN that it noticed.

In: the exception, and the trace up to it. Out: answers, and the error to show.
"""

from __future__ import annotations

from nandoctor.errors import LossError, ModelError
from nandoctor.evidence.trace import Trace
from nandoctor.replaying.memory import is_out_of_memory
from nandoctor.replaying.model_loading import place_of

_WRONG_CALL = (TypeError, AttributeError, LookupError, NameError)


def is_wrong_call(error: Exception) -> bool:
    """Tell whether a loss was called with what it is not made for, which no value of the output explains."""
    return isinstance(error, LossError) and isinstance(error.__cause__, (*_WRONG_CALL, type(None)))


def shows_damage(trace: Trace) -> bool:
    """Whether anything went non-finite before the forward raised; a -inf that an op was asked for is a mask."""
    calls = (stats for call in trace.calls for stats in (*call.inputs, *call.outputs))
    if not all(stats.finite for stats in (*trace.batch, *calls)):
        return True
    analyses = [op.analysis for op in trace.ops if op.analysis is not None]
    return any(analysis.num_exact_finite > 0 or analysis.kinds != ("-inf",) for analysis in analyses)


def explain_forward_error(error: Exception) -> ModelError:
    """The error for a forward that raised while everything was still finite."""
    if is_out_of_memory(error):
        return ModelError(
            f"There is not enough memory to run the step ({str(error).strip().splitlines()[0] or 'MemoryError'}).",
            remedy="Run it where there is more memory, or on the CPU; what else runs there counts as well.",
        )
    raised = f"The model's forward raised {type(error).__name__}{place_of(error)}: {error}"
    if "without overflow" in str(error):
        return ModelError(
            raised,
            remedy="A number in that line does not fit the format that its tensor has there: take it from "
            "torch.finfo(x.dtype), or compute the line in fp32.",
        )
    return ModelError(
        raised,
        remedy="Check what the model is called with: `nandoctor inspect` lists the saved arrays, --inputs picks among "
        "them by name, and --call names a function (model, batch) -> output for anything else.",
    )
