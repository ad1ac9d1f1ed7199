"""Shows each option of a function that takes `**options: Unpack[...]` in its signature and docstring.

`help()` and completion then know them, as type checkers do.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def takes_options(
    record: type, *, meanings: Mapping[str, str] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that replaces `**options` in a function's signature by the keys of a TypedDict.

    The defaults are None. In the docstring, `meanings` replace the line of `**options`. Any other keyword raises
    TypeError, as with explicit parameters.
    """
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=getattr(kind, "__forward_arg__", kind),
        )
        for name, kind in record.__annotations__.items()
    ]
    lines = [f"{name}: {(meanings or {}).get(name)}" for name in record.__annotations__]

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        own = inspect.signature(function)
        written = [item for item in own.parameters.values() if item.kind is not item.VAR_KEYWORD]
        named = [item for item in written if item.kind is item.KEYWORD_ONLY]
        signature = own.replace(parameters=[*written[: len(written) - len(named)], *options, *named])

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            return function(*args, **kwargs)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        doc = inspect.cleandoc(function.__doc__ or "")  # as Python 3.13 stores it
        checked.__doc__ = doc.replace("**options: the settings.", "\n    ".join(lines))
        return checked

    return decorate
