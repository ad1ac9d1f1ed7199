"""`nandoctor inspect` reads a file without torch, and says of each what it says with it."""

import pickle
import subprocess
import sys
from pathlib import Path

import forge
import mutate
import numpy as np
import pytest
import torch
from forgery import make_project
from test_layouts import KINDS, files_with
from wording import plain_text

from nandoctor.dumps import unpickle
from nandoctor.dumps.dump import summarize
from nandoctor.dumps.reader import read_dump
from nandoctor.dumps.stored_tensor import StoredStorage, StoredTensor, TorchName, rebuild
from nandoctor.dumps.tensors import count_nonfinite, to_torch
from nandoctor.errors import DumpError
from nandoctor.views.inspect_dump import inspection_document

SAMPLES = sorted((Path(__file__).parents[2] / "sample_dumps").glob("*.pth"))
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from nandoctor.cli import main\n"
EACH = "for path in sys.argv[1:]: main(['inspect', path], standalone_mode=False)"


def told(read, path):
    """The summary of the file, or what is said where it is refused."""
    try:
        return summarize(read(path))
    except DumpError as error:
        return str(error)


def assert_same(path):
    looked = told(lambda path: read_dump(path, as_torch=False), path)
    assert looked == told(read_dump, path)
    return looked


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(make_project(tmp_path))
    monkeypatch.setenv("NANDOCTOR_CONFIG_DIR", str(tmp_path / "config"))
    return tmp_path


def test_ordinary_files_are_inspected_where_torch_cannot_be(project):
    """The samples, files of the recorder, and with arrays of numpy."""
    mutate.originals()
    paths = [*SAMPLES, *map(Path, ("plain.pth", "recorded.pth", "signed.pth"))]
    command = [sys.executable, "-c", WITHOUT_TORCH + EACH, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n  weights  ") == len(paths)
    assert "Your own recorder wrote it" in done.stdout


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_is_described_as_with_torch(path):
    assert assert_same(path).num_weights > 0


@pytest.mark.filterwarnings("ignore")  # torch's, for what it calls prototypes
@pytest.mark.parametrize("kind", KINDS)
def test_an_odd_tensor_is_described_as_with_torch(kind, project):
    for _ in files_with(kind, (("logit",), ("state_dict", "linear.weight"))):
        found = assert_same("case.pth")
        assert found
        if not isinstance(found, str):
            plain_text(inspection_document(found))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["bytes", "structures"])
def test_mutants_are_described_as_with_torch(kind, project):
    files, refused = mutate.originals(), []
    for number in range(40_000, 40_040):
        try:
            Path("case.pth").write_bytes(mutate.make(kind, number, files))
        except Exception:  # what torch.save refuses to write is no file
            continue
        said = assert_same("case.pth")
        refused += [said] if isinstance(said, str) else []
    assert refused
    assert all(text.count("\n") == 1 and text.replace("\n", "").isprintable() for text in refused)


DTYPES = [f"torch.{name}" for name in "float16 bfloat16 float32 float64 float8_e5m2 complex64 complex128".split()]
DTYPES += [f"torch.{name}" for name in "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()]


def stored(data, size, stride, offset, dtype):
    """A tensor without torch."""
    storage = StoredStorage(data=memoryview(data), offset=0, dtype="uint8")
    return rebuild(storage, offset, size, stride, False, None, TorchName(name=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_every_format_are_those_of_torch(dtype):
    """All codes of one and of two bytes, in the file and strided."""
    data = bytearray(np.arange(1 << 16, dtype="u2").tobytes() if "8" not in dtype else bytes(range(256)) * 16)
    itemsize = getattr(torch, dtype[6:]).itemsize
    rows = len(data) // itemsize // 16
    for size, stride, offset in (
        ((rows, 8), (16, 2), 1),
        ((3, rows), (0, 16), 0),
        ((0, 4), (4, 1), 0),
        ((1,), (1,), 9),
    ):
        found = stored(data, size, stride, offset, dtype)
        tensor = to_torch(found)
        assert (tuple(tensor.shape), tensor.numel(), tensor.nbytes) == (found.shape, found.numel(), found.nbytes)
        assert (str(tensor.dtype), tensor.stride()) == (str(found.dtype), stride)
        assert count_nonfinite(tensor) == found.count_nonfinite()
        if tensor.numel() == 1:
            assert repr(tensor.item()) == repr(found.item())
        if not tensor.is_complex():
            with np.errstate(invalid="ignore"):  # a signalling NaN
                assert repr(tensor.double().tolist()) == repr(found.numpy().astype("f8").tolist())


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [((5,), (1,), 0), ((4,), (1,), 1), ((2, 2), (3, 1), 0), ((1 << 40,), (1,), 0), ((1 << 62, 1 << 62), (1, 1), 0),
     ((-1,), (1,), 0), ((2,), (-1,), 1), ((1,), (1,), -1), ((2,), (1 << 62,), 0), ((1,), (1,), 1 << 62),
     ((2,), (1, 1), 0), ((2.0,), (1,), 0), ((True,), (1,), 0), ("2", (1,), 0), (None, (1,), 0),
     ((1,) * 70, (1,) * 70, 0)],
)  # fmt: skip
def test_a_tensor_that_lies_is_refused(size, stride, offset):
    with pytest.raises((ValueError, TypeError, OverflowError)):
        stored(bytearray(16), size, stride, offset, "torch.float32")


def test_the_names_of_torchs_values_are_all_known():
    named = {f"torch.{name}" for name in dir(torch) if unpickle._TORCH_VALUE.fullmatch(f"torch.{name}")}
    assert named == {str(value) for value in vars(torch).values() if isinstance(value, (torch.dtype, torch.qscheme))}
    for dtype in unpickle._STORAGE_DTYPES.values():
        assert TorchName(name=dtype).item_nbytes == getattr(torch, dtype).itemsize


REBUILD = forge.name("torch._utils", "_rebuild_tensor_v2")
SLOTS = b"N}" + forge.text("__defaults__") + b")s\x86"  # (None, {"__defaults__": ()}): what pickle sets as attributes
TRICKS = {
    "a state for a function": REBUILD + SLOTS + b"b",
    "a state for a list": b"]" + SLOTS + b"b",
    "items for a list": b"]" + b"K\x00K\x01s",
    "more for a mapping": b"}" + b"Na",
    "a call of a number": b"K\x01)R",
    "two of one": b"N2\x86",
    "a name from the stack": forge.text("builtins") + forge.text("set") + b"\x93",
    "a storage without a kind": b"(" + forge.text("storage") + b"N" + forge.text("0") + forge.text("cpu") + b"K\x01tQ",
}


@pytest.mark.parametrize("kind", TRICKS)
def test_instructions_that_no_dump_needs_are_refused(kind, project):
    pickled = b"}" + forge.text("state_dict") + TRICKS[kind] + b"s"
    Path("case.pth").write_bytes(forge.archive(pickled, [bytes(4)]))
    before = [vars(value).copy() for value in (rebuild, StoredTensor, pickle._Unpickler)]
    assert "case.pth: " in assert_same("case.pth")
    assert before == [vars(value) for value in (rebuild, StoredTensor, pickle._Unpickler)]
    assert rebuild.__defaults__ is None
