"""What every worker of the original got, in each recorded convolution and pooling, every worker gets here."""

from ast import literal_eval
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from convolution.programs import block, run, slices

import distdl_jax as dj
from distdl_jax import nn

ORACLE = Path(__file__).parents[2] / "oracle"
RECORDED = {
    4: "fconv1d_P3_k4p1_even fconv1d_P4_k3p1 fconv2d_P2x2_k3p1 fconv2d_P2x2_k7p3s2 fconv3d_P2x2x1_k345 "
    "maxpool1d_P3_k3s2p1 maxpool2d_P2x2_k3s2d2 avgpool2d_P2x2_k3s1p1",
    12: "cconv1d_x1x2_y1x3_w3x2 cconv2d_x1x3_y1x2_w2x3_overlap gconv1d_co2_ci2",
    16: "gconv2d_co2_ci2_s2d2",
}
ARGUMENTS = ("kernel_size", "stride", "padding", "dilation")


def test_all_records_are_played() -> None:
    found = {path.stem for path in ORACLE.glob("*.npz") if "conv" in path.stem or "pool" in path.stem}
    assert found == {name for names in RECORDED.values() for name in names.split()}


@pytest.fixture(scope="module")
def recorded() -> dict[str, dict[str, Any]]:
    """All records, read once: Python 3.11 can't parse in two threads at a time, and numpy parses what it reads."""
    found = {}
    for name in (name for names in RECORDED.values() for name in names.split()):
        with np.load(ORACLE / f"{name}.npz", allow_pickle=False) as file:
            record = dict(file)
        found[name] = record | {key: literal_eval(str(told)) for key, told in record.items() if "local_shapes" in key}
    return found


@pytest.mark.simulated(4, 12, 16)
def test_recorded_layers(world_size: int, recorded: dict[str, dict[str, Any]]) -> None:
    """Output, input, weight and bias gradient, per worker, in float64; zero-volume outputs keep their shapes."""
    records = {name: recorded[name] for name in RECORDED[world_size].split()}
    P_world = dj.Partition()
    layers = {name: layer_of(record, P_world) for name, record in records.items()}

    def outputs_and_gradients(inputs: dict[str, Any]) -> dict[str, Any]:
        results = {}
        for name, (params, x, dy) in inputs.items():
            y, pullback = jax.vjp(layers[name].apply, params, x)
            results[name] = y, *pullback(dy)
        return results

    given = {name: inputs(layers[name], record, P_world.rank) for name, record in records.items()}
    for name, (y, dparams, dx) in run(outputs_and_gradients, given).items():
        record = records[name]
        for key, value in (("y", y), ("dx", dx)):
            compare(f"{key} of {name}", value, record[f"{key}_r{P_world.rank}"], record[key])
        for key, spec in layers[name].param_specs().items():
            if f"{key}_local_shapes" in record:  # which workers hold what
                held = record[f"{key}_local_shapes"][P_world.rank]
                assert spec.local_shape == (held or (0,)), f"{key} of {name}: the original's worker holds {held}"
            whole = record[f"d{key[0]}"]
            compare(f"{key} of {name}", dparams[key], np.asarray(block(whole, slices(spec))), whole)


def layer_of(record: Any, P_world: dj.Partition) -> Any:
    """The layer with the partitions and arguments of the record."""
    partitions = [P_world.grid(record[f"{P}_shape"], record[f"{P}_ranks"]) for P in ("P_x", "P_y", "P_w")
                  if f"{P}_shape" in record]  # fmt: skip
    options = {key: record[f"arg_{key}"].tolist() for key in ARGUMENTS if f"arg_{key}" in record}
    dims = partitions[0].dim - 2
    if "kind" in record:
        return getattr(nn, f"Distributed{str(record['kind']).capitalize()}Pool{dims}d")(*partitions, **options)
    channels = {"in_channels": record["x"].shape[1], "out_channels": int(record["out_channels"])}
    return getattr(nn, f"DistributedConv{dims}d")(*partitions, **channels, **options, bias=bool(record["bias"]))


def inputs(layer: Any, record: Any, rank: int) -> tuple[dict[str, Any], Any, Any]:
    """This worker's parameters, input and output cotangent; its shares of w and b are those of our own layout."""
    params = {key: block(record[key[0]], slices(spec)) for key, spec in layer.param_specs().items()}
    return params, jax.device_put(record[f"x_r{rank}"]), jax.device_put(record[f"dy_r{rank}"])


def compare(what: str, got: np.ndarray, want: np.ndarray, whole: np.ndarray) -> None:
    assert got.shape == want.shape, f"{what}: shape {got.shape}, not {want.shape}"
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12 * np.abs(whole).max(initial=1), err_msg=what)
