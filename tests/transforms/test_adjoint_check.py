"""dj.grad and dj.value_and_grad: all workers run the same adjoints, whatever their blocks and their losses are."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_programs import LOCAL, WORKERS, Here, Step, Together, drawn, flat, run
from jax import lax
from launcher.examples import examples

import distdl_jax as dj
from distdl_jax.plans.decomposition import balanced_ranges
from distdl_jax.watchdog.programs.ir import Operation


def loss_of(steps: list[Step]) -> Callable[[Any], Any]:
    return lambda x: run(steps, Here(dj.Partition()), [x])[1][0]


def mine(whole: Any) -> Any:
    """This worker's block."""
    start, stop = balanced_ranges(len(whole), WORKERS)[dj.Partition().rank]
    return jax.device_put(whole[start:stop])


def on_one_worker(program: Callable[[Any], Any], x: Any) -> Any:
    """What the program gives, which one worker compiles and runs for all."""
    P = dj.Partition()
    return P.broadcast_data(jax.device_get(jax.jit(program)(x)) if P.rank == 0 else None, root=0)


def in_plain_jax(steps: list[Step], whole: Any) -> Any:
    def total(whole: Any) -> Any:
        blocks = [whole[start:stop] for start, stop in balanced_ranges(len(whole), WORKERS)]
        return sum(run(steps, Together(), blocks)[1])

    return on_one_worker(jax.value_and_grad(total), whole)


def agrees(steps: list[Step], whole: Any, transform: Callable[..., Any] = dj.jit) -> None:
    expected, gradient = in_plain_jax(steps, whole)
    value, got = transform(dj.value_and_grad(loss_of(steps)))(mine(whole))
    np.testing.assert_allclose(value, expected, rtol=1e-12, err_msg=str(steps))
    np.testing.assert_allclose(got, mine(gradient), rtol=1e-11, atol=1e-12, err_msg=str(steps))


THREE = np.array([1.0, 2.0, 3.0])  # the last worker's block is empty
SOME = (1,)  # the loss of the others is a constant, and they leave outputs unused


@pytest.mark.simulated(4)
def test_what_jax_makes_a_constant_of_an_empty_block() -> None:
    """All in one program: y[array], .at[].set, .at[].add, insert, segment_sum, each before a movement."""
    steps: list[Step] = [("squares", (0, 1, 2))]
    for name in LOCAL:
        steps += [(name,), ("shared",)]
    agrees([*steps, ("squares", SOME)], THREE, jax.jit)


@pytest.mark.simulated(4)
@pytest.mark.parametrize("around", ["scan", "checkpoint", "jit", "cond", "vmap"])
def test_an_output_that_some_workers_use(around: str) -> None:
    inner = [("gathered", SOME), ("squares", SOME)]
    agrees([(around, inner, 2)], THREE, jax.jit)


@pytest.mark.simulated(4)
def test_eagerly() -> None:
    agrees([("index",), ("jit", [("gathered", SOME)]), ("summed",), ("squares", SOME)], THREE, lambda f: f)


@pytest.mark.world(4)
@pytest.mark.limit(60)
def test_over_mpi() -> None:
    agrees([("scan", [("index",), ("gathered", SOME)], 2), ("checkpoint", [("summed",)]), ("squares", SOME)], THREE)


@pytest.mark.simulated(4)
@pytest.mark.parametrize("seed", range(examples(1)))
def test_random_programs_against_plain_jax(seed: int) -> None:
    rng = np.random.default_rng(seed)
    agrees(drawn(rng, depth=1), rng.standard_normal(rng.integers(1, 7)))


def adjoint(operation: Operation) -> Operation:
    """The message that goes the other way."""
    kind = {"send": "recv", "recv": "send"}.get(operation.kind, operation.kind)
    there, back = (operation.count, operation.received) if kind == "sendrecv" else (operation.received, operation.count)
    if not operation.is_message:
        return operation
    return replace(operation, kind=kind, dest=operation.source, source=operation.dest, count=back, received=there)


def without_amounts(operation: Operation) -> Operation:
    return replace(operation, count=0, received=0) if operation.kind in ("send", "recv") else operation


@pytest.mark.simulated(4)
@pytest.mark.parametrize("seed", range(100, 100 + examples(4)))
def test_adjoint_messages_are_the_reverse_of_the_forward_ones(seed: int) -> None:
    """On every worker, movement by movement; only jax.checkpoint, which sends some again, is left out."""
    rng = np.random.default_rng(seed)
    steps = without(drawn(rng), "checkpoint")
    whole = rng.standard_normal(rng.integers(1, 7))
    report = dj.check(dj.grad(loss_of(steps)), mine(whole))
    assert report.ok, f"{steps}: {report.problem}"
    operations = flat(report.programs[dj.Partition().rank])
    there = [operation for operation in operations if not operation.place.backward]
    back = [operation for operation in operations if operation.place.backward]
    assert Counter(map(without_amounts, back)) == Counter(map(without_amounts, map(adjoint, there))), steps
    assert runs(back) == runs(there)[::-1], steps


def without(steps: list[Step], name: str) -> list[Step]:
    """The program without one kind of step, whose inner steps are left."""
    left: list[Step] = []
    for step in steps:
        inner = without(step[1], name) if len(step) > 1 and isinstance(step[1], list) else None
        if step[0] == name:
            left += inner or []
        else:
            left.append(step if inner is None else (step[0], inner, *step[2:]))
    return left


def runs(operations: list[Operation]) -> list[int]:
    """The tags or kinds of the operations, those that follow each other once."""
    tags = [operation.send_tag if operation.is_message else -1 for operation in operations]
    return [tag for i, tag in enumerate(tags) if i == 0 or tag != tags[i - 1]]


@pytest.mark.simulated(4)
def test_second_derivatives() -> None:
    """A Hessian times a vector is the gradient of a gradient."""
    steps: list[Step] = [("index",), ("gathered", SOME), ("checkpoint", [("summed",)]), ("squares", SOME)]
    direction = np.array([0.5, -1.0, 2.0])

    def gradient(x: Any) -> Any:
        return dj.grad(loss_of(steps))(x)

    def whole_gradient(whole: Any) -> Any:
        blocks = [whole[i : i + 1] for i in range(3)] + [whole[:0]]
        return jax.grad(lambda blocks: sum(run(steps, Together(), blocks)[1]))(blocks)

    expected = on_one_worker(jax.grad(lambda whole: jnp.vdot(jnp.concatenate(whole_gradient(whole)), direction)), THREE)
    got = dj.jit(dj.grad(lambda x: jnp.vdot(gradient(x), mine(direction))))(mine(THREE))
    np.testing.assert_allclose(got, mine(expected), rtol=1e-11)


@pytest.mark.simulated(2)
def test_programs_that_are_right_are_left_as_they_are() -> None:
    """What no worker differentiates needs no adjoint, and gets none: data that are moved to where they are used."""
    P = dj.Partition()
    P_one, P_all = (P.grid([n, 1], range(n)) for n in (1, 2))
    layer = dj.nn.DistributedLinear(P_one, P_one, P_one, 3, 2)
    data = jnp.ones((4, 3)) if P.rank == 0 else dj.zero_volume_tensor(4)

    def loss(params: Any, data: Any) -> Any:
        moved = dj.functional.repartition(dj.functional.repartition(data, P_one, P_all), P_all, P_one)
        return jnp.sum(layer(params, moved) ** 2)

    params = layer.init(jax.random.key(0), float)
    report = dj.check(dj.grad(loss), params, data)
    assert report.ok and not any(operation.place.backward for operation in flat(report.programs[P.rank]))
    assert any(operation.place.backward for operation in flat(dj.check(dj.grad(loss, 1), params, data).programs[0]))


@pytest.mark.simulated(2)
@pytest.mark.parametrize("around", ["jit", "scan", "pullback"])
def test_uses_of_one_traced_function_are_told_apart(around: str) -> None:
    """Each worker differentiates another use of it; JAX's programs name the movement in it alike in both."""
    P = dj.Partition()
    P_line = P.grid([2])

    def summed(x: Any) -> Any:
        return dj.functional.all_sum_reduce(x, P_line, axes_reduce=0)

    def step(x: Any, _: None) -> Any:
        return summed(x), None

    def loss(x: Any) -> Any:
        _, pullback = jax.vjp(summed, x)
        uses = {
            "jit": jax.jit(summed),
            "scan": lambda x: lax.scan(step, x, None, length=1)[0],
            "pullback": lambda dy: pullback(dy)[0],
        }
        constant = lax.stop_gradient
        first = uses[around](2 * x if P.rank == 0 else constant(2 * x))
        second = uses[around](constant(3 * x) if P.rank == 0 else 3 * x)
        return jnp.sum(first**2) + jnp.sum(second)

    # The first use is 4 on both workers: 2 (4 + 4) 2; the second has the derivative (1 + 1) 3.
    np.testing.assert_allclose(dj.jit(dj.grad(loss))(jnp.ones(1)), [32.0 if P.rank == 0 else 6.0])


@pytest.mark.simulated(3)
@pytest.mark.parametrize("transform", [dj.grad, dj.jit], ids=["dj.grad", "dj.jit"])
def test_indexing_an_empty_block_inside_vmap_is_named(transform: Callable[..., Any]) -> None:
    """The array, the line that made a constant of it, and the movement of that, also in a loop; the same on all."""
    P = dj.Partition()
    P_line = P.grid([3])
    block = jnp.ones((4, P.rank < 2), float)

    def one(x: Any) -> Any:
        y = x[jnp.zeros(x.size, int)]
        return lax.scan(lambda c, _: (c + jnp.sum(dj.functional.all_gather(y, P_line, 0)), None), 0.0, None, length=2)[
            0
        ]

    said = r"on worker 2 float64\[0\], made in test_adjoint_check.py:\d+ in one, moves in test_adjoint_check.py:\d+ in"
    with pytest.raises(dj.PlanError, match=said) as raised:
        transform(lambda x: jnp.sum(jax.vmap(one)(x)))(block)
    assert len(set(P.allgather_data(str(raised.value)))) == 1


@pytest.mark.simulated(3)
def test_under_plain_jit_the_sentence_says_what_kind_of_constant_it_is() -> None:
    """Nobody compares programs there, so the workers wait for one that maps over nothing."""
    P = dj.Partition()
    P_line = P.grid([3])

    def one(x: Any) -> Any:
        return jnp.sum(dj.functional.all_gather(x[jnp.zeros(x.size, int)], P_line, 0))

    with pytest.raises(Exception, match=r"maps over nothing there: it moves a constant\. y\[arr"):
        jax.jit(jax.vmap(one))(jnp.ones((4, P.rank < 2), float))


@pytest.mark.simulated(2)
def test_a_function_that_asks_for_values() -> None:
    """What doesn't depend on the arguments may be asked for outside of jit, on all workers or after the movements."""
    P = dj.Partition()
    scale = jnp.arange(3.0)

    def loss(x: Any) -> Any:
        y = dj.functional.all_sum_reduce(x, P, axes_keep=())
        power = int(jnp.max(scale)) if P.rank == 0 else 2
        return jnp.sum(y**power) if P.rank == 0 else 0.0

    np.testing.assert_allclose(dj.grad(loss)(jnp.array([1.0 + P.rank])), [6.0])


@pytest.mark.simulated(2)
def test_a_loss_that_asks_for_its_own_value() -> None:
    """It can't be traced, and so not be compared; its movements are chained while it runs."""
    P = dj.Partition()
    P_line = P.grid([2])
    x = jnp.array([1.0, 2.0])[: 2 * (P.rank == 0)]

    def loss(x: Any) -> Any:
        total = dj.functional.all_sum_reduce(jnp.sum(x), P, axes_keep=())
        y = dj.functional.all_gather(x[jnp.arange(x.size)], P_line, 0)  # a constant where x is empty
        return jnp.sum(y**3) * (2.0 if total > 2 else 1.0) if P.rank == 1 else 0.0

    np.testing.assert_allclose(dj.grad(loss)(x), 6 * x**2)
