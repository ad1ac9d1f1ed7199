"""Broken and hostile files: each has one error that says what is wrong and what to do, whatever the file does."""

import io
import os
import pickle
import resource
import zipfile

import forge
import pytest
import torch

from nandoctor.dumps.reader import read_dump
from nandoctor.errors import DumpError

pytestmark = pytest.mark.usefixtures("here")

PATCH_OFFSET_OF_FLAGS = 8


def scripted():
    """What `torch.jit.save` writes, whose code is compressed."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), file)
    return file.getvalue()


def encrypted():
    """The encryption flag set in the zip directory, as an archiver with a password does."""
    data = bytearray(forge.archive(forge.weights()))
    data[data.index(b"PK\x01\x02") + PATCH_OFFSET_OF_FLAGS] |= 1
    return bytes(data)


def reaching_beyond():
    """A member whose size in the directory is larger than the file."""
    data = bytearray(forge.archive(forge.weights()))
    entry = data.index(b"PK\x01\x02")
    data[entry + 20 : entry + 28] = (1 << 24).to_bytes(4, "little") * 2
    return bytes(data)


def twice():
    with pytest.warns(UserWarning, match="Duplicate name"):
        return forge.archive(forge.weights(), extra=[("dump/data.pkl", b"\x80\x02}.")])


def doubling(codec):
    """Each step encodes the bytes of the step before: 2 ** 60 of them in the end, from a kilobyte."""
    encode = forge.name("_codecs", "encode")
    grow = encode + b"h\x00" + forge.text(codec) + b"\x86Rq\x00"
    return forge.latin1(b"ab") + b"q\x00" + grow * 60


def nested_key():
    """A tuple of two references to the tuple before, 60 times, hashed as a key: 2 ** 60 steps."""
    return b")q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"}h\x00K\x01s"


def nested_lists():
    """A list of ten references to the list before, 60 times: 10 ** 60 values to walk."""
    grow = b"](" + b"h\x00" * 10 + b"eq\x00"
    return forge.mapping(weights=forge.tuple_of(b"]q\x00", grow * 60))


def copied():
    """One list of a megabyte, copied into a new container at each of many calls."""
    items = b"](" + b"K\x01" * 100_000 + b"eq\x00"
    copy = forge.name("builtins", "set") + b"h\x00\x85R"
    return items + b"](" + copy * 5_000 + b"e"


def encoded_again():
    """One text of half a megabyte, had_inf_input into new bytes at each of many calls."""
    encode = forge.name("_codecs", "encode") + b"h\x00h\x01\x86R"
    return forge.text("a" * (1 << 19)) + b"q\x00" + forge.text("latin1") + b"q\x01](" + encode * 5_000 + b"e"


def by_way_of_torch():
    """A tensor of 100,000 dimensions made a thousand times, in a format that is not read."""
    storage, sizes = forge.tensor_parts(storage=("torch", "QInt8Storage"), numel=8)[0], b"(" + b"K\x01" * 100_000 + b"t"
    tensor = forge.tuple_of(storage, b"K\x00", sizes, b")NN")
    arguments = forge.tuple_of(forge.name("torch._utils", "_rebuild_tensor_v2"), b"N", tensor, b"N") + b"q\x01"
    function = forge.name("torch._tensor", "_rebuild_from_type_v2") + b"q\x00"
    return function + arguments + b"](" + b"h\x00h\x01R" * 1000 + b"e"


def shared_bytes():
    """Arrays that share their bytes, each of which becomes a tensor of its own."""
    nbytes = 1 << 20
    first = forge.array((nbytes,), "u1", bytes(nbytes)).replace(b"Rtb", b"Rq\x00tb")
    again = forge.array((nbytes,), "O8", b"h\x00").replace(b"O8", b"u1")
    return forge.mapping(a=first, **{f"a{i}": again for i in range(9)})


def hidden_directory():
    """A directory whose size stands in the record before its locator, which ends with the magic of such a record."""
    sizes = (1 << 40).to_bytes(8, "little") + bytes(8)
    record = b"PK\x06\x06" + (44).to_bytes(8, "little") + bytes(28) + sizes
    locator = b"PK\x06\x07" + bytes(4) + b"PK\x06\x06" + bytes(4) + b"\x01\0\0\0"
    return forge.archive(b"}")[:-22] + record + locator + b"PK\x05\x06" + bytes(4) + b"\xff" * 12 + bytes(2)


def endless_dtype():
    dtype = forge.name("torch", "int8" + "0" * 500_000)
    return forge.mapping(x=forge.call(forge.name("torch._utils", "_rebuild_tensor_v3"), *forge.tensor_parts(), dtype))


def containing_itself():
    return b"}q\x00" + forge.text("again") + b"h\x00s"


def indirect_codec():
    """The codec called by one of torch's own functions instead of by the pickle."""
    arguments = forge.tuple_of(forge.text("ab"), forge.text("hex"))
    rebuild = forge.name("torch._tensor", "_rebuild_from_type_v2")
    return forge.call(rebuild, forge.name("_codecs", "encode"), forge.name("torch", "Tensor"), arguments, b"}")


def endless_sparse():
    """Index and value of one element, each expanded to as many as one likes."""
    indices = forge.tensor(size=(1, HUGE), stride=(0, 0), storage=("torch", "LongStorage"), numel=1)
    values = forge.tensor(size=(HUGE,), stride=(0,))
    layout = forge.call(forge.name("torch.serialization", "_get_layout"), forge.text("torch.sparse_coo"))
    data = forge.tuple_of(indices, values.replace(forge.text("0"), forge.text("1")), forge.tuple_of(forge.integer(4)))
    return forge.call(forge.name("torch._utils", "_rebuild_sparse_tensor"), layout, data)


def array_file(*arguments, **options):
    return forge.archive(forge.mapping(state_dict=forge.weights(), image=forge.array(*arguments, **options)))


def deep(key="down", depth=80):
    value = torch.zeros(2)
    for _ in range(depth):
        value = {key: value}
    return forge.saved({"state_dict": {"a.weight": torch.zeros(2)}, "batch": value})


def saved_state(**others):
    return forge.saved({"state_dict": {"a.weight": torch.zeros(2)}, **others})


HUGE = 1 << 40
FILES = {
    # Not a file of torch's at all
    "empty": (lambda: b"", "the file is empty", "Copy it again"),
    "text": (lambda: b"epoch 3 loss nan\n", "a text file", "torch.save"),
    "lfs pointer": (lambda: b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer", "git lfs pull"),
    "gzip": (lambda: b"\x1f\x8b\x08" + bytes(64), "compressed with gzip", "gunzip /.*dump.pth"),
    "TorchScript": (scripted, "a TorchScript archive", "torch.jit.load"),
    "safetensors": (
        lambda: (64).to_bytes(8, "little") + b'{"a":{}}' + bytes(64),
        "of which only weights",
        "--weights /.*dump.pth",
    ),
    "noise": (lambda: bytes(range(256)) * 4, "not a file that torch.save wrote", "torch.save"),
    "before torch 1.6": (
        lambda: forge.saved(forge.step(), _use_new_zipfile_serialization=False),
        "the format that torch.save wrote before torch 1.6",
        "Save it anew.*weights_only=False",
    ),
    "plain pickle": (lambda: pickle.dumps({"image": [1.0]}), "a plain pickle", "torch.save"),
    # Damaged
    "one byte": (lambda: b"P", "cut short after 1 bytes", "Copy it again"),
    "cut zip": (lambda: forge.saved(forge.step())[:-200], "zip directory is missing", "Copy it again"),
    "compressed zip": (
        lambda: forge.archive(forge.weights(), compression=zipfile.ZIP_DEFLATED),
        "parts are compressed",
        "without compression",
    ),
    "encrypted zip": (encrypted, "compressed or encrypted", "without compression"),
    "member beyond the end": (reaching_beyond, "reaches beyond its end", "Copy it again"),
    "member twice": (twice, "occurs twice", "Copy it again"),
    "storage too short": (
        lambda: forge.archive(forge.weights(size=(64,), numel=64)),
        "has the wrong size",
        "Copy it again",
    ),
    "size beyond storage": (lambda: forge.archive(forge.weights(size=(HUGE,))), "cannot be rebuilt", "copy it again"),
    "unknown opcode": (lambda: forge.archive(b"\xff"), "which torch.save never writes", "copy it again"),
    "array of negative shape": (lambda: array_file((-2, -1), "f4", bytes(8)), "contradict each other", "Copy it again"),
    "array of odd byte order": (lambda: array_file((2,), "f4", bytes(8), byte_order="O"), "contradict", "Copy it"),
    # Wants code, and holds nothing else
    "os.system": (
        lambda: forge.archive(forge.call(forge.name("posix", "system"), forge.text("touch owned"))),
        "neither a state dict nor arrays, only: the dump .posix.system.",
        "state_dict",
    ),
    "protocol 4": (lambda: saved_state() and forge.saved({"a": 1}, pickle_protocol=4), "protocol 4", "pickle_protocol"),
    # Bombs
    "hex codec": (lambda: forge.archive(doubling("hex")), "another codec than latin1", "copy it again"),
    "codec by way of torch": (
        lambda: forge.archive(indirect_codec()),
        "exhaust memory.*by way of torch",
        "Do not open it",
    ),
    "bytes": (
        lambda: forge.archive(forge.call(forge.name("__builtin__", "bytes"), forge.integer(HUGE))),
        "cannot be rebuilt .TypeError",
        "copy it again",
    ),
    "nested key": (lambda: forge.archive(nested_key()), "exhaust memory.*short tuple", "Do not open it"),
    "nested lists": (lambda: forge.archive(nested_lists()), "exhaust memory.*expands", "Do not open it"),
    "copies": (lambda: forge.archive(copied()), "exhaust memory.*copy more", "Do not open it"),
    "encoded again": (lambda: forge.archive(encoded_again()), "exhaust memory.*copy more", "Do not open it"),
    "sizes in arguments": (lambda: forge.archive(by_way_of_torch()), "exhaust memory.*copy more", "Do not open it"),
    "shared bytes": (lambda: forge.archive(shared_bytes()), "exhaust memory.*copy more", "Do not open it"),
    "directory behind another": (hidden_directory, "zip directory claims 1,099,511,627,776 bytes", "one flat dict"),
    "names of many keys": (lambda: deep("n" * 500, 50), "name in it is too long", "Do not open"),
    "endless dtype": (lambda: forge.archive(endless_dtype()), "is a tensor of torch.int80", "Save dense tensors"),
    "mapping in itself": (lambda: forge.archive(containing_itself()), "nested too deeply", "flat dict"),
    "deep nesting": (deep, "nested too deeply", "flat dict"),
    "many values": (
        lambda: saved_state(steps=[[None, [step]] for step in range(40_000)]),
        "more values than any training step",
        "flat dict",
    ),
    "expanded tensor": (
        lambda: forge.archive(forge.weights(size=(HUGE,), stride=(0,))),
        "claim 4.4 TB, up to 'weight'",
        "contiguous",
    ),
    "expanded sparse tensor": (
        lambda: forge.archive(forge.mapping(weight=endless_sparse()), storages=[bytes(8)] * 2),
        "claim 13.2 TB, up to 'weight'",
        "contiguous",
    ),
    "tensor from a number": (
        lambda: forge.archive(forge.mapping(weight=forge.call(forge.name("torch", "Tensor"), forge.integer(HUGE)))),
        "only: weight .torch.Tensor.",
        "state_dict",
    ),
    # Sound, but not a dump
    "list": (lambda: forge.saved([1.0, "a"]), "holds a list, not a dict", "torch.save"),
    "tensor": (lambda: forge.saved(torch.zeros(2)), "holds one tensor, not", "torch.save"),
    "empty dict": (lambda: forge.saved({}), "neither a state dict nor arrays, only: nothing", "state_dict"),
    "no state dict": (
        lambda: forge.saved({"step": 3, "optimizer": {"state": {}, "param_groups": []}}),
        "neither a state dict nor arrays, only: step and optimizer",
        "state_dict",
    ),
    "numbers in the state dict": (
        lambda: forge.saved({"state_dict": {"a.weight": torch.zeros(2), "a.bias": 3}}),
        "'state_dict' holds values that are not tensors: a.bias",
        "model.state_dict\\(\\)",
    ),
    "state dict of meta tensors": (
        lambda: forge.saved({"state_dict": {"a.weight": torch.zeros(2, device="meta")}}),
        "'a.weight' is a tensor on the meta device, without values",
        "after they were loaded",
    ),
    "terminal escapes": (
        lambda: saved_state(**{"\x1b[2Jimage": 1}),
        r"control characters: '\\x1b\[2Jimage'",
        "Do not open",
    ),
    "megabyte name": (lambda: saved_state(**{"x" * (1 << 20): 1}), "too long .*xxx…xxx", "Do not open"),
    "the same name twice": (
        lambda: saved_state(**{"a.b": 1, "a": {"b": 2}}),
        "two values in it are called 'a.b'",
        "name",
    ),
}


def test_code_that_a_file_names_is_not_run_beside_what_is_read(tmp_path):
    """A call becomes a record of its name, and so does a name alone."""
    named = {
        "called": forge.call(forge.name("posix", "system"), forge.text("touch owned")),
        "eval": forge.name("__builtin__", "eval"),
        "objects": forge.array((1,), "O8", b"]" + forge.name("posix", "system") + b"a"),
        "model": forge.call(forge.name("__main__", "make_model")),
    }
    (tmp_path / "dump.pth").write_bytes(forge.archive(forge.mapping(state_dict=forge.weights(), **named)))
    dump = read_dump(tmp_path / "dump.pth")
    assert list(dump.state) == ["weight"]
    told = (
        "called (posix.system)",
        "eval (a builtins.eval)",
        "objects (an array of O8)",
        "model (__main__.make_model)",
    )
    assert dump.left_out == told
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "many values")) for kind in FILES]
)
def test_a_broken_file_has_one_clear_error(kind, tmp_path):
    make, message, remedy = FILES[kind]
    path = tmp_path / "dump.pth"
    path.write_bytes(make())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with pytest.raises(DumpError, match=f"dump.pth: .*({message})") as caught:
        read_dump(path)

    assert caught.match(f"\n.*({remedy})")
    assert len(str(caught.value).splitlines()) == 2
    assert len(str(caught.value)) < 4000
    assert str(caught.value).replace("\n", "").isprintable()
    assert caught.value.exit_code == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 300 * 1024
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path, "no such file"),
        (lambda path: path.mkdir() or path, "a directory"),
        (lambda path: os.mkfifo(path) or path, "a device or a pipe"),
        (lambda path: path.symlink_to(path) or path, "cannot be opened"),
        (lambda path: path.with_name("a\0b"), "cannot be opened"),
        (lambda path: path.with_name("n" * 5000), "cannot be opened"),
        (lambda path: path.with_name("\x1b[2J"), r"\\x1b\[2J: there is no such file"),
    ],
    ids=["missing", "directory", "pipe", "circular link", "null character", "endless name", "terminal escape"],
)
def test_a_path_that_is_no_file_has_one_clear_error(make, message, tmp_path):
    path = make(tmp_path / "dump.pth")
    with pytest.raises(DumpError, match=message) as caught:
        read_dump(path)
    assert str(caught.value).replace("\n", "").isprintable()


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    path = tmp_path / "dump.pth"
    path.write_bytes(forge.saved(forge.step()))

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", refuse)  # the superuser of a container may read everything
    with pytest.raises(DumpError, match="no permission to read it") as caught:
        read_dump(path)
    assert "chmod" in caught.value.remedy
