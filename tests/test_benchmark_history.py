"""The gate of `make bench`: a network whose ratio to plain JAX has grown beyond its spread fails it."""

import importlib.util
import json
from pathlib import Path

import pytest
from jobs import ROOT

spec = importlib.util.spec_from_file_location("history", ROOT / "benchmarks" / "harness" / "history.py")
assert spec is not None and spec.loader is not None
history = importlib.util.module_from_spec(spec)
spec.loader.exec_module(history)


def measure(folder: Path, ratios: list[float], processor: str = "P") -> None:
    rows = [{"work": "LeNet-5", "ratios": {"one thread": [1, 1, 1], "distdl_jax": ratios}}]
    (folder / "networks-2.json").write_text(json.dumps({"jax": "0.12", "processor": processor, "rows": rows}))


@pytest.mark.parametrize(
    ("ratios", "processor", "status", "says"),
    [
        ([1.0, 1.2, 1.4], "P", 0, "before: 1.10x"),
        ([1.3, 1.4, 1.5], "P", 1, "SLOWER"),
        ([1.3, 1.4, 1.5], "Q", 0, "another processor (P)"),
    ],
)
def test_a_network_beyond_its_spread_fails_on_the_same_processor(
    ratios: list[float],
    processor: str,
    status: int,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    records = tmp_path / "history"
    assert history.main([], tmp_path, records) == 1  # nothing is measured
    measure(tmp_path, [1.0, 1.1, 1.2])
    assert history.main([], tmp_path, records) == 0  # nothing is recorded
    assert history.main(["--record"], tmp_path, records) == 0
    measure(tmp_path, ratios, processor)
    assert history.main([], tmp_path, records) == status
    assert says in capsys.readouterr().out
