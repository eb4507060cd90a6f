"""What a measured time depends on, besides what is computed."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

import jaxlib


@cache
def processor() -> str:
    """The processor's name, where the system tells it."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def threads() -> int:
    """With how many threads XLA's CPU client computes."""
    told = os.environ.get("NPROC", "")
    if told.isdigit() and int(told) > 0:
        return int(told)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> str:
    """The processor, XLA's threads and flags, and jaxlib, as one name."""
    flags = " ".join(sorted(set(os.environ.get("XLA_FLAGS", "").split())))
    return f"{processor()}, threads {threads()}, jaxlib {jaxlib.__version__}{f', {flags}' if flags else ''}"
