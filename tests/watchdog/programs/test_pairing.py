"""`jax.grad` where workers differentiate different movements: the gradient is right, or refused. Never mixed.

What is right `dj.grad` says, which has all workers run all adjoints.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launcher.settings import long_run

import distdl_jax as dj
from distdl_jax.watchdog.programs.origins import Pairing

LONG = long_run()
WORKERS = 3
MOVEMENTS = 4


def movements(P: dj.Partition) -> list:
    """Of equal shapes on every worker, so that any adjoint fits any other of its kind."""
    line, one = P.grid([WORKERS]), P.create_partition_inclusive([1])
    root = one.grid([1])
    grid = P.grid([WORKERS, 1])
    F = dj.functional
    exchanged = P.grid([WORKERS, 1], [2, 0, 1])
    return [
        lambda x: F.all_sum_reduce(x, line, axes_reduce=0),
        lambda x: F.broadcast(x, root, line) * 1.0,
        lambda x: F.broadcast(F.sum_reduce(x, line, root), root, line),
        lambda x: F.repartition(x, grid, exchanged),
        lambda x: F.halo_exchange(x, grid, ((1, 1), (0, 0)))[:2],
    ]


class Around:
    """A movement as it is, or inside something that JAX differentiates in its own way."""

    def __init__(self, known: list, x) -> None:
        self.known, self.x = known, x
        self.shared: dict = {}

    def __call__(self, kind: int, which: int):
        move = self.known[which]
        if kind >= OWN:
            if (kind, which) not in self.shared:
                self.shared[kind, which] = self._shared(kind, move)
            return self.shared[kind, which]
        return [
            move,
            jax.checkpoint(lambda x: jnp.sin(move(jnp.sin(x)))),
            lambda x: jax.lax.scan(lambda carry, _: (0.5 * move(carry), None), x, None, length=2)[0],
            lambda x: jax.jit(lambda x: move(2 * x))(x),
            lambda x: jnp.sum(jax.vmap(move)(jnp.stack([x, 3 * x])), 0),
        ][kind]

    def _shared(self, kind: int, move):
        """Traced once, and used wherever it is drawn: in JAX's programs the scopes of all uses are the same."""

        def step(carry, _):
            return 0.5 * move(carry), None

        if kind == OWN:
            return jax.jit(move)
        if kind == OWN + 1:
            return lambda x: jax.lax.scan(step, x, None, length=2)[0]
        pullback = jax.vjp(move, jnp.sin(self.x))[1]
        return lambda x: pullback(x)[0]


OWN = 5
KINDS = 8


def movements_of_all() -> list:
    """The same of what all workers hold, stacked."""

    def copies(x):
        return jnp.broadcast_to(x, (WORKERS, *x.shape))

    def halo(x):
        rows = x.reshape(2 * WORKERS, 1)
        return jnp.stack([rows[max(2 * w - 1, 0) :][:2] for w in range(WORKERS)])

    return [
        lambda x: copies(x.sum(0)),
        lambda x: copies(x[1]),
        lambda x: copies(x.sum(0)),
        lambda x: jnp.roll(x, -1, 0),
        halo,
    ]


class Program:
    """Movements in a row, of which each worker differentiates others; the same for one worker and for all of them."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        kinds = rng.integers(MOVEMENTS + 1, size=1 + seed % 2)  # few, so that many are alike
        around = rng.integers(KINDS, size=1 + seed % 4)
        self.drawn = [
            (int(rng.choice(kinds)), int(rng.choice(around)), float(rng.integers(1, 5))) for _ in range(MOVEMENTS)
        ]
        stops = rng.random((WORKERS, MOVEMENTS)) < 0.4
        self.stops = stops[[0] * WORKERS] if seed % 3 == 0 else stops  # then nothing is wrong
        self.shares = any(kind >= OWN for _, kind, _ in self.drawn)
        self.before = rng.random(MOVEMENTS) < 0.5  # whether it is the input of the movement that has no derivative
        self.chained = bool(rng.integers(2))
        self.x = rng.normal(size=(WORKERS, 2, 1))

    def loss(self, known: list, stopped, x):
        """`stopped(n, y)`: y, without a derivative where it is to have none of the n-th movement."""
        total, y, around = 0.0, x, Around(known, x)
        for n, (which, kind, factor) in enumerate(self.drawn):
            move = around(kind, which)
            moved = move(stopped(n, factor * y)) if self.before[n] else stopped(n, move(factor * y))
            total += jnp.sum(jnp.sin(moved)) * (n + 1)
            y = x + 0.1 * moved if self.chained else x
        return total

    def of_worker(self, P: dj.Partition):
        def stopped(n: int, y):
            return jax.lax.stop_gradient(y) if self.stops[P.rank, n] else y

        return lambda x: self.loss(movements(P), stopped, x)

    def of_all(self, x):
        def stopped(n: int, y):
            return jnp.where(self.stops[:, n, None, None], jax.lax.stop_gradient(y), y)

        return self.loss(movements_of_all(), stopped, x)


def gradients(seed: int) -> tuple[list[np.ndarray], np.ndarray | None]:
    """By `dj.grad` under `dj.jit`, `jax.jit` and eagerly, and by `jax.grad`, where that is not refused.

    `jax.grad` is not tried on functions that are traced once for several uses: it can't tell these apart.
    """
    program, P = Program(seed), dj.Partition()
    loss = program.of_worker(P)
    x = jnp.asarray(program.x[P.rank])
    ways = (dj.jit, jax.jit, lambda f: f)[: 3 if LONG or seed % 3 == 1 else 2]
    right = [np.asarray(jit(dj.grad(loss))(x)) for jit in ways]
    if program.shares:
        return right, None
    try:
        return right, np.asarray(dj.jit(jax.grad(loss))(x))
    except dj.PlanError:
        return right, None


@pytest.mark.parametrize("seed", range(200 if LONG else 4))
def test_the_gradient_is_right_or_refused(seed: int) -> None:
    program = Program(seed)
    expected = np.asarray(jax.jit(jax.grad(program.of_all))(program.x))
    found = dj.simulate(WORKERS, gradients, seed)
    assert len({given is None for _, given in found}) == 1
    assert seed % 3 or program.shares or found[0][1] is not None
    for (right, given), want in zip(found, expected, strict=True):
        for each in right if given is None else [*right, given]:
            np.testing.assert_allclose(each, want, rtol=1e-11, atol=1e-11)


def derivative_of_gradient(seed: int) -> np.ndarray | None:
    """By `dj.grad` of what `jax.grad` gives, which may be mixed where workers differentiate different movements."""
    program, P = Program(seed), dj.Partition()
    loss = program.of_worker(P)
    try:
        again = dj.jit(dj.grad(lambda x: jnp.vdot(jax.grad(loss)(x), jnp.cos(x))))
        return np.asarray(again(jnp.asarray(program.x[P.rank])))
    except dj.PlanError:
        return None


# By the scopes of calls alone the adjoints of the first two would not be told from movements, and be mixed. `jax.grad`
# can't tell apart the uses of a function that was traced once, so programs with such functions are left out.
OF_DERIVATIVES = [500, 520, *(seed for seed in (range(480, 600) if LONG else (492, 504)) if not Program(seed).shares)]


@pytest.mark.parametrize("seed", OF_DERIVATIVES)
def test_the_derivative_of_a_gradient_is_right_or_refused(seed: int) -> None:
    program = Program(seed)
    of_all = jax.grad(lambda x: jnp.vdot(jax.grad(program.of_all)(x), jnp.cos(x)))
    found = dj.simulate(WORKERS, derivative_of_gradient, seed)
    if all(given is None for given in found):
        assert seed % 3
    else:
        np.testing.assert_allclose(np.stack(found), jax.jit(of_all)(program.x), rtol=1e-10, atol=1e-10)


def swapped() -> None:
    """Two movements alike, of which the one worker differentiates the first and the other the second."""
    P = dj.Partition()
    line = P.grid([2])

    def loss(x):
        a, b = (dj.functional.all_sum_reduce(n * x, line, axes_reduce=0) for n in (2, 3))
        a, b = (a, jax.lax.stop_gradient(b)) if P.rank == 0 else (jax.lax.stop_gradient(a), b)
        return jnp.sum(a * a) + jnp.sum(b)

    dj.jit(jax.grad(loss))(jnp.ones(1))


def test_the_message() -> None:
    with pytest.raises(dj.PlanError, match=r"they are the adjoints of two movements, and would be mixed\. .*dj\.grad"):
        dj.simulate(2, swapped)


def test_what_meets_is_one() -> None:
    """Workers number their movements as they like; some are one by way of a third worker."""
    pairing = Pairing()
    pairing.meet([(0, 1), (1, 7)])
    pairing.meet([(1, 7), (2, 4)])
    pairing.meet([(0, 2), (2, 5)])
    assert not pairing.are_apart((0, 1), (2, 4))
    assert pairing.are_apart((0, 1), (2, 5))
    assert pairing.are_apart((2, 4), (0, 2))
    assert not pairing.are_apart((0, 2), (1, 9))  # nothing is known of the two
    pairing.meet([(0, 1), (2, 5)])  # a function that JAX traced once here, and twice there
    assert not pairing.are_apart((0, 1), (2, 5))
    assert not pairing.are_apart((0, 2), (2, 4))
