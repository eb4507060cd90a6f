"""The safetensors format: 8 bytes with the length of the header, the header in JSON, and the tensors' bytes.

Implemented here because several workers write into one file, and read parts of it. Complex numbers, of which the format
supports only one kind, and only recently, are pairs of floats: a trailing dimension of 2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from distdl_jax.errors import CheckpointError
from distdl_jax.partitions.formats.plain_files import PlainFile, fields, integers, parsed, typed
from distdl_jax.text import quoted

METADATA = "__metadata__"
"""The only name in a header that is not a tensor's."""

COMPLEX = "distdl_jax.complex"
"""The name under which the metadata of a file list (in JSON) the tensors that represent complex numbers."""

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

_LARGEST_HEADER = 10**8
"""Maximum bytes of a header in the format."""

_COMPLEX_OF = {"complex64": "float32", "complex128": "float64"}
_PAIR_OF = {real: pair for pair, real in _COMPLEX_OF.items()}
_NAMES = {code: name for name, code in CODES.items()} | {"C64": "complex64"}


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype of a name, which may be one of JAX's that numpy does not know."""
    return np.dtype(getattr(jnp, name)) if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2") else np.dtype(name)


def is_storable(name: str) -> bool:
    """Return whether the format, with pairs for complex numbers, supports a dtype, by numpy's name."""
    return name in CODES or name in _COMPLEX_OF


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file: its dtype by numpy's name, its shape, both before conversion to pairs; its first byte."""

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
    """Lay out tensors, given by name as dtype and shape, in one file: return its header, the tensors, and its size.

    Tensors of wide elements come first, so that each is aligned to its element's size.
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
    # The format pads the header with spaces. A large file has its data at whole pages.
    text += b" " * (-(8 + len(text)) % (_PAGE if place >= _MUCH else 8))
    begin = 8 + len(text)
    placed = {name: Tensor(tensor.dtype, tensor.shape, begin + tensor.offset) for name, tensor in places.items()}
    return len(text).to_bytes(8, "little") + text, placed, begin + place


def read_header(file: PlainFile) -> dict[str, Tensor]:
    """Return the tensors of a file, by name. As required by the format, they fill the file without gaps.

    **Raises:** `CheckpointError` if it is not a safetensors file; `OSError` if it can't be read.
    """
    try:
        length = int.from_bytes(file.text(8), "little")
        if length > min(file.size - 8, _LARGEST_HEADER):
            raise EOFError
        tensors = _tensors(typed(parsed(file.text(length, 8)), dict), 8 + length)
    except (EOFError, ValueError) as error:
        reason = str(error) or "it does not have the header of one"
        raise CheckpointError(f"{file.path} is not a safetensors file, or it is damaged: {reason}.") from None
    end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=8 + length)
    if end != file.size:
        raise CheckpointError(f"{file.path} is damaged: it should have {end} bytes, but has {file.size}.")
    return tensors


def _tensors(header: dict[str, Any], begin: int) -> dict[str, Tensor]:
    """Return the tensors of a header; `ValueError` if it has others."""
    metadata = typed(header.pop(METADATA, None) or {}, dict)
    pairs = {typed(name, str) for name in typed(parsed(typed(metadata.get(COMPLEX, "[]"), str).encode()), list)}
    tensors, ranges = {}, []
    for name, entry in header.items():
        code, shape, offsets = fields(entry, "dtype", "shape", "data_offsets")
        dtype, lengths = _NAMES.get(typed(code, str)), integers(shape)
        if dtype is None:
            raise ValueError(f"{quoted(name)} has the unknown dtype {quoted(code)}")
        if name in pairs:
            if dtype not in _PAIR_OF or lengths[-1:] != (2,):
                raise ValueError(f"{quoted(name)} is not an array of pairs of floats")
            dtype, lengths = _PAIR_OF[dtype], lengths[:-1]
        first, last = integers(offsets) if len(typed(offsets, list)) == 2 else (0, -1)
        tensors[name] = Tensor(dtype, lengths, begin + first)
        if last - first != tensors[name].nbytes:
            raise ValueError(f"{quoted(name)} does not have the bytes of its shape")
        ranges.append((first, last))
    ranges.sort()
    if [0, *(last for _, last in ranges)][: len(ranges)] != [first for first, _ in ranges]:
        raise ValueError("its tensors are not contiguous")
    return tensors


def bytes_of(block: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of a block, row-major; its own memory, if that is contiguous."""
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
