"""Draws what benchmarks/networks.py has measured: python benchmarks/harness/draw_networks.py [docs/networks.svg]

Reads out/benchmarks/networks-*.json, of one and of more workers. Each bar is the time of a training step as a multiple
of plain JAX's on one thread in the same rounds, with the quartiles of these ratios.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no screen
from matplotlib import pyplot

SHOWN = {"distdl_jax": "tab:blue", "unmodified": "tab:cyan", "JAX sharding": "tab:orange", "PyTorch": "tab:gray"}
MOST = 2.0  # longer bars are cut off, and say how long they are


def main() -> None:
    """Draw all files next to each other."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "out/benchmarks/networks.svg")
    files = sorted(Path("out/benchmarks").glob("networks-*.json"))
    told = [json.loads(file.read_text()) for file in files]
    figure, axes = pyplot.subplots(
        1, len(told), figsize=(4.2 * len(told) + 1.5, 5.5), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, run in zip(axes[0], told, strict=True):
        rows = run["rows"]
        for place, (way, color) in enumerate(SHOWN.items()):
            heights = [n + (place - 1.5) * 0.21 for n, row in enumerate(rows) if way in row["ratios"]]
            spreads = [row["ratios"][way] for row in rows if way in row["ratios"]]
            middles = [middle for _, middle, _ in spreads]
            ends = [[m - low for low, m, _ in spreads], [high - m for _, m, high in spreads]]
            axis.barh(heights, middles, 0.19, xerr=ends, color=color, label=way, error_kw={"lw": 0.8})
            for height, middle in zip(heights, middles, strict=True):
                if middle > MOST:
                    axis.text(MOST, height, f"{middle:.1f} ", ha="right", va="center", fontsize=7, color="white")
        axis.axvline(1, color="black", lw=0.8)
        axis.set(title=f"{run['workers']} workers" if run["workers"] > 1 else "1 worker", xlim=(0, MOST))
        axis.set(xlabel="time of a step / plain JAX on one thread")
        axis.grid(axis="x", alpha=0.3)
    axes[0][0].set_yticks(range(len(told[0]["rows"])), [row["work"] for row in told[0]["rows"]])
    axes[0][0].invert_yaxis()
    figure.legend(*axes[0][-1].get_legend_handles_labels(), loc="outside lower center", ncols=len(SHOWN))
    figure.suptitle(f"{told[0]['processor']}, jax {told[0]['jax']}: shorter is faster", fontsize=10)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
