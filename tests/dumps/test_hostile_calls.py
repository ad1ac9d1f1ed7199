"""Files whose pickles call what they may with what no honest one has: each is refused by both readers, without harm.

Memory and time are bounded by what is refused: with the calls obeyed, those over a tensor or a text take gigabytes.
"""

import forge
import pytest
import torch

from nandoctor.dumps.reader import read_dump
from nandoctor.errors import DumpError

SET = forge.name("builtins", "set")
PARAMETER = forge.name("torch._utils", "_rebuild_parameter")
EXPANDED = forge.tensor(size=(10**8,), stride=(0,))
COLLIDING = b"".join(forge.integer(1 + number * (2**61 - 1)) for number in range(8, 3000))
NO_ITEMS = "arguments that are no containers"
CONTRADICTION = "the shape, the type and the bytes of an array contradict each other"


def with_nest(call):
    """A call with a list of ten references to the list before, 60 times: its text is endless."""
    return forge.tuple_of(forge.tuple_of(b"]q\x00", (b"](" + b"h\x00" * 10 + b"eq\x00") * 60), call)


def filled_later(callee, items):
    """A call with a list that was empty when it was put into the tuple of arguments."""
    return b"](]q\x01\x85q\x02h\x01(" + items + b"e" + callee + b"h\x02Re"


def sharing_a_state():
    """Many records that each copy the same items, which came after their state was counted."""
    record = forge.name("collections", "UserDict") + b")\x81h\x01b"
    filled = b"h\x02(" + b"".join(forge.text(str(number)) + b"N" for number in range(1500)) + b"u"
    return b"](}q\x01" + forge.text("data") + b"}q\x02s" + filled + record * 1500 + b"e"


def array_with(shape=b"K\x00\x85", byte_order=None, code=None, fortran=b"\x89"):
    dtype = forge.call(forge.name("numpy", "dtype"), forge.text("f4"), b"\x89", b"\x88")
    state = forge.tuple_of(forge.integer(3), byte_order or forge.text("<"), *[b"N"] * 6)
    made = forge.call(forge.name("numpy.core.multiarray", "_reconstruct"))
    empty = forge.call(forge.name("builtins", "bytes"))
    return made + forge.tuple_of(b"K\x01", shape, dtype + state + b"b", fortran, empty) + b"b"


CALLS = {
    "a dtype that is a nest": (
        with_nest(forge.call(forge.name("torch._utils", "_rebuild_tensor_v3"), *forge.tensor_parts(), b"h\x00")),
        "expands far beyond the size of the file",
    ),
    "a device that is a nest": (with_nest(forge.call(forge.name("torch", "device"), b"h\x00")), "no place of a device"),
    "a set of a tensor": (forge.call(SET, EXPANDED), NO_ITEMS),
    "a key of many numbers": (b"}" + forge.tuple_of(*[forge.integer(1)] * 17) + b"Ns", "nor a short tuple of these"),
    "a tensor as arguments, by way of torch": (
        forge.call(forge.name("torch._tensor", "_rebuild_from_type_v2"), PARAMETER, b"N", EXPANDED, b"N"),
        "by way of torch|no tuple of arguments",
    ),
    "a tensor as the state of an array": (
        forge.call(forge.name("numpy.core.multiarray", "_reconstruct")) + EXPANDED + b"b",
        "a state for a PickledArray",
    ),
    "a tensor as the parts of a sparse one": (
        forge.call(
            forge.name("torch._utils", "_rebuild_sparse_tensor"),
            forge.call(forge.name("torch.serialization", "_get_layout"), forge.text("torch.sparse_coo")),
            EXPANDED,
        ),
        "a sparse tensor has no parts",
    ),
    "a storage with a tail": (forge.tensor().replace(b"tQ", b"N" * 9 + b"tQ"), "no storage of its own"),
    "a function out of a parameter": (forge.call(PARAMETER, SET), "a parameter without a tensor"),
    "a set of what came later": (filled_later(SET, COLLIDING), "an integer of more than 64 bits as a key"),
    "an ordered dict of pairs": (
        forge.call(forge.name("collections", "OrderedDict"), b"](" + COLLIDING + b"e"),
        "takes 0 positional arguments",
    ),
    "a state for many": (sharing_a_state(), "its calls copy more than the file holds"),
    "a quantized tensor without a scale": (
        forge.call(
            forge.name("torch._utils", "_rebuild_tensor_v3"), *forge.tensor_parts(), forge.name("torch", "qint8")
        ),
        "'image' is a tensor of torch.qint8, which is not read",
    ),
    "an instruction of other pickles": (forge.tensor() + b"\x82\x01", "instruction b'.x82', which torch.save"),
    "an array in no order": (array_with(byte_order=b"]"), CONTRADICTION),
    "an array of sizes beyond any integer": (
        array_with(shape=forge.tuple_of(forge.integer(0), forge.integer(1 << 70))),
        CONTRADICTION,
    ),
}


@pytest.mark.parametrize("read", [lambda path: read_dump(path, as_torch=False), read_dump])
@pytest.mark.parametrize("kind", CALLS)
def test_a_call_that_no_honest_file_has(kind, read, tmp_path):
    made, message = CALLS[kind]
    (tmp_path / "dump.pth").write_bytes(forge.archive(forge.mapping(state_dict=forge.weights(), image=made)))
    with pytest.raises(DumpError, match=message):
        read(tmp_path / "dump.pth")


@pytest.mark.parametrize("add", [0.5, 1 << 17, -(1 << 17)])
def test_numbers_that_could_be_chosen_as_keys(add, tmp_path):
    """Ten thousand, each of which can be made to walk through the whole table; as many values are no harm."""
    numbers = [number + add if add > 0 else add - number for number in range(10_001)]
    torch.save({"state_dict": {"weight": torch.ones(2)}, "seen": numbers}, tmp_path / "values.pth")
    torch.save({"state_dict": {"weight": torch.ones(2)}, "seen": set(numbers)}, tmp_path / "keys.pth")
    assert len(read_dump(tmp_path / "values.pth").scalars["seen"]) == 10_001
    with pytest.raises(DumpError, match="thousands of keys whose hashes it could have chosen"):
        read_dump(tmp_path / "keys.pth")


def test_honest_calls_are_obeyed(tmp_path):
    kept = {"seen": {1, 2}, "size": torch.Size([1, 2])}
    torch.save({"state_dict": {"weight": torch.ones(2)}, **kept}, tmp_path / "new.pth")
    assert read_dump(tmp_path / "new.pth").scalars == {"seen": [1, 2], "size": [1, 2]}
