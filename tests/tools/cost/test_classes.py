"""Workers that count as alike: what is predicted of them by class is, exactly, what each does by itself."""

from math import prod
from typing import Any

import numpy as np
import pytest
from drawn import drawn
from predicted import FLOAT32, blocks, communicated, step_operations

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.functional.plan import MovementPlan
from distdl_jax.plans import alike
from distdl_jax.plans.decomposition import ProductGrid, ranges_of_sizes
from distdl_jax.plans.exchange import Exchange
from distdl_jax.plans.halos import Halos
from distdl_jax.tools.cost.classes import halo_counts, repartition_counts
from distdl_jax.tools.cost.cost import placed_layers
from distdl_jax.tools.cost.layers import Counter, Joined, nodes_in
from distdl_jax.tools.cost.traces import _Tracer


def test_a_class_has_one_value() -> None:
    """Of workers with equal labels the first is asked, once."""
    asked: list[int] = []

    def value(worker: int) -> int:
        asked.append(worker)
        return worker // 10

    values = alike.ByClass((10, 11, 20, 21, 30, 31), ["aba", "x", "cc"], value)
    assert dict(values) == {10: 1, 11: 1, 20: 2, 21: 2, 30: 1, 31: 1}
    assert asked == [10, 20]
    assert alike.representatives(values) == (10, 20)
    assert 12 not in values and values.get(12) is None
    both = alike.derived(lambda worker: worker, values, alike.ByClass(values.ranks, ["ppp", "qr"], lambda worker: 0))
    assert alike.representatives(both) == (10, 11, 20, 21)


@pytest.mark.parametrize("seed", range(20))
def test_amounts_by_class_are_those_of_every_worker(seed: int) -> None:
    """Of drawn networks on drawn grids: of workers that are looked at, each traced by itself."""
    draw = np.random.default_rng(seed)
    build, size = drawn(3 * seed, 64)
    network, spec = build(dj.planning_world(size))
    world = spec.partition.world
    workers = sorted(draw.permutation(world.size)[:6].tolist())
    cost, x = dj.cost(network, spec), blocks(spec, FLOAT32)
    chain = Counter(world, FLOAT32).chain(network, network.plan(x), x)
    for layer, placed in zip(cost.layers, placed_layers(network), strict=True):
        expected = expected_parameters(placed, workers)
        for name, numbers in expected.items():
            assert getattr(layer.amounts, name)[workers].tolist() == numbers, (placed.place, name)
    assert {layer.place for layer in cost.layers} == {node.place for node in nodes_in(chain)}
    for node, tracer in leaves(network, network.plan(x).plans, x, chain, world):
        for worker in workers:
            own, of_class = tracer.trace(worker, node.y[worker]), node.trace(worker)
            for name in ("flops", "flops_x", "flops_params", "written", "stored"):
                assert getattr(own, name) == getattr(of_class, name), (node.place, worker, name)
            for direction in ("forward", "of_params", "of_both"):
                mine, of_all = (list(communicated(getattr(trace, direction), worker)) for trace in (own, of_class))
                assert mine == of_all, (node.place, worker, direction)
    for worker in workers:
        sent = [op for op in step_operations(chain, worker) if op.is_message and op.dest is not None]
        together = [op for op in step_operations(chain, worker) if not op.is_message]
        assert cost.messages[worker] == len(sent)
        assert cost.bytes[worker] == sum(op.bytes_sent for op in (*sent, *together))


def expected_parameters(placed: Any, workers: list[int]) -> dict[str, list[int]]:
    found = []
    for worker in workers:
        own = [spec.shape_on(worker) for spec in placed.param_specs if worker in spec.partition.ranks]
        found.append(4 * sum(map(prod, own)))
    return {"parameters": found, "gradients": found, "optimiser": [2 * nbytes for nbytes in found]}


def leaves(layers: Any, plans: Any, x: Any, chain: Any, world: Any) -> Any:
    """Yield the layers of a chain, and of ways around layers, each with what traces it; not movements alone."""
    for layer, plan, node in zip(layers, plans, chain, strict=True):
        if isinstance(node, Joined) and isinstance(layer, nn.Residual | nn.Skip):
            (body,) = (way for way in node.ways if way is not None)
            is_chain = isinstance(layer.body, nn.Sequential)
            inner = (layer.body, plan.body.plans) if is_chain else ([layer.body], [plan.body])
            yield from leaves(*inner, x, body, world)
        elif not isinstance(node, Joined) and not isinstance(plan, MovementPlan):
            yield node, _Tracer(layer, plan, x, world, FLOAT32)
        x = plan.after(x)


@pytest.mark.parametrize("seed", range(200))
def test_closed_forms_are_the_sums_over_all_plans(seed: int) -> None:
    """Messages and elements, there and back, of repartitions and halo exchanges with uneven and empty blocks."""
    draw = np.random.default_rng(seed)
    dims = int(draw.integers(1, 4))
    shape, other = (tuple(draw.integers(1, 5, dims).tolist()) for _ in range(2))
    owned = [ranges_of_sizes(draw.integers(0, 5, p).tolist()) for p in shape]
    extent = [ranges[-1][1] for ranges in owned]
    world = int(draw.integers(max(prod(shape), prod(other)), 70))
    first, second = (tuple(draw.permutation(world)[: prod(each)].tolist()) for each in (shape, other))
    cuts = [np.sort(draw.integers(0, n + 1, p - 1)) for n, p in zip(extent, other, strict=True)]
    sizes = [np.diff([0, *cut, n]).tolist() for cut, n in zip(cuts, extent, strict=True)]
    exchange = Exchange(
        ProductGrid(first, tuple(owned)), ProductGrid(second, tuple(ranges_of_sizes(each) for each in sizes))
    )
    for workers, (messages, numbers), there in (
        (first, repartition_counts(exchange.owned, exchange.needed), True),
        (second, repartition_counts(exchange.needed, exchange.owned), False),
    ):
        moved = [exchange.plan(worker).sends if there else exchange.plan(worker).recvs for worker in workers]
        assert messages.tolist() == list(map(len, moved))
        assert numbers.tolist() == list(map(elements, moved))

    periodic = tuple(bool(draw.integers(2)) and n > 0 for n in extent)
    needed = []
    for n, ranges, wraps in zip(extent, owned, periodic, strict=True):
        widened = [(a - draw.integers(-1, 4), b + draw.integers(-1, 4)) for a, b in ranges]
        clipped = [(int(a), int(b)) if wraps else (int(np.clip(a, 0, n)), int(np.clip(b, 0, n))) for a, b in widened]
        needed.append(tuple((a, max(a, b)) for a, b in clipped) if draw.random() < 0.8 else ranges)
    halos = Halos(ProductGrid(first, tuple(owned)), tuple(needed), periodic)
    steps = [halos.plans(worker) for worker in first]
    for adjoint in (False, True):
        sent = [[step.recvs if adjoint else step.sends for step in each] for each in steps]
        counts = halo_counts(halos, adjoint=adjoint)
        assert counts[0].tolist() == [sum(map(len, each)) for each in sent]
        assert counts[1].tolist() == [sum(map(elements, each)) for each in sent]


def elements(messages: Any) -> int:
    return sum(message.size for message in messages)
