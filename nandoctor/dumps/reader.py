"""Reads a dump from an untrusted file.

The container must be plain: nothing compressed, nothing twice, nothing beyond its end. The pickle is executed by an
unpickler that takes what is built from a table of stand-ins for each name, and bounds instructions, keys and copies.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nandoctor.dumps.classify import choose_state, sort_contents, sort_recorded
from nandoctor.dumps.dump import Dump
from nandoctor.dumps.file_type import Container, open_container
from nandoctor.dumps.recorded_format import get, is_recorded
from nandoctor.dumps.signature import check_signature
from nandoctor.dumps.trees import KIND
from nandoctor.dumps.unpickle import load_pickle
from nandoctor.errors import DumpError
from nandoctor.machine import is_out_of_memory
from nandoctor.text import brief, brief_list, byte_size

if TYPE_CHECKING:
    import torch


def read_dump(path: str | os.PathLike[str], *, as_torch: bool = True) -> Dump:
    """Read the file at `path`; no code that it names is run.

    Writes to its tensors do not reach the file. Those of a file of 256 MB or more are mapped from it: the file must not
    change while they are in use. Without `as_torch` it is read for `summarize` alone, and torch is not imported if all
    of its tensors are dense.

    Raises:
        DumpError: the file is missing, damaged or hostile, is of another kind, or has neither weights nor arrays.
    """
    with named(Path(path)):
        container = open_container(Path(path))
        return _make_dump(container, _load(container), as_torch=as_torch)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the path to the errors that are raised in this context."""
    try:
        yield
    except DumpError as error:
        # Not from the error without a path, which a notebook would show as well, a screen long.
        raise DumpError(f"{brief(str(path), 1000)}: {error.message}", remedy=error.remedy) from error.__cause__


def read_state(path: Path) -> Mapping[str, torch.Tensor]:
    """Return the weights in a file of torch.save, even if it is one part of several; no code that it names is run.

    Raises:
        DumpError: as `read_dump`.
    """
    container = open_container(path)
    dump = _make_dump(container, _load(container), as_torch=True)
    return dump.state if dump.holds_weights else {}


def _make_dump(container: Container, saved: object, *, as_torch: bool) -> Dump:
    if is_recorded(saved):
        return _make_recorded(container, saved, as_torch=as_torch)
    contents = sort_contents(saved, container.nbytes, as_torch=as_torch)
    if not (contents.states or contents.arrays):
        names = [*contents.scalars, *contents.left_out, *_list_objects(saved)]
        raise DumpError(
            f"it holds neither a state dict nor arrays, only: {brief_list(names) or 'nothing'}.",
            remedy='Save the weights with the batch: torch.save({"state_dict": model.state_dict(), ...}, path).',
        )
    state_name = choose_state(contents.states) if contents.states else ""
    other_states = {name: other for name, other in contents.states.items() if name != state_name}
    return Dump(
        path=container.path,
        nbytes=container.nbytes,
        layout="batch-only" if not contents.states else "plain" if contents.arrays else "weights-only",
        state=contents.states.get(state_name, {}),
        state_name=state_name,
        other_states=other_states,
        arrays=contents.arrays,
        scalars=contents.scalars,
        rng_states=tuple(contents.rng_states.values()),
        moments=tuple(contents.moments),
        tree=contents.tree,
        left_out=(*other_states, *contents.left_out),
    )


def _list_objects(saved: Any) -> list[str]:
    """Return the classes of the objects at the top level of the contents."""
    items = (saved, *saved.values()) if isinstance(saved, Mapping) else ()
    return sorted({f"an object of {item[KIND]}" for item in items if isinstance(item, Mapping) and KIND in item})


def _make_recorded(container: Container, saved: Mapping[str, Any], *, as_torch: bool) -> Dump:
    nbytes, data, begin = container.nbytes, memoryview(container.data), container.pickle_offset
    if saved.get("shards"):
        from nandoctor.dumps.shards import join_shards

        joined = join_shards(saved, container.path, _load_recorded)
        saved = {**saved, "state_dict": {**get(saved, "state_dict", Mapping[str, Any], {}), **joined}}
        nbytes += sum(tensor.nbytes for tensor in joined.values())  # which the file that was named need not have
    contents, recorded = sort_recorded(saved, nbytes, as_torch=as_torch)
    return Dump(
        path=container.path,
        nbytes=container.nbytes,
        layout="nandoctor.dump/1",
        state=contents.states["state_dict"],
        state_name="state_dict",
        arrays=contents.arrays,
        scalars=contents.scalars,
        rng_states=recorded.rng.torch_states if recorded.rng is not None else (),
        moments=tuple(contents.moments),
        recorded=recorded,
        # By the signature over the bytes that were unpickled, and those that are mapped.
        provenance=check_signature(data[:begin], container.pickle, data[begin + len(container.pickle) :]),
        missing=tuple(contents.left_out),
    )


def _load_recorded(path: Path) -> Mapping[str, Any]:
    """Return what another rank recorded of the step; nothing in it is run, so its signature does not matter."""
    saved = _load(open_container(path))
    if not is_recorded(saved):
        raise DumpError(
            f"{brief(path.name)} beside it was not written by the recorder.",
            remedy="Put the files of all ranks of one step into one folder.",
        )
    return saved


def _load(container: Container) -> object:
    """Return what the file holds; nothing that it names is run."""
    try:
        return load_pickle(container)
    except DumpError:
        raise
    except Exception as error:  # the parts of a damaged file may raise anything
        detail = brief(": ".join([type(error).__name__, *str(error).splitlines()[:1]]))
        if is_out_of_memory(error):
            raise DumpError(
                f"there is not enough memory to read its {byte_size(container.nbytes)} ({detail}).",
                remedy="Read it on a machine with more memory, or stop other programs.",
            ) from error
        raise DumpError(
            f"its contents cannot be rebuilt ({detail}).",
            remedy="If it is damaged, copy it again. It may also come from a newer torch.",
        ) from error
