"""The primitives and the linear layer give what DistDL was recorded to give, forward and backward, on every worker.

One program holds all records, on the 13 workers that the largest of them needs. See tests/oracle/README.md.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from matrix.partitions import On
from matrix.programs import difference, run

import distdl_jax as dj
from distdl_jax import nn

ORACLE = Path(__file__).parents[1] / "oracle"
KINDS = ("bcast", "sumreduce", "allsum", "repart", "halo", "linear")
RECORDS = sorted(path.stem for path in ORACLE.glob("*.npz") if path.stem.startswith(KINDS))
Record = dict[str, np.ndarray]


def partition(record: Record, name: str) -> dj.CartesianPartition:
    shape, ranks = record[f"{name}_shape"].tolist(), record[f"{name}_ranks"].tolist()
    return On(tuple(shape), tuple(ranks)).partition(dj.Partition())


def operator(kind: str, record: Record, rank: int) -> Callable[[Any], Any]:
    """The library's operator for a record, a function of this worker's input."""
    P_x = partition(record, "P_x")
    if kind == "allsum":
        return nn.AllSumReduce(P_x, tuple(record["axes_reduce"].tolist()))
    if kind == "halo":
        return nn.HaloExchange(P_x, record[f"halo_shape_r{rank}"].tolist() if P_x.active else ())
    P_y = partition(record, "P_y")
    if kind == "repart":
        return nn.Repartition(P_x, P_y)
    if kind == "linear":
        sizes = int(record["in_features"]), int(record["out_features"])
        layer = nn.DistributedLinear(P_x, P_y, partition(record, "P_w"), *sizes, bias=bool(record["bias"]))
        return lambda given: layer(given["params"], given["x"])
    options = ("transpose_src", "transpose_dest", "preserve_batch")
    layer_type = nn.Broadcast if kind == "bcast" else nn.SumReduce
    return layer_type(P_x, P_y, **{name: bool(record[name]) for name in options if name in record})


def parameters(record: Record, rank: int, prefix: str = "") -> dict[str, np.ndarray]:
    """This worker's blocks of the recorded weight and bias, or of their gradients."""
    P_w = partition(record, "P_w")
    if not P_w.active:
        return {"weight": np.zeros(0), "bias": np.zeros(0)}
    row, column = P_w.index
    rows = np.array_split(record[f"{prefix}w"], P_w.shape[0])[row]
    bias = np.array_split(record[f"{prefix}b"], P_w.shape[0])[row]
    return {"weight": np.array_split(rows, P_w.shape[1], axis=1)[column], "bias": bias if column == 0 else np.zeros(0)}


def within(record: Record, name: str, rank: int) -> np.ndarray:
    """A halo record's array without its halo."""
    padded, widths = record[f"{name}_r{rank}"], record.get(f"halo_shape_r{rank}")
    if widths is None or len(widths) != padded.ndim:
        return padded
    places = zip(padded.shape, widths.tolist(), strict=True)
    return padded[tuple(slice(left, n - right) for n, (left, right) in places)]


def given(kind: str, record: Record, rank: int) -> Any:
    if kind == "linear":
        return {"params": parameters(record, rank), "x": record[f"x_r{rank}"]}
    return within(record, "x_padded", rank) if kind == "halo" else record[f"x_r{rank}"]


def wanted(kind: str, record: Record, rank: int) -> dict[str, Any]:
    dx: Any = within(record, "dx", rank)
    if kind == "linear":
        dx = {"params": parameters(record, rank, "d"), "x": dx}
    return {"y": record[f"y_r{rank}"], "dx": dx}


def test_there_are_records() -> None:
    """Of every kind that this file knows: six broadcasts, five sums, and so on."""
    counts = {kind: sum(name.startswith(kind) for name in RECORDS) for kind in KINDS}
    assert counts == {"bcast": 7, "sumreduce": 5, "allsum": 3, "repart": 4, "halo": 2, "linear": 3}


@pytest.mark.primitives
@pytest.mark.simulated(13)
def test_recorded() -> None:
    """Every record, with DistDL's own cotangent: output, gradient of the input and of the parameters, shapes too."""
    rank = dj.Partition().rank
    records = {name: dict(np.load(ORACLE / f"{name}.npz", allow_pickle=False)) for name in RECORDS}
    kinds = {name: name.split("_")[0] for name in RECORDS}
    operators = {name: operator(kinds[name], records[name], rank) for name in RECORDS}
    arguments = {name: given(kinds[name], records[name], rank) for name in RECORDS}
    cotangents = {name: records[name][f"dy_r{rank}"] for name in RECORDS}

    def program(arguments: Any, cotangents: Any) -> Any:
        results = {}
        for name, F in operators.items():
            y, pullback = jax.vjp(F, arguments[name])
            results[name] = {"y": y, "dx": pullback(cotangents[name].reshape(y.shape))[0]}
        return results

    got = run(program, *jax.device_put((arguments, cotangents)))
    wrong = []
    for name, record in records.items():
        want = wanted(kinds[name], record, rank)
        members = {int(worker) for key in ("P_x", "P_y", "P_w") for worker in record.get(f"{key}_ranks", ())}
        if rank not in members:  # it has no part in the layer, and gets back the placeholder that it gave
            want["y"] = np.zeros(got[name]["y"].shape)
            assert want["y"].size == 0
        if text := difference(got[name], want, 1e-14):
            wrong.append(f"{name}: {text}")
    assert not wrong, "\n".join(wrong)
