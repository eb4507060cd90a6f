"""Compares the steps of whole networks with the last release: ratios to plain JAX in one run, from out/benchmarks.

python benchmarks/harness/history.py             after benchmarks/networks.py; fails if a network has become slower
python benchmarks/harness/history.py --record    writes benchmarks/history/VERSION.json: once a release
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MEASURED, HISTORY = ROOT / "out" / "benchmarks", ROOT / "benchmarks" / "history"
SLACK = 1.05
"""A network is slower if even the low quartile of its ratios is so many times the high quartile of the record's."""


def measured(folder: Path) -> dict[str, Any]:
    """Return the quartiles of each network's ratio to plain JAX on one thread, by the number of workers."""
    runs = {path.stem.split("-")[-1]: json.loads(path.read_text()) for path in sorted(folder.glob("networks-*.json"))}
    ratios = {
        workers: {row["work"]: row["ratios"]["distdl_jax"] for row in run["rows"]} for workers, run in runs.items()
    }
    about = {name: run[name] for run in runs.values() for name in ("jax", "processor")}
    return {**about, "ratios": ratios}


def compare(now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """Print each network's ratio now and then; return the names of those that have become slower."""
    slower = []
    for workers, ratios in now["ratios"].items():
        for work, (low, middle, high) in ratios.items():
            name = f"{work}, {workers} workers"
            before = then["ratios"].get(workers, {}).get(work)
            is_slower = before is not None and low > SLACK * before[2]
            text = f"{before[1]:.2f}x" if before else "no record"
            print(f"{name:<60} {middle:5.2f}x ({low:.2f} to {high:.2f})  before: {text}{'  SLOWER' * is_slower}")
            slower += [name] * is_slower
    return slower


def main(arguments: list[str], measurements: Path = MEASURED, history: Path = HISTORY) -> int:
    """Return the exit status."""
    now = measured(measurements)
    if not now["ratios"]:
        print(f"{measurements} has no networks-*.json: run `make bench` first")
        return 1
    if arguments == ["--record"]:
        (version,) = re.findall(r'^__version__ = "(.*)"', (ROOT / "distdl_jax/__init__.py").read_text(), re.M)
        history.mkdir(exist_ok=True)
        (history / f"{version}.json").write_text(json.dumps(now, indent=1) + "\n")
        return 0
    records = sorted(history.glob("*.json"), key=lambda path: [int(number) for number in re.findall(r"\d+", path.stem)])
    if not records:
        print(f"{history} has no record to compare with: --record writes one")
        return 0
    then = json.loads(records[-1].read_text())
    slower = compare(now, then)
    if now["processor"] != then["processor"]:
        print(f"The record is of another processor ({then['processor']}), so nothing is concluded.")
        return 0
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
