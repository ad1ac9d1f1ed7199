"""Records what the hand-written backward of a custom autograd Function runs."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable
from functools import wraps
from typing import Any

from nandoctor.evidence.trace import SourceLine
from nandoctor.torch_compat import function_backward, replace_function_backward
from nandoctor.tracing.module_tracer import Owner
from nandoctor.tracing.op_tracer import OpTracer


class FunctionTracer:
    """A recorder of the ops that watched graph nodes run; `ops` numbers them in one sequence."""

    def __init__(self, ops: OpTracer) -> None:
        ops.phase = "backward"
        self.ops = ops

    def watch(self, node: Any, owner: Owner) -> Callable[[], None]:
        """Record the ops of this node's backward as `owner`'s; return a function that undoes this."""

        def watched(backward: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(backward)
            def run(*args: Any) -> Any:
                with self.ops.watching(lambda: owner):
                    return backward(*args)

            return run

        return replace_function_backward(node, watched)

    def line_of(self, node: Any) -> SourceLine | None:
        """Return the line of the `def backward`, below its decorators; None if it was not written in Python."""
        code = getattr(inspect.unwrap(function_backward(node)), "__code__", None)
        if code is None:
            return None
        lines = linecache.getlines(code.co_filename)
        numbered = enumerate(lines[code.co_firstlineno - 1 :], start=code.co_firstlineno)
        line, text = next(((n, t) for n, t in numbered if t.lstrip().startswith("def ")), (code.co_firstlineno, ""))
        return SourceLine(file=code.co_filename, line=line, text=text.strip())
