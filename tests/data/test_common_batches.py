"""What all workers have in common: they refuse batches of other samples, and trace a batch of another size together."""

import itertools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jobs import run, run_alone

import distdl_jax as dj
from distdl_jax import TensorSpec
from distdl_jax.data import batches
from distdl_jax.tracing.cache_keys import batch_sizes

X = np.random.default_rng(0).normal(size=(11, 6))
Y = np.random.default_rng(1).normal(size=(11, 2))
WEIGHT = np.random.default_rng(2).normal(size=(6, 2))


def order(what: str, rank: int) -> dict[str, Any]:
    """Return the arguments of one worker, the last of which reads other batches."""
    given = {"batch_size": 4, "key": jax.random.key(0)}
    if rank < 2:
        return {"source": X, **given}
    return {
        "key": {"source": X, **given, "key": jax.random.key(1)},
        "number of samples": {"source": X[:10], **given},
        "`drop_last`": {"source": X, **given, "drop_last": True},
        "`epochs`": {"source": X, **given, "epochs": 2},
        "`state`": {"source": X, **given, "state": {"epoch": 0, "batch": 1}},
        "`batch_size`": {"source": X, "batch_size": 5, "key": given["key"]},
    }[what]


@pytest.mark.simulated(3)
@pytest.mark.parametrize("what", ["key", "number of samples", "`drop_last`", "`epochs`", "`state`", "`batch_size`"])
def test_workers_that_read_other_batches(what: str) -> None:
    """All raise with the first batch, before any has a block, and once more if they try again."""
    P = dj.Partition()
    its = batches(spec=TensorSpec((6,), P.grid([3])), **order(what, P.rank))
    for _ in range(2):
        with pytest.raises(dj.PlanError, match=rf"{what}.*of dj.data.batches, but it is .* on 2 of 3 workers and "):
            next(its)


@pytest.mark.world(2)
def test_a_restored_state_over_mpi() -> None:
    P = dj.Partition()
    spec = TensorSpec((4, 6), P.grid([2, 1]))
    first = batches(X, spec, 4)
    next(first)
    second = batches(X, spec, 4, state=first.state if P.rank else None)
    with pytest.raises(dj.PlanError, match="epoch 0, batch 0 on worker 0 and epoch 0, batch 1 on worker 1"):
        next(second)


@pytest.mark.simulated(3)
def test_batches_of_some_workers_wait_for_no_other() -> None:
    """Of one worker or two, in a world of three; and in a thread beside the program, which only looks."""
    P = dj.Partition()
    if P.rank == 0:
        assert len([*batches(X, TensorSpec((6,), P.grid([1])), 4)]) == 3
    if P.rank in (1, 2):
        two = P.create_partition_inclusive([1, 2]).grid([2, 1])
        assert len([*batches(X, TensorSpec((4, 6), two), 4)]) == 3
    found: list[int] = []
    if P.rank == 1:
        its = batches(X, TensorSpec((4, 6), P.grid([3, 1])), 4)
        thread = threading.Thread(target=lambda: found.append(len([*its])))
        thread.start()
        thread.join(60)
        assert found == [3]


def test_batches_of_a_planning_world() -> None:
    P = dj.planning_world(3, rank=1)
    assert [len(batch) for batch in batches(X, TensorSpec((4, 6), P.grid([3, 1])), 4)] == [1, 1, 1]


# --- the last batch ---------------------------------------------------------------------------------------------------


def losses(size: int, epochs: int) -> list[float]:
    """Return what one process gets, with plain JAX, from whole batches."""
    weight, found = jnp.asarray(WEIGHT), []
    for _ in range(epochs):
        for start in range(0, len(X), size):
            x, y = X[start : start + size], Y[start : start + size]
            value, slope = jax.value_and_grad(lambda w, x=x, y=y: jnp.sum((x / 2 @ w - y) ** 2))(weight)
            weight = weight - 0.01 * slope
            found.append(float(value))
    return found


def step(P: dj.Partition, jit: Any) -> Any:
    @jit
    def descend(weight: Any, x: Any, y: Any) -> Any:
        def loss(weight: Any) -> Any:
            return jnp.sum((x @ weight - y) ** 2)

        value, slope = jax.value_and_grad(loss)(weight)
        return weight - 0.01 * dj.all_reduce(slope, P, "sum"), dj.all_reduce(value, P, "sum")

    return descend


def trained(size: int, epochs: int, jit: Any) -> list[float]:
    """Return the same with the loop of the tutorial: whatever is done with a batch before the step."""
    P = dj.Partition()
    rows = P.grid([P.size, 1])
    specs = {"x": TensorSpec((size, 6), rows), "y": TensorSpec((size, 2), rows)}
    descend, weight, found = step(P, jit), jnp.asarray(WEIGHT), []
    for _ in range(epochs):
        for batch in batches({"x": X, "y": Y}, specs, size):
            weight, value = descend(weight, batch["x"] / 2, batch["y"])
            found.append(float(value))
    return found


@pytest.mark.limit(600)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_losses_of_an_epoch_with_any_remainder(workers: int) -> None:
    """Of 11 samples, these leave remainders of 1, 2, 3, 5 and 4."""
    for size in (2, 3, 4, 6, 7):
        for found in dj.simulate(workers, lambda size=size: trained(size, 2, dj.jit)):
            np.testing.assert_allclose(found, losses(size, 2), rtol=1e-12)


@pytest.mark.simulated(3)
def test_a_remainder_under_plain_jit() -> None:
    np.testing.assert_allclose(trained(4, 2, jax.jit), losses(4, 2), rtol=1e-12)


@pytest.mark.world(2, 4)
def test_a_remainder_over_mpi() -> None:
    np.testing.assert_allclose(trained(4, 2, dj.jit), losses(4, 2), rtol=1e-12)


class Counted:
    """The sum of the squares of a batch, over all workers, and how often it is traced."""

    def __init__(self, P: dj.Partition) -> None:
        self.traces, self.P = 0, P
        self.f = dj.jit(self.total)

    def total(self, x: Any) -> Any:
        self.traces += 1
        return dj.all_reduce(jnp.sum(x**2), self.P, "sum")

    def check(self, x: Any, rows: np.ndarray) -> None:
        np.testing.assert_allclose(self.f(x), np.sum(rows**2), rtol=1e-12)


@pytest.mark.simulated(2)
def test_programs_of_remainders_are_found_again() -> None:
    """In each epoch; those of full batches, too, before and after."""
    P = dj.Partition()
    total = Counted(P)
    for _ in range(3):
        for start, batch in zip((0, 4, 8), batches(X, TensorSpec((4, 6), P.grid([2, 1])), 4), strict=True):
            total.check(batch, X[start : start + 4])
    assert total.traces == 2


def test_remainders_that_all_workers_see_cost_no_other_program() -> None:
    """A batch of 8 leaves 3 of 11: all blocks are smaller, and what doesn't depend on them is not traced again."""

    def program() -> int:
        P = dj.Partition()
        total = Counted(P)
        for _ in batches(X, TensorSpec((8, 6), P.grid([2, 1])), 8):
            total.check(jnp.ones(3), np.ones(6))
        return total.traces

    assert dj.simulate(2, program) == [1, 1]


@pytest.mark.simulated(2)
def test_training_and_validation_in_one_loop() -> None:
    """Two iterators with remainders of their own, for two functions; and one inside of the other's last batch."""
    P = dj.Partition()
    spec, total, validation = TensorSpec((4, 6), P.grid([2, 1])), Counted(P), Counted(P)
    both = zip(batches(X, spec, 4), batches(X[:10], spec, 4, epochs=None), strict=False)
    for start, (x, other) in zip((0, 4, 8), both, strict=True):
        total.check(x, X[start : start + 4])
        validation.check(other, X[:10][start : start + 4])
        for inner_start, inner in zip((0, 4), batches(X[:7], spec, 4), strict=True):
            total.check(inner, X[:7][inner_start : inner_start + 4])
        total.check(x, X[start : start + 4])


@pytest.mark.limit(300)
@pytest.mark.simulated(3)
@pytest.mark.parametrize("seed", range(4))
def test_drawn_programs_of_several_iterators(seed: int) -> None:
    """Two functions are called with new and old batches of iterators of all sizes, in any order, also after their ends,
    and with what was made of the newest one."""
    P, rng = dj.Partition(), np.random.default_rng(seed)
    functions, kept, its = (Counted(P), Counted(P)), [], []
    for _ in range(60):
        function = functions[rng.integers(2)]
        match int(rng.integers(5)):
            case 0 | 1 if its:
                k = int(rng.integers(len(its)))
                rows, size, done, batch = its[k]
                try:
                    x = next(batch)
                except StopIteration:
                    del its[k]
                    continue
                its[k] = rows, size, done + 1, batch
                kept = [*kept[-5:], (x, X[:rows][size * done : size * (done + 1)])]
                if rng.integers(2):
                    function.check(2 * x, 2 * kept[-1][1])
                function.check(*kept[-1])
            case 2 | 3 if kept:
                function.check(*kept[int(rng.integers(len(kept)))])
            case _:
                size, rows = int(rng.integers(3, 6)), int(rng.integers(6, 12))
                its = [*its[-2:], (rows, size, 0, batches(X[:rows], TensorSpec((size, 6), P.grid([3, 1])), size))]


@pytest.mark.simulated(2)
def test_a_list_of_batches_and_the_last_one_after_its_loop() -> None:
    P = dj.Partition()
    spec, total = TensorSpec((4, 6), P.grid([2, 1])), Counted(P)
    everything = list(batches(X, spec, 4))
    for start, x in zip((0, 4, 8), everything, strict=True):
        total.check(x, X[start : start + 4])
    total.check(everything[-1], X[8:])
    total.check(everything[0], X[:4])
    assert total.traces == 2


@pytest.mark.simulated(2)
def test_batches_of_two_sizes() -> None:
    """Full batches of 4 and of 5 look the same to worker 1; those of 5 come from an iterable."""
    P = dj.Partition()
    total = Counted(P)
    for start, x in zip((0, 4), batches(X, TensorSpec((4, 6), P.grid([2, 1])), 4), strict=False):
        total.check(x, X[start : start + 4])
    fives = [X[:5], X[5:10], X[10:]]
    for _ in range(2):
        for x, rows in zip(batches(iter(fives), TensorSpec((5, 6), P.grid([2, 1]))), fives, strict=True):
            total.check(x, rows)


@pytest.mark.simulated(2)
@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_an_iterator_that_is_left_at_its_remainder(in_a_cycle: bool) -> None:
    """Even if one worker still holds it in a cycle of references: the next loop is that of other workers."""
    P = dj.Partition()
    spec, total = TensorSpec((4, 6), P.grid([2, 1])), Counted(P)
    for _ in range(3):
        its = batches(X, spec, 4)
        last = [*itertools.islice(its, 3)][-1]
        total.check(last, X[8:])
        total.check(jnp.ones(3), np.ones(6))
        if in_a_cycle and P.rank:
            cycle: list[Any] = [its]
            cycle.append(cycle)
            del cycle
        del its
        for start, x in zip((0, 4), batches(X[:8], spec, 4), strict=True):
            total.check(x, X[start : start + 4])
    assert total.traces == 3  # the ones beside the remainder, the remainder, and full batches


@pytest.mark.simulated(2)
def test_a_remainder_is_the_first_batch_of_a_restored_state() -> None:
    P = dj.Partition()
    total = Counted(P)
    its = batches(X, TensorSpec((4, 6), P.grid([2, 1])), 4, epochs=2, state={"epoch": 0, "batch": 2})
    for start, x in zip((8, 0, 4, 8), its, strict=True):
        total.check(x, X[start : start + 4])
    assert total.traces == 2


@pytest.mark.simulated(4)
def test_the_batch_is_split_among_some_workers() -> None:
    """Two of four hold it; the others have placeholders, from the loader, and a part in the sum."""
    P = dj.Partition()
    total = Counted(P)
    for _ in range(2):
        its = batches(X, TensorSpec((4, 6), P.create_partition_inclusive([1, 3]).grid([2, 1])), 4)
        for start, x in zip((0, 4, 8), its, strict=True):
            total.check(x, X[start : start + 4])


@pytest.mark.simulated(2)
def test_after_a_loop_nothing_is_left_in_the_keys() -> None:
    P, keys = dj.Partition(), []
    for _ in batches(X, TensorSpec((4, 6), P.grid([2, 1])), 4):
        keys.append(batch_sizes.value)
    assert keys == [None, None, (((3,),), ((3, 2),))] and batch_sizes.value is None


# --- the end of the program, and the keys -----------------------------------------------------------------------------

AT_EXIT = """
import numpy as np
import distdl_jax as dj

spec = dj.TensorSpec((2,), dj.Partition().grid([1]))
of_the_module = dj.data.batches(np.zeros((20, 2)), spec, 4, epochs=None)
next(of_the_module)
in_a_cycle = [dj.data.batches(np.zeros((20, 2)), spec, 4, epochs=None)]
in_a_cycle.append(in_a_cycle)
print("done")
"""


def test_a_program_ends_with_open_iterators() -> None:
    assert run_alone("-c", AT_EXIT) == (0, "done\n")


KEYS = """
import importlib, pkgutil
import jax
import distdl_jax as dj

P, traces = dj.Partition(), 0


@dj.jit
def f(x):
    global traces
    traces += 1
    return dj.all_reduce(x, P, "sum")


f(1.0)
made = []
jax.make_user_context = lambda *default: made.append(default)
for module in pkgutil.walk_packages(dj.__path__, "distdl_jax."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
f(1.0)
print(traces, made, flush=True)
"""


def test_modules_that_are_imported_later_leave_programs_as_they_are() -> None:
    """They would be traced again, if a new context became part of the keys: on some workers, or all."""
    status, output = run(1, "-c", KEYS)
    assert status == 0 and "1 []" in output, output
