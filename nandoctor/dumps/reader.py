"""Reads a dump from an untrusted file, and weights from one or from the shards of a directory.

The container must be plain: nothing compressed, nothing twice, nothing beyond its end. The pickle is executed by an
unpickler that takes what is built from a table of stand-ins for each name, and bounds instructions, keys and copies.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nandoctor.dumps.classify import Contents, choose_state, sort_contents, sort_recorded
from nandoctor.dumps.dump import Dump
from nandoctor.dumps.file_type import Container, damaged, directory_error, hostile, open_container, regular_size
from nandoctor.dumps.recorded_format import Recorded, get, is_recorded
from nandoctor.dumps.signature import Provenance, check_signature
from nandoctor.dumps.unpickle import load_pickle
from nandoctor.errors import DumpError
from nandoctor.evidence.dump_summary import Layout
from nandoctor.machine import is_out_of_memory
from nandoctor.text import brief, brief_list, byte_size

if TYPE_CHECKING:
    import torch

State = Mapping[str, "torch.Tensor"]

# The names that transformers and diffusers give the weights of a whole model, and its shards, the likeliest first.
_WHOLE = (
    *("model.safetensors", "model-*-of-*.safetensors"),
    *("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model-*-of-*.safetensors"),
    *("pytorch_model.bin", "pytorch_model-*-of-*.bin"),
)
# Of safetensors: 100 bytes for each tensor, in the shards of the largest models 1 MB.
_MAX_HEADER_NBYTES = 16 << 20


def read_dump(path: str | os.PathLike[str], *, as_torch: bool = True) -> Dump:
    """Read the file at `path`; no code that it names is run.

    Writes to its tensors do not reach the file. Those of a file of 64 MB or more are mapped from it: the file must not
    change while they are in use. Without `as_torch` it is read for `summarize` alone, and torch is not imported if all
    of its tensors are dense.

    Raises:
        DumpError: the file is missing, damaged or hostile, is of another kind, or has neither weights nor arrays.
    """
    with _named(Path(path)):
        return _read(Path(path), as_torch=as_torch)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the path to the errors that are raised in this context."""
    try:
        yield
    except DumpError as error:
        # Not from the error without a path, which a notebook would show as well, a screen long.
        raise DumpError(f"{brief(str(path), 1000)}: {error.message}", remedy=error.remedy) from error.__cause__


def read_weights(path: str | os.PathLike[str]) -> State:
    """Read the weights at `path`, by their names there; no code that a file names is run.

    `path` is a safetensors file, a directory of Hugging Face, or a file of torch.save: a state dict, a dump,
    DeepSpeed's model states. Of several state dicts in a file, FILE:NAME is the one of that name.

    Raises:
        DumpError: it is none of these, a part of one, damaged or hostile.
    """
    file, _, name = str(path).rpartition(":")
    is_whole = Path(path).exists() or not Path(file).is_file()
    location, name = (Path(path), "") if is_whole else (Path(file), name)
    with _named(location):
        try:
            state = _read_directory(location) if location.is_dir() else _read_file(location, name)
        except OSError as error:
            raise DumpError(f"it cannot be read ({error.strerror}).", remedy="Check the path.") from error
        if not state:
            raise DumpError("it has no weights.", remedy="Name a file of weights.")
    return state


def _read_file(path: Path, name: str = "") -> State:
    """Return the weights in a file, even if it is one part of several; those of that name, if one is given."""
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    dump = _read(path, as_torch=True)
    states = {dump.state_name: dump.state, **dump.other_states}
    if name and name not in states:
        raise DumpError(f"it has no weights under {name!r}.", remedy=f"Their names are: {brief_list(states)}.")
    return states.get(name, dump.state) if dump.holds_weights else {}


def _read_directory(folder: Path) -> State:
    """Read the file or the shards of a whole model in a directory of Hugging Face."""
    files = next(filter(None, (sorted(folder.glob(name)) for name in _WHOLE)), [])
    if not files:
        raise directory_error(folder)
    _, is_shard, number = files[0].stem.rpartition("-of-")
    shards = [_read_file(file) for file in files]
    state = {name: tensor for shard in shards for name, tensor in shard.items()}
    if (is_shard and number != f"{len(files):05}") or len(state) < sum(map(len, shards)):
        raise DumpError(
            f"it has {len(files)} shards, not all of which are those of {brief(files[0].name)}.",
            remedy="Put all shards of one checkpoint, and no others, into the directory.",
        )
    return state


def _read_safetensors(path: Path) -> State:
    try:
        from safetensors import SafetensorError, safe_open  # an extra
    except ImportError as error:
        raise DumpError(
            "reading it needs the package safetensors.", remedy="Install it: pip install nandoctor[safetensors]."
        ) from error
    nbytes = regular_size(path)
    with path.open("rb") as head:
        claimed = int.from_bytes(head.read(8), "little")
    if claimed > _MAX_HEADER_NBYTES:
        raise hostile(f"its header claims {byte_size(claimed)}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except (SafetensorError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise damaged(f"safetensors cannot read it ({brief(str(error))})") from error
    return sort_contents({"weights": state}, nbytes, as_torch=True).states["weights"]


def _read(path: Path, *, as_torch: bool) -> Dump:
    container = open_container(path)
    saved = _load(container)
    if is_recorded(saved):
        contents = _sort_recorded(container, saved, as_torch=as_torch)
        layout: Layout = "nandoctor.dump/1"
        state_name = "state_dict"
        # By the signature over the bytes that were unpickled, and those that are mapped.
        data, begin = memoryview(container.data), container.pickle_offset
        provenance = check_signature(data[:begin], container.pickle, data[begin + len(container.pickle) :])
    else:
        contents = sort_contents(saved, container.nbytes, as_torch=as_torch)
        if not (contents.states or contents.arrays):
            names = [*contents.scalars, *contents.left_out]
            raise DumpError(
                f"it holds neither a state dict nor arrays, only: {brief_list(names) or 'nothing'}.",
                remedy='Save the weights with the batch: torch.save({"state_dict": model.state_dict(), ...}, path).',
            )
        layout = "batch-only" if not contents.states else "plain" if contents.arrays else "weights-only"
        state_name, provenance = choose_state(contents.states) if contents.states else "", Provenance()
    other_states = {name: other for name, other in contents.states.items() if name != state_name}
    return Dump(
        path=path,
        nbytes=container.nbytes,
        layout=layout,
        state=contents.states.get(state_name, {}),
        state_name=state_name,
        other_states=other_states,
        arrays=contents.arrays,
        with_grad=frozenset(contents.with_grad),
        scalars=contents.scalars,
        rng_states=tuple(contents.rng_states),
        moments=tuple(contents.moments),
        idle=contents.idle,
        tree=contents.tree,
        left_out=() if contents.recorded else (*other_states, *contents.left_out),
        missing=tuple(contents.left_out) if contents.recorded else (),
        recorded=contents.recorded or Recorded(),
        provenance=provenance,
    )


def _sort_recorded(container: Container, saved: Mapping[str, Any], *, as_torch: bool) -> Contents:
    nbytes = container.nbytes
    if saved.get("shards"):
        from nandoctor.dumps.tensors import join_shards

        joined = join_shards(saved, container.path, _load_recorded)
        saved = {**saved, "state_dict": {**get(saved, "state_dict", Mapping[str, Any], {}), **joined}}
        nbytes += sum(tensor.nbytes for tensor in joined.values())  # which the file that was named need not have
    return sort_recorded(saved, nbytes, as_torch=as_torch)


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
