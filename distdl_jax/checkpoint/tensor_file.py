"""The safetensors format: 8 bytes with the length of the header, the header in JSON, and the tensors' bytes.

Written and read here because several workers write into one file, and read parts of it. Complex numbers, of which the
format knows only one kind, and that since recently, are pairs of floats: a dimension of 2 at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from distdl_jax.checkpoint.disk import read_exactly
from distdl_jax.errors import CheckpointError

METADATA = "__metadata__"
"""The one name in a header that is no tensor's."""

COMPLEX = "distdl_jax.complex"
"""Under which name the metadata of a file list (in JSON) the tensors that stand for complex numbers."""

CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""From numpy's names of dtypes to the format's."""

_PAGE = 4096
_MUCH = 2**20

_COMPLEX_OF = {"complex64": "float32", "complex128": "float64"}
_NAMES = {code: name for name, code in CODES.items()} | {"C64": "complex64"}


def dtype_named(name: str) -> np.dtype[Any]:
    """The dtype of a name, those of JAX's that numpy does not know included."""
    return np.dtype(getattr(jnp, name)) if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2") else np.dtype(name)


def is_storable(dtype: np.dtype[Any]) -> bool:
    """Whether the format, with pairs for complex numbers, has a place for it."""
    return dtype.name in CODES or dtype.name in _COMPLEX_OF


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file: its dtype by numpy's name and its shape, complex ones as such, and its first byte."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtype_named(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return prod(self.shape) * self.itemsize


def laid_out(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, Tensor], int]:
    """How tensors, given by name as dtype and shape, lie in one file: its first bytes, the tensors, and its size.

    Those of wide elements come first, so that each begins at a multiple of its element's size.
    """
    order = sorted(tensors, key=lambda name: (-dtype_named(tensors[name][0]).itemsize, name))
    header: dict[str, Any] = {}
    if pairs := [name for name in order if tensors[name][0] in _COMPLEX_OF]:
        header[METADATA] = {COMPLEX: json.dumps(pairs)}
    place, places = 0, {}
    for name in order:
        dtype, shape = tensors[name]
        tensor = Tensor(dtype, shape, place)
        stop = place + tensor.nbytes
        header[name] = {"data_offsets": [place, stop]}
        if dtype in _COMPLEX_OF:
            header[name] |= {"dtype": CODES[_COMPLEX_OF[dtype]], "shape": [*shape, 2]}
        else:
            header[name] |= {"dtype": CODES[dtype], "shape": list(shape)}
        places[name], place = tensor, stop
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format pads the header with spaces. Where there is much to write, it goes to whole pages.
    text += b" " * (-(8 + len(text)) % (_PAGE if place >= _MUCH else 8))
    begin = 8 + len(text)
    found = {name: Tensor(tensor.dtype, tensor.shape, begin + tensor.offset) for name, tensor in places.items()}
    return len(text).to_bytes(8, "little") + text, found, begin + place


def read_header(path: str) -> dict[str, Tensor]:
    """The tensors of a file, by name.

    **Raises:** `CheckpointError` where it is no safetensors file; `OSError` where it can't be read.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        head = bytearray(8)
        read_exactly(descriptor, [memoryview(head)], 0)
        length = int.from_bytes(head, "little")
        if length > size - 8:
            raise EOFError
        text = bytearray(length)
        read_exactly(descriptor, [memoryview(text)], 8)
        header = json.loads(bytes(text))
        pairs = set(json.loads((header.pop(METADATA, None) or {}).get(COMPLEX, "[]")))
        found = {name: _tensor(said, 8 + length, name in pairs) for name, said in header.items()}
    except (EOFError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path} is no safetensors file, or it is damaged: it has no header of one.") from None
    finally:
        os.close(descriptor)
    end = max((tensor.offset + tensor.nbytes for tensor in found.values()), default=0)
    if end > size:
        raise CheckpointError(f"{path} is damaged: it should have {end} bytes, and has {size}.")
    return found


def _tensor(said: Mapping[str, Any], begin: int, is_pair: bool) -> Tensor:
    dtype, shape = _NAMES[said["dtype"]], tuple(said["shape"])
    if is_pair:
        dtype, shape = {real: pair for pair, real in _COMPLEX_OF.items()}[dtype], shape[:-1]
    return Tensor(dtype, shape, begin + said["data_offsets"][0])


def bytes_of(block: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of a block, row-major; its own memory, where that is how it lies there."""
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
