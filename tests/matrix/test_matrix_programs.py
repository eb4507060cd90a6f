"""What else a program may ask of every primitive: shapes without running, donation, silence, one compilation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launcher.examples import LONG

import distdl_jax as dj
from distdl_jax.functional import repartition
from distdl_jax.functional.box_exchange import BoxMovement
from distdl_jax.plans.shape_dtype import ShapeDtype
from distdl_jax.tracing.program_reader import read_program
from matrix.case import outputs_of, painted, shapes_out
from matrix.cases import of_world, shape_dtypes
from matrix.programs import compare, library, named, run
from matrix.ties import empty_pieces, there_and_back, untied


def blocks_of(world_size: int) -> dict[str, Any]:
    return {case.name: painted(case.name, case.shapes, np.float64) for case in of_world(world_size)}


def mine(world_size: int) -> dict[str, Any]:
    return {name: jax.device_put(each[dj.Partition().rank]) for name, each in blocks_of(world_size).items()}


def talking(jaxpr: Any) -> bool:
    """Whether a program holds an operation between workers."""
    return bool(read_program(dj.Partition().world.transport, jaxpr.jaxpr))


def check_shapes(outputs: dict[str, Any], world_size: int) -> None:
    """What `jax.eval_shape` said here, of each case: as the reference has it, and, with all workers', as the plan."""
    for case in of_world(world_size):
        y = outputs[case.name]
        assert (y.shape, y.dtype) == (shapes_out(case)[dj.Partition().rank], np.float64), case.name
    everyone = dj.Partition().allgather_data({name: ShapeDtype(y.shape, y.dtype) for name, y in outputs.items()})
    for case in of_world(world_size):
        plan = named(case, case.plan, dj.Partition(), shape_dtypes(case))
        assert plan.outputs == {worker: everyone[worker][case.name] for worker in plan.workers}, case.name


@pytest.mark.primitives
@pytest.mark.world(1)
@pytest.mark.simulated(2, 3)
def test_eval_shape(world_size: int) -> None:
    """The shape and dtype of every worker's output are known without running anything, and are what the plan says.

    For four workers the next test asks.
    """
    xs, operators = mine(world_size), library(of_world(world_size))
    outputs = {
        case.name: named(case, jax.eval_shape, operators[case.name], xs[case.name]) for case in of_world(world_size)
    }
    check_shapes(outputs, world_size)


@pytest.mark.primitives
@pytest.mark.world(4)
def test_eval_shape_makes_one_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A primitive at most one; a layer exactly one, among the workers that take part, however much it moves."""
    labels: list[str] = []
    P = dj.Partition()
    agree = type(P.world).agree

    def counted(world: Any, team: Any, label: str, *args: Any) -> Any:
        labels.append(label)
        return agree(world, team, label, *args)

    monkeypatch.setattr(type(P.world), "agree", counted)
    xs, operators, outputs = mine(4), library(of_world(4)), {}
    for case in of_world(4):
        takes_part = P.rank in case.plan(P, shape_dtypes(case)).workers
        labels.clear()
        outputs[case.name] = named(case, jax.eval_shape, operators[case.name], xs[case.name])
        # Beside the layer inside: for the sum, for the shape of the state, for two movements of a weight.
        more = next((n for name, n in (("residual", 1), ("conv_lstm", 1), ("weight_norm", 2)) if name in case.name), 0)
        assert len(labels) <= (1 + more) * takes_part, f"{case}: {labels}"
        if case.kind in ("linear", "linear_of_parameters", "conv", "average_pool", "layer") and not more:
            assert len(labels) == takes_part, f"{case}: {labels}"
    check_shapes(outputs, 4)


@pytest.mark.primitives
@pytest.mark.world(1, 2)
@pytest.mark.simulated(4)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_inputs(world_size: int) -> None:
    """Donating the inputs gives the compiler their memory and changes no result; on four one case of each operator."""
    cases = of_world(world_size, turn=None if world_size < 4 or LONG > 1 else 2)
    blocks, operators = blocks_of(world_size), library(cases)
    xs = {case.name: jax.device_put(blocks[case.name][dj.Partition().rank]) for case in cases}
    got = run(lambda xs: {name: F(xs[name]) for name, F in operators.items()}, xs, donate_argnums=0)
    assert any(x.is_deleted() for x in jax.tree.leaves(xs))
    want = {name: parts[dj.Partition().rank] for name, parts in outputs_of(cases, blocks).items()}
    for exact in (True, False):
        names = [case.name for case in cases if case.exact == exact]
        compare({name: got[name] for name in names}, {name: want[name] for name in names}, 0.0 if exact else 1e-12)


@pytest.mark.world(1, 2)
@pytest.mark.simulated(3, 4)
def test_messages_where_something_moves_tied_to_data(world_size: int) -> None:
    """Forward and adjoint: between equal partitions, along no dimension, and on one worker, a program holds no message;
    and every message depends on its operation's input, and its result on every message. Where a worker has no
    neighbour, the program cuts and joins nothing instead of arrays without elements. On four workers all that is
    silent, and one case of each operator."""
    xs, operators, blocks = mine(world_size), library(of_world(world_size)), blocks_of(world_size)
    one_of_each = of_world(world_size, turn=None if world_size < 4 or LONG > 1 else 3)
    for case in dict.fromkeys((*one_of_each, *(case for case in of_world(world_size) if case.silent))):
        F, x = operators[case.name], xs[case.name]
        both = there_and_back(F, x, np.zeros(shapes_out(case)[dj.Partition().rank]))
        anyone = any(dj.Partition().allgather_data(talking(both)))
        moves = not case.silent and world_size > 1 and any(np.size(block) for block in blocks[case.name])
        assert anyone == moves, f"{case}: messages {anyone}"
        loose = untied(both)
        assert not loose, f"{case}: {loose}"
        assert not (empty := empty_pieces(both)), f"{case}: {empty}"


@pytest.mark.world(2)
def test_eager_calls_compile_once(world_size: int) -> None:
    """A second eager call of an operator, and of an equal one made anew, compiles nothing."""
    xs, cases, compilations = mine(world_size), of_world(world_size, turn=1), []
    for operators in (library(cases), library(cases)):
        for name, F in operators.items():
            jax.block_until_ready((F(xs[name]), F(xs[name])))
        if not compilations:
            jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compilations.append(event))
    assert not [event for event in compilations if "backend_compile" in event]
    jax.block_until_ready(jax.jit(lambda x: x + 41)(jnp.ones(3)))
    assert [event for event in compilations if "backend_compile" in event]  # the listener would have heard


@pytest.mark.world(2)
@pytest.mark.simulated(4)
def test_a_jitted_program_is_traced_once(world_size: int) -> None:
    """A second call of a jitted program, with equal shapes, does not come back to Python."""
    traced, operators = [], library(of_world(world_size, turn=0))

    @jax.jit
    def program(xs: Any) -> Any:
        traced.append(True)
        return {name: F(xs[name]) for name, F in operators.items()}

    xs = {name: x for name, x in mine(world_size).items() if name in operators}
    first = jax.block_until_ready(program(xs))
    second = jax.block_until_ready(program(jax.device_put(jax.tree.map(np.array, xs))))
    assert len(traced) == 1
    compare(first, jax.tree.map(np.asarray, second), 0.0)


@pytest.mark.world(2)
def test_a_derivative_traces_a_movement_once_in_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the function's program is evaluated again to be differentiated."""
    P, traced = dj.Partition(), []
    P_rows, P_columns = (P.grid(shape) for shape in ([2, 1], [1, 2]))
    run = BoxMovement.run
    monkeypatch.setattr(BoxMovement, "run", lambda part, world, x: traced.append(part) or run(part, world, x))

    def part_of_loss(x: Any) -> Any:
        return jnp.sum(repartition(x, P_rows, P_columns) ** 2)

    jax.jit(dj.value_and_grad(part_of_loss))(jnp.ones((3, 7)))
    forward, adjoint = traced
    assert adjoint == forward.adjoint()
