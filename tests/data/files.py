"""An array in a file of any kind, and one that remembers what was asked for."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

KINDS = ("npy", "npz", "compressed.npz", "safetensors", "h5", "compressed.h5", "zarr", "root.zarr")


def write(path: Path, array: np.ndarray) -> None:
    """Write the array as x, in chunks that have nothing to do with any partition where the format has them."""
    chunks = tuple(-(-n // 3) for n in array.shape)
    match path.suffix:
        case ".npy":
            np.save(path, array)
        case ".npz":
            (np.savez_compressed if "compressed" in path.name else np.savez)(path, x=array)
        case ".safetensors":
            path.write_bytes(pytest.importorskip("safetensors.numpy").save({"x": array}))
        case ".h5":
            with pytest.importorskip("h5py").File(content := io.BytesIO(), "w") as file:
                options = {"chunks": chunks, "compression": "gzip"} if "compressed" in path.name else {}
                file.create_dataset("group/x", data=array, **options)
            path.write_bytes(content.getvalue())
        case ".zarr":
            zarr = pytest.importorskip("zarr")
            if "root" in path.name:
                zarr.create_array(path, data=array, chunks=chunks, overwrite=True)
            else:
                zarr.open_group(path, mode="w").create_array("x", data=array, chunks=chunks)


class Watched:
    """An array that remembers how many elements were asked for, each time."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.asked: list[int] = []

    def __getitem__(self, at: Any) -> np.ndarray:
        self.asked.append(self.array[at].size)
        return self.array[at]
