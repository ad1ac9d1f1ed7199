"""Writes dumps by hand: pickles opcode by opcode, archives member by member, and files as old or other programs do.

In: what a test wants to be wrong. Out: bytes and files.
"""

import io
import zipfile
from contextlib import contextmanager

import numpy as np
import torch

PROTOCOL_2 = b"\x80\x02"
REDUCE, STOP = b"R", b"."


def text(value):
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + len(data).to_bytes(4, "little") + data


def integer(value):
    size = (value.bit_length() + 8) // 8
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


def tuple_of(*items):
    return b"(" + b"".join(items) + b"t"


def call(function, *arguments):
    return function + tuple_of(*arguments) + REDUCE


def latin1(data):
    return call(name("_codecs", "encode"), text(data.decode("latin1")), text("latin1"))


def mapping(**items):
    return b"}(" + b"".join(text(key) + item for key, item in items.items()) + b"u"


def dtype(code, byte_order="<"):
    state = tuple_of(integer(3), text(byte_order), *([b"N"] * 3), *([integer(-1)] * 2), integer(0))
    return call(name("numpy", "dtype"), text(code), b"\x89", b"\x88") + state + b"b"


def array(shape, code, data, byte_order="<", core="numpy._core"):
    empty = call(
        name(f"{core}.multiarray", "_reconstruct"), name("numpy", "ndarray"), tuple_of(integer(0)), latin1(b"b")
    )
    sizes = shape if isinstance(shape, bytes) else tuple_of(*map(integer, shape))
    state = tuple_of(integer(1), sizes, dtype(code, byte_order), b"\x89", data if code == "O8" else latin1(data))
    return empty + state + b"b"


def tensor(size=(2,), stride=(1,), key="0", numel=2, storage=("torch", "FloatStorage")):
    return call(name("torch._utils", "_rebuild_tensor_v2"), *tensor_parts(size, stride, key, numel, storage))


def tensor_parts(size=(2,), stride=(1,), key="0", numel=2, storage=("torch", "FloatStorage")):
    reference = tuple_of(text("storage"), name(*storage), text(key), text("cpu"), integer(numel)) + b"Q"
    hooks = call(name("collections", "OrderedDict"))
    sizes, strides = tuple_of(*map(integer, size)), tuple_of(*map(integer, stride))
    return reference, integer(0), sizes, strides, b"\x89", hooks


def weights(**tensor_arguments):
    return mapping(weight=tensor(**tensor_arguments))


def archive(pickle, storages=(b"\x00" * 8,), compression=zipfile.ZIP_STORED, folder="dump", extra=()):
    """A zip archive as torch.save lays it out, around a pickle of one's own."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        file.writestr(f"{folder}/data.pkl", PROTOCOL_2 + pickle + STOP)
        file.writestr(f"{folder}/byteorder", "little")
        for index, data in enumerate(storages):
            file.writestr(f"{folder}/data/{index}", data)
        file.writestr(f"{folder}/version", "3\n")
        for member, data in extra:
            file.writestr(member, data)
    return buffer.getvalue()


def saved(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


@contextmanager
def without_checksums():
    """A context in which torch.save writes none: a byte that a test changes is then not told by it."""
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(True)


def step(arrays=True):
    """What the training script of the first dump saves."""
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    state = {key: value.clone() for key, value in net.state_dict().items()}
    logit = np.zeros((2, 1, 4, 4), "f4")
    logit[1, 0, 2] = np.nan
    batch = {"image": np.ones((2, 3, 4, 4), "f4"), "mask": np.zeros((2, 4, 4), "i8"), "logit": logit}
    return {"state_dict": state, **(batch if arrays else {})}
