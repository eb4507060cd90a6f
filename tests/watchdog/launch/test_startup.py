"""The checks when the first partition is made: one software stack, and settings that fit together, on all workers."""

import warnings

import pytest
from mpi4py import MPI

import distdl_jax as dj
from distdl_jax.settings import read_settings
from distdl_jax.transports.mpi import launch_checks

VERSION = launch_checks.installed_version


def jaxlib(rank):
    return lambda name: "0.0.1" if (name, rank) == ("jaxlib", 2) else VERSION(name)


def reading(*timeouts):
    environments = [{"DISTDL_JAX_TIMEOUT": timeout} if timeout else {} for timeout in timeouts]
    return lambda rank: lambda: read_settings(environments[rank])


@pytest.mark.world(3)
@pytest.mark.parametrize(
    ("name", "of", "expected"),
    [
        (
            "installed_version",
            jaxlib,
            f"the same jaxlib, but it is {VERSION('jaxlib')} on 2 of 3 workers and 0.0.1 on worker 2",
        ),
        (
            "_onednn_version",
            lambda rank: lambda: "none" if rank == 1 else "3.2.0",
            "All workers must have the same oneDNN (`python -m distdl_jax.onednn` compiles it), but it is 3.2.0 on "
            "2 of 3 workers and none on worker 1.",
        ),
        (
            "own_reading",
            reading(None, None, "soon"),
            "The environment variable DISTDL_JAX_TIMEOUT (='soon', on worker 2) must be a number of",
        ),
        (
            "own_reading",
            reading("90", None, "90.0"),
            "All workers must have the same DISTDL_JAX_TIMEOUT, but it is 90 on 2 of 3 workers and not set on worker 1",
        ),
    ],
    ids=["jaxlib", "oneDNN", "a setting is wrong on one", "a setting differs"],
)
def test_workers_that_do_not_fit_together_are_refused_on_all(monkeypatch, name, of, expected):
    """With the same sentence."""
    comm = MPI.COMM_WORLD
    monkeypatch.setattr(launch_checks, name, of(comm.rank))
    with pytest.raises(dj.SetupError) as raised:
        launch_checks.check_workers_agree(comm)
    assert comm.allgather(str(raised.value)) == [str(raised.value)] * 3
    assert expected in str(raised.value)
    if name == "_onednn_version":
        monkeypatch.setattr(launch_checks, "own_reading", lambda: read_settings({"DISTDL_JAX_ONEDNN": "off"}))
        launch_checks.check_workers_agree(comm)


@pytest.mark.world(3)
def test_a_name_that_is_none_is_warned_of_on_one_worker(monkeypatch):
    comm = MPI.COMM_WORLD
    environment = {"DISTDL_JAX_TIMOUT": "90"} if comm.rank == 1 else {}
    monkeypatch.setattr(launch_checks, "own_reading", lambda: read_settings(environment))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        launch_checks.check_workers_agree(comm)
    assert len(caught) == (comm.rank == 0)
    assert all("DISTDL_JAX_TIMOUT (did you mean DISTDL_JAX_TIMEOUT?)" in str(warning.message) for warning in caught)


@pytest.mark.world(2)
@pytest.mark.parametrize(("version", "warns"), [((0, 12, 9), False), ((0, 13, 0), True)])
def test_a_jax_that_nobody_has_tried_is_warned_of_on_one_worker(monkeypatch, version, warns):
    monkeypatch.setattr(launch_checks.jax, "__version_info__", version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        launch_checks.check_launch()
    found = [str(warning.message) for warning in caught]
    assert len(found) == (warns and MPI.COMM_WORLD.rank == 0)
    assert all("has been tested with jax before" in text and '"jax<0.13"' in text for text in found)
