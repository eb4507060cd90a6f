"""faulthandler's output, shortened and merged."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

HIDDEN = (
    *("/_pytest/", "/pluggy/", "/pytest/__main__.py", "<frozen runpy>", "<frozen importlib"),
    *("/launcher/worker.py", "/launcher/ranks.py", "/launcher/examples.py", "/site-packages/hypothesis/"),
)
# The outermost frame of a rank's main thread, which is dumped last; or more frames than faulthandler shows.
LAST_LINE = re.compile(r"( in _run_module_as_main|  \.\.\.)\n+$")
WAITING = r'/launcher/ranks\.py", line \d+ in _wait$'
OWN_THREAD = "in _leave_with_parent"


def ranks_text(ranks: Iterable[int], size: int) -> str:
    """Return `rank 2 of 4`, `ranks 0-1, 3 of 4` or `all 4 ranks`."""
    ordered = sorted(ranks)
    if len(ordered) == size > 1:
        return f"all {size} ranks"
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {shown} of {size}"


def whole(path: Path) -> bool:
    """Return whether a rank has written its stacks to the end."""
    return path.exists() and LAST_LINE.search(path.read_text(errors="replace")) is not None


def shorten(dump: str) -> str:
    """Remove addresses, pytest's own frames and the launcher's own thread from a dump."""
    threads = []
    for block in re.split(r"\n\s*\n|\n(?=(?:Current thread|Thread) 0x)", dump.strip()):
        head, *frames = block.strip().splitlines() or [""]
        if not head.startswith(("Thread", "Current thread")) or any(OWN_THREAD in frame for frame in frames):
            continue
        if frames and re.search(WAITING, frames[0]):
            frames = ["  (waiting for the other ranks)"]
        shown = [frame for frame in frames if not any(hidden in frame for hidden in HIDDEN)] or frames[:4]
        threads.append("\n".join([re.sub(r" 0x[0-9a-f]+", "", head), *shown]))
    return "\n\n".join(threads) or dump.strip()


def merge(stacks: Mapping[int, str], size: int) -> str:
    """Show every distinct stack once, under the ranks that have it."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(stacks):
        groups.setdefault(stacks[rank], []).append(rank)
    return "\n\n".join(f"--- stack of {ranks_text(ranks, size)} ---\n{stack}" for stack, ranks in groups.items())
