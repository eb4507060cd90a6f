"""Each private part of mpi4jax does what the library uses it for; where not, its docstring is what fails."""

import importlib
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jobs import ROOT
from mpi4py import MPI
from private_parts import what_breaks

from distdl_jax.transports.mpi import compat


@pytest.mark.world(1)
@what_breaks(compat.import_mpi4jax)
def test_the_warning_of_a_new_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.import_mpi4jax()
    monkeypatch.setattr(jax, "__version__", "99.0")
    monkeypatch.delenv("MPI4JAX_NO_WARN_JAX_VERSION", raising=False)
    with pytest.warns(UserWarning, match=f"^{compat.WARNING_OF_A_NEW_JAX}"):
        importlib.import_module("mpi4jax._src.jax_compat").check_jax_version()


@what_breaks(compat.import_mpi4jax)
def test_the_library_is_imported_without_that_warning() -> None:
    """With the jax that is installed, which is one of those that were tried."""
    environment = {name: value for name, value in os.environ.items() if name != "MPI4JAX_NO_WARN_JAX_VERSION"}
    program = "from distdl_jax.transports.mpi.compat import import_mpi4jax; print(import_mpi4jax().sendrecv.__name__)"
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd=ROOT, env=environment
    )
    assert process.stdout == "sendrecv\n"
    assert "JAX version" not in process.stderr


@pytest.mark.world(2)
@what_breaks(compat.mpi_effect)
def test_the_effect_of_mpi4jax() -> None:
    mpi4jax = compat.import_mpi4jax()

    def f(x: Any) -> Any:
        return mpi4jax.allreduce(jnp.sin(x), MPI.SUM, comm=MPI.COMM_WORLD)

    for function in (f, jax.grad(f), jax.grad(jax.checkpoint(f))):
        assert jax.make_jaxpr(function)(1.0).effects == {compat.mpi_effect()}


@pytest.mark.world(2)
@what_breaks(compat.mpi_bcast)
def test_the_primitive_of_broadcast() -> None:
    rank, comm = MPI.COMM_WORLD.rank, compat.as_parameter(MPI.COMM_WORLD)
    y = jax.jit(lambda x: compat.mpi_bcast().bind(x, root=0, comm=comm))(np.arange(3) + rank)
    np.testing.assert_array_equal(y, [0, 1, 2] if rank == 1 else [])


@pytest.mark.world(2)
@what_breaks(compat.mpi_reduce)
def test_the_primitive_of_reduction() -> None:
    rank, comm = MPI.COMM_WORLD.rank, compat.as_parameter(MPI.COMM_WORLD)
    op = compat.as_parameter(MPI.SUM)
    y = jax.jit(lambda x: compat.mpi_reduce().bind(x, op=op, root=0, comm=comm))(np.arange(3) + rank)
    np.testing.assert_array_equal(y, [1, 3, 5] if rank == 0 else [])


@pytest.mark.world(1)
@what_breaks(compat.as_parameter)
def test_a_parameter_is_hashable_and_equal_to_itself() -> None:
    for mpi_object in (MPI.COMM_WORLD, MPI.SUM):
        parameter = compat.as_parameter(mpi_object)
        assert hash(parameter) == hash(compat.as_parameter(mpi_object))
        assert compat.as_parameter(parameter) is parameter


@pytest.mark.world(2)
@what_breaks(compat.comm_handle)
def test_compiled_programs_name_communicators_by_their_handles() -> None:
    mpi4jax, comm = compat.import_mpi4jax(), MPI.COMM_WORLD.Dup()
    text = jax.jit(lambda x: mpi4jax.allreduce(x, op=MPI.SUM, comm=comm)).lower(np.ones(3)).compile().as_text()
    assert f"comm = {compat.comm_handle(comm)} : i64" in text


@pytest.mark.world(2)
@what_breaks(compat.mpi_operation)
def test_the_equations_of_mpi4jax() -> None:
    mpi4jax, comm = compat.import_mpi4jax(), MPI.COMM_WORLD

    def program(x: Any) -> None:
        mpi4jax.sendrecv(x, x, source=0, dest=1, sendtag=2, recvtag=3, comm=comm)
        mpi4jax.send(x, dest=1, tag=4, comm=comm)
        mpi4jax.recv(x, source=0, tag=5, comm=comm)
        mpi4jax.allreduce(x, op=MPI.MAX, comm=comm)
        mpi4jax.reduce(x, op=MPI.MIN, root=1, comm=comm)
        mpi4jax.bcast(x, root=1, comm=comm)
        jnp.sin(x)

    expected = [
        ("sendrecv", {"source": 0, "dest": 1, "sendtag": 2, "recvtag": 3, "comm": comm}),
        ("send", {"dest": 1, "tag": 4, "comm": comm}),
        ("recv", {"source": 0, "tag": 5, "comm": comm}),
        ("allreduce", {"op": MPI.MAX, "comm": comm}),
        ("reduce", {"op": MPI.MIN, "root": 1, "comm": comm}),
        ("bcast", {"root": 1, "comm": comm}),
    ]
    found = list(map(compat.mpi_operation, jax.make_jaxpr(program)(1.0).eqns))
    assert [operation and operation[0] for operation in found] == [*(name for name, _ in expected), None]
    for operation, (_, parameters) in zip(found, expected, strict=False):
        assert operation is not None
        assert parameters.items() <= operation[1].items()
