"""Findings about MPI, and about what starts the workers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from distdl_jax.doctor.facts import Facts, Launch, Mpi
from distdl_jax.doctor.findings import Finding, on_each_worker

_COMPILE = (
    "With the right mpicc first on PATH: python -m pip install --force-reinstall --no-deps --no-cache-dir "
    "--no-binary={0} {0}"
)

_WORDS_OF_LAUNCHERS = (
    ("not enough slots", "Open MPI, more workers than cores: mpiexec --oversubscribe."),
    ("run as root", "Open MPI: mpiexec --allow-run-as-root, in a container."),
)


def find(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """Yield the findings about MPI and the launcher."""
    yield from on_each_worker(_mpi, everyone)
    yield from on_each_worker(lambda facts: _bridge(facts.mpi), everyone)
    yield from on_each_worker(lambda facts: _launcher(facts.launch, facts.mpi), everyone)


def _mpi(facts: Facts) -> Iterator[Finding]:
    mpi = facts.mpi
    if facts.software.packages.get("mpi4py", "") is None:
        return  # that has been said
    if mpi.error is not None:
        cure = (
            "Without an MPI: python -m pip install mpich. With one whose library the loader doesn't find: load its "
            "module, set LD_LIBRARY_PATH, or compile mpi4py (docs/install.md)."
        )
        if "rc.initialize" in mpi.error:
            cure = "Leave mpi4py.rc, and MPI4PY_RC_INITIALIZE, as they are."
        yield Finding("error", "mpi", f"MPI can't be started: {mpi.error}.", cure)
        return
    where = f", {mpi.loaded[0]}" if len(mpi.loaded) == 1 else ""
    yield Finding("ok", "mpi", f"mpi4py runs on {mpi.implementation or 'an unknown library'}{where}.")
    if mpi.thread_level != "MPI_THREAD_MULTIPLE":
        yield Finding(
            "error",
            "mpi threads",
            f"MPI was started with {mpi.thread_level}, but JAX calls MPI from its own threads, which takes "
            "MPI_THREAD_MULTIPLE.",
            "Leave mpi4py.rc.thread_level, and MPI4PY_RC_THREAD_LEVEL, as they are, and take an MPI with threads.",
        )
    else:
        yield Finding("ok", "mpi threads", "MPI_THREAD_MULTIPLE.")


def _bridge(mpi: Mpi) -> Iterator[Finding]:
    if mpi.bridge_error is not None:
        made_for = re.search(r"libmpi\.so\.(12|40)", mpi.bridge_error)
        kind = {"12": " It was compiled for MPICH.", "40": " It was compiled for Open MPI."}
        text = kind[made_for[1]] if made_for else ""
        if len(mpi.loaded) > 1:
            text = f" This process has loaded {', '.join(mpi.loaded)}."
        found = f"mpi4jax can't be loaded: {mpi.bridge_error}.{text}"
        yield Finding("error", "mpi4jax", found, _COMPILE.format("mpi4jax"))
    elif len(mpi.loaded) > 1:
        found = f"mpi4py and mpi4jax are bound to different MPI libraries: {', '.join(mpi.loaded)}."
        yield Finding(
            "error", "mpi4jax", found, f"Unload the second one (LD_LIBRARY_PATH). {_COMPILE.format('mpi4jax')}"
        )
    elif mpi.error is None and mpi.loaded:
        yield Finding("ok", "mpi4jax", "mpi4jax calls the same library.")


def family(library: str) -> str:
    """Return whose launcher a library takes: "MPICH", "Open MPI", or "" where that is unknown.

    >>> family("MPICH Version: 5.0.2"), family("Open MPI v5.0.11"), family("MVAPICH2 Version: 2.3")
    ('MPICH', 'Open MPI', 'MPICH')
    """
    if library.startswith("Open MPI"):
        return "Open MPI"
    return "MPICH" if re.match(r"MPICH|Intel|MVAPICH|CRAY MPICH|Cray MPICH", library) else ""


def foreseen(launch: Launch) -> Finding | None:
    """Return why MPI may end this process when it starts, in words that don't say it: the launcher of another MPI."""
    own = family(launch.implementation)
    if not own or launch.launcher not in ("MPICH", "Open MPI") or launch.launcher == own:
        return None
    found = (
        f"The launcher is {launch.launcher}'s, but mpi4py runs on {own}, which may end the job, or start workers alone."
    )
    return Finding("error", "launcher", found, _right_launcher(launch, launch.launcher_program))


def _launcher(launch: Launch, mpi: Mpi) -> Iterator[Finding]:
    program = f" ({launch.launcher_program})" if launch.launcher_program else ""
    if launch.launcher and mpi.error is None:
        by = "The launcher" if launch.launcher == "unknown" else f"The launcher of {launch.launcher}"
        if launch.started > 1 and mpi.size == 1:
            found = (
                f"{by}{program} started {launch.started} processes, but each believes that it is alone: the launcher "
                f"is not the one of {mpi.implementation}."
            )
            yield Finding("error", "launcher", found, _right_launcher(launch, launch.launcher_program))
        else:
            processes = f"{launch.started} process{'es' * (launch.started > 1)}"
            yield Finding("ok", "launcher", f"{by}{program} started {processes}, and MPI knows all of them.")
    elif not launch.launcher:
        yield from _without_launcher(launch, mpi)
    own = family(mpi.implementation)
    if own and launch.mpiexec_of not in (own, "unknown", ""):
        found = f"mpiexec on PATH ({launch.mpiexec}) is {launch.mpiexec_of}'s, but mpi4py runs on {mpi.implementation}."
        verdict = "warning" if launch.launcher and mpi.size > 1 else "error"
        yield Finding(verdict, "mpiexec", found, _right_launcher(launch, launch.mpiexec))


def _without_launcher(launch: Launch, mpi: Mpi) -> Iterator[Finding]:
    if launch.mpiexec is None:
        found = "There is no mpiexec on PATH."
        cure = "Activate the environment, or load MPI's module."
        if launch.mpiexec_beside:
            cure = f"Activate the environment: {launch.mpiexec_beside} is there."
        verdict = "note" if launch.srun else "warning"
        yield Finding(verdict, "launcher", found, "srun is there." if launch.srun else cure)
    elif launch.trial is None or mpi.error is not None:
        return
    elif (sizes := re.findall(r"size=(\d+)", launch.trial)) == ["2", "2"]:
        found = f"{launch.mpiexec} starts workers that find each other."
        yield Finding("ok", "launcher", found, "`mpiexec -n 4 python -m distdl_jax doctor` looks at several workers.")
    elif "1" in sizes:
        found = f"{launch.mpiexec} starts workers of which each believes that it is alone: it is another MPI's."
        yield Finding("error", "launcher", found, _right_launcher(launch, launch.mpiexec))
    else:
        words = " ".join(word for word in launch.trial.split() if word.strip("-"))
        shown = words if len(words) <= 500 else f"{words[:500]} ..."
        cure = next(
            (cure for text, cure in _WORDS_OF_LAUNCHERS if text in words), _right_launcher(launch, launch.mpiexec)
        )
        yield Finding("error", "launcher", f"{launch.mpiexec} -n 2 does not start two workers: {shown}", cure)


def _right_launcher(launch: Launch, wrong: str | None) -> str:
    if launch.launcher == "Slurm":
        return "srun --mpi=...: `srun --mpi=list` shows what there is (Open MPI 5: pmix; MPICH: pmi2)."
    if launch.mpiexec_beside and (wrong is None or Path(wrong).parent != Path(launch.mpiexec_beside).parent):
        return f"Take {launch.mpiexec_beside}, or activate the environment."
    return "Take the mpiexec of that MPI, or compile mpi4py and mpi4jax for this one (docs/install.md)."
