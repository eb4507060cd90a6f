"""The checks when the first partition is made, and the clock's limits."""

import pytest
from mpi4py import MPI

import distdl_jax as dj
from distdl_jax import settings
from distdl_jax.backends.mpi import launch_checks


@pytest.mark.parametrize(
    ("given", "expected"), [("", settings.DEFAULT_TIME_LIMITS), ("0", (0, 0)), ("90", (90, 90)), ("1.5", (1.5, 1.5))]
)
def test_limits_of_the_clock(monkeypatch, given, expected):
    monkeypatch.setenv("DISTDL_JAX_TIMEOUT", given)
    assert settings.time_limits() == expected


@pytest.mark.parametrize("given", ["soon", "-1", "inf", "nan"])
def test_other_limits_are_refused(monkeypatch, given):
    monkeypatch.setenv("DISTDL_JAX_TIMEOUT", given)
    with pytest.raises(dj.DistDLError, match=rf"DISTDL_JAX_TIMEOUT \(='{given}'\) must be a number of seconds"):
        settings.time_limits()


@pytest.mark.world(3)
def test_workers_with_different_software_are_refused_on_all(monkeypatch):
    comm = MPI.COMM_WORLD
    launch_checks.check_workers_agree(comm)
    version = launch_checks._version
    monkeypatch.setattr(
        launch_checks, "_version", lambda name: "0.0.1" if (name, comm.rank) == ("jaxlib", 2) else version(name)
    )
    with pytest.raises(dj.SetupError) as raised:
        launch_checks.check_workers_agree(comm)
    assert f"the same jaxlib, but it is {version('jaxlib')} on 2 of 3 workers and 0.0.1 on worker 2" in str(
        raised.value
    )
