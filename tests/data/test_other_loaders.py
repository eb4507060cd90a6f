"""torch's and grain's data sets and loaders as sources, where these packages are there: the real ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import patience, run
from launcher.settings import long_run

import distdl_jax as dj
from distdl_jax import TensorSpec
from distdl_jax.data import batches

IMAGES = np.arange(11 * 4 * 6, dtype=np.float32).reshape(11, 4, 6)
KEY = np.array([0, 42], np.uint32)


def checked(its: Any, columns: tuple[int, int]) -> list[int]:
    """The labels, in their order; each image is this worker's part of the one that its label says."""
    found: list[int] = []
    for images, labels in its:
        np.testing.assert_array_equal(images, IMAGES[np.asarray(labels)][:, :, slice(*columns)])
        found += labels.tolist()
    return found


def orders(source: Any, **arguments: Any) -> list[list[int]]:
    """The labels on three workers."""

    def program() -> list[int]:
        P = dj.Partition()
        images = TensorSpec((4, 6), P.grid([1, 3]))
        its = batches(source, [images, TensorSpec((), P, replicated=True)], **arguments)
        return checked(its, images.box[1])

    return dj.simulate(3, program)


class Samples:
    """A data set as both packages take it."""

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, i: int) -> Any:
        return [IMAGES[i], np.int32(i)]


def test_torch() -> None:
    """A Dataset of tensors, and a DataLoader that shuffles by a generator of its own."""
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.from_numpy(IMAGES), torch.arange(11, dtype=torch.int32))

    class Lists(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(data)

        def __getitem__(self, i: int) -> Any:
            return list(data[i])

    first, *others = orders(Lists(), batch_size=4, key=KEY)
    assert sorted(first) == list(range(11)) and others == [first] * 2

    class Seeded:
        def __iter__(self) -> Any:
            return iter(DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(3)))

    first, *others = orders(Seeded(), epochs=2)
    assert sorted(first) == sorted([*range(11)] * 2) and others == [first] * 2


def test_grain() -> None:
    grain = pytest.importorskip("grain")
    data = grain.MapDataset.source(Samples()).shuffle(seed=5)
    sampler = grain.samplers.IndexSampler(11, grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=1)
    loader = grain.DataLoader(
        data_source=Samples(), sampler=sampler, operations=[grain.transforms.Batch(4)], worker_count=0
    )
    for source, arguments in (
        (data, {"batch_size": 4, "key": KEY}),
        (data.to_iter_dataset().batch(4), {}),
        (loader, {}),
    ):
        first, *others = orders(source, **arguments)
        assert sorted(first) == list(range(11)) and others == [first] * 2


PROCESSES = """
import os, signal, sys
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
import distdl_jax as dj

class Data(Dataset):
    def __len__(self):
        return 11
    def __getitem__(self, i):
        if i == 10 and sys.argv[2] == "raises":
            raise ValueError("sample 10 is bad")
        return torch.full((4, 6), float(i)), i

if __name__ == "__main__":
    P = dj.Partition()
    columns = dj.TensorSpec((4, 6), P.grid([1, P.size]))
    specs = [columns, dj.TensorSpec((), P, replicated=True)]
    loader = DataLoader(Data(), 4, num_workers=2, multiprocessing_context=sys.argv[1], persistent_workers=True)
    seen, batches = [], dj.data.batches(loader, specs, epochs=2)
    with dj.checkpoint.Preemption() as preemption:
        for n, (images, labels) in enumerate(batches):
            assert (np.asarray(images) == np.asarray(labels)[:, None, None]).all()
            seen += labels.tolist()
            if sys.argv[2] == "told" and P.rank == 1 and n == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if preemption.stop():
                break
    assert seen == [*range(8)] if sys.argv[2] == "told" else seen == [*range(11)] * 2
    if P.rank == 0:
        print("ended well", flush=True)
"""


@pytest.mark.limit(900)
@pytest.mark.skipif(not long_run(), reason="several processes for each worker, which start for long")
@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("what", ["well", "told", "raises"])
def test_processes_of_torch_under_the_watchdog(context: str, what: str, tmp_path: Path) -> None:
    """They are no workers: their end and their signals end no job, but what they raise does."""
    pytest.importorskip("torch")
    (tmp_path / "program.py").write_text(PROCESSES)
    status, output = run(2, tmp_path / "program.py", context, what, limit=patience(200))
    if what == "raises":
        assert status != 0 and "sample 10 is bad" in output, output
    else:
        assert status == 0 and "ended well" in output, output
