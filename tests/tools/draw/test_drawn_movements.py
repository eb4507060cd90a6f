"""Pictures of movements and layers say what their plans say: blocks, messages and bytes."""

from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
import pytest
from every_layer import LAYERS as EVERY_LAYER
from every_layer import spec_of_x
from matrix.case import Case
from matrix.cases import PRIMITIVES, shape_dtypes
from playing import planned
from tools.cost.predicted import forward_operations
from tools.draw.reading import SVG, areas, drawn_bytes, of_class, parsed, planned_bytes, title_of

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.errors import PlanError
from distdl_jax.functional.plan import Plan
from distdl_jax.tools.cost.layers import Counter
from distdl_jax.tools.draw.layers import draw_plan, plan_movements
from distdl_jax.watchdog.programs.ir import Operation

SINGLE = np.dtype(np.float32)


def operations(plan: Plan) -> dict[int, list[Operation]]:
    """Return what workers communicate forward, by the movements that are drawn."""
    movements = plan_movements(plan)
    if movements is None:
        raise PlanError("Its movements are unknown.")
    return {worker: [op for each in movements for op in each.movement.operations(worker)] for worker in plan.workers}


def layer_operations(
    layer: Any, P: dj.Partition, x: dict[int, dj.ShapeDtype], **options: Any
) -> dict[int, list[Operation]]:
    """Return what workers communicate forward in a layer, by its trace."""
    plan = layer.plan(x, **options)
    chain = Counter(P.world, SINGLE).chain(layer, plan, x)
    return {worker: list(forward_operations(chain, worker, once=True)) for worker in x}


@pytest.mark.parametrize("case", [case for case in PRIMITIVES if case.world <= 8], ids=str)
def test_arrows_are_the_plan_s_messages(case: Case) -> None:
    """Every operator of the matrix, of blocks of any shape: a picture with an arrow, or a square, for each message."""
    plan = planned(case.world, lambda P: case.plan(P, shape_dtypes(case)))
    drawing = draw_plan(case.kind, plan)
    root = parsed(drawing.svg)
    try:
        found = operations(plan)
    except PlanError:
        assert "are unknown" in drawing.text
        return
    assert drawn_bytes(root) == planned_bytes(found)
    for source, dest in planned_bytes(found):
        assert f"{source} → {dest}" in drawing.text
    calls = {f"{op.kind}: {op.bytes_sent:,} bytes" for some in found.values() for op in some if not op.is_message}
    assert calls <= {title.text for title in root.iter(f"{SVG}title")}
    if not planned_bytes(found) and not calls:
        assert "No message is sent." in drawing.text


@pytest.mark.parametrize("name", EVERY_LAYER)
def test_every_kind_of_layer_is_drawn_with_its_blocks_and_messages(name: str) -> None:
    """On every worker the same picture, with the blocks of x and y as far as these are known, and the plan's bytes."""
    pictures = []
    for rank in (0, 3):
        layer = EVERY_LAYER[name](dj.planning_world(4, rank))
        spec = spec_of_x(name, layer)
        pictures.append(dj.draw(layer, spec))
    assert pictures[0] == pictures[1]
    root = parsed(pictures[0].svg)
    P_x = spec.partition
    options = {"halos": dict.fromkeys(P_x.ranks, layer.halo)} if name == "HaloExchange" else {}
    dtype = np.dtype("int32" if layer.takes_indices else "float32")
    x = {worker: dj.ShapeDtype(spec.shape_on(worker), dtype) for worker in range(4)}
    assert drawn_bytes(root).total() == planned_bytes(layer_operations(layer, P_x, x, **options)).total()
    specs = [spec]
    with suppress(PlanError, dj.InvalidArgumentError):
        specs.append(layer.output_spec(spec))
    blocks = [block for each in specs for block in each.block_shapes.values() if 0 not in block]
    assert len(of_class(root, "block")) >= len(blocks)


GRIDS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...], tuple[bool, ...]]] = {
    "a strip": ((12,), (3,), ((1, 2),), ()),
    "a ring": ((12,), (4,), ((1, 1),), (True,)),
    "further than the neighbour": ((8,), (4,), ((3, 3),), ()),
    "a plane": ((8, 9), (2, 3), ((1, 1), (2, 1)), ()),
    "channels that are whole": ((1, 3, 8, 8), (1, 1, 2, 2), ((0, 0), (0, 0), (1, 1), (1, 1)), ()),
    "a torus": ((6, 6), (2, 2), ((1, 1), (1, 1)), (True, True)),
    "a volume": ((1, 1, 8, 8, 8), (1, 1, 2, 2, 2), ((0, 0), (0, 0), (1, 1), (1, 1), (1, 1)), ()),
    "space and time": ((4, 4, 4, 6), (2, 2, 2, 2), ((1, 1), (1, 1), (1, 1), (1, 1)), ()),
    "64 workers": ((64, 64, 64), (4, 4, 4), ((1, 1), (1, 1), (1, 1)), ()),
    "empty blocks": ((3,), (5,), ((1, 1),), ()),
}


@pytest.mark.parametrize("name", GRIDS)
def test_strips_are_the_halos_that_arrive(name: str) -> None:
    """Each strip is of the worker whose entries it holds; all of them have the bytes of the plan."""
    shape, grid, halo, periodic = GRIDS[name]
    size = prod(grid)
    P = dj.planning_world(size).grid(grid)
    layer, spec = nn.HaloExchange(P, halo, periodic), dj.TensorSpec(shape, P)
    root = parsed(dj.draw(layer, spec).svg)
    x = {worker: dj.ShapeDtype(spec.shape_on(worker), SINGLE) for worker in range(size)}
    want = planned_bytes(layer_operations(layer, P, x, halos=dict.fromkeys(P.ranks, halo)))
    got = drawn_bytes(root)
    between_slabs = got.pop((-1, -1), 0)
    assert got.total() + between_slabs == want.total()
    assert all(got[pair] == want[pair] for pair in got)
    assert bool(between_slabs) == (sum(p > 1 for p in grid) > 2)
    filled = [block for block in spec.block_shapes.values() if 0 not in block]
    assert len(of_class(root, "block")) == len(filled)


def test_boxes_of_a_repartition_are_hatched_where_they_come_from_elsewhere() -> None:
    """One for each message; dashed where they leave."""
    P = dj.planning_world(4)
    layer = nn.Repartition(P.grid([2, 2]), P.grid([4, 1]))
    drawing = dj.draw(layer, dj.TensorSpec((8, 8), layer.P_x))
    root = parsed(drawing.svg)
    messages = drawn_bytes(root)
    assert len(of_class(root, "strip")) == len(messages) == len(of_class(root, "arrow"))
    assert sum("stroke-dasharray" in element.attrib for element in root.iter()) == len(messages)
    faces, boxes = areas(root)
    columns = {0: (0, 4), 1: (4, 8), 2: (0, 4), 3: (4, 8)}
    for (source, dest), box in boxes.items():
        face, (start, stop) = faces[dest], columns[source]
        assert (box.x - face.x) / face.w == pytest.approx(start / 8, abs=0.02)
        assert box.w / face.w == pytest.approx((stop - start) / 8, abs=0.02)
        assert (box.y, box.h) == (face.y, face.h)


def test_a_strip_is_on_the_side_of_the_worker_that_sent_it() -> None:
    """Before the block where the sender is before it along that dimension, and after it else."""
    P = dj.planning_world(6).grid([2, 3])
    drawing = dj.draw(nn.HaloExchange(P, ((1, 1), (2, 1))), dj.TensorSpec((8, 9), P))
    faces, strips = areas(parsed(drawing.svg))
    assert len(faces) == 6 and len(strips) == 14
    for (source, dest), strip in strips.items():
        face = faces[dest]
        if source // 3 == dest // 3:
            meets = (strip.x + strip.w, face.x) if source < dest else (strip.x, face.x + face.w)
            assert strip.h > face.h  # with the corners, which ride along
        else:
            meets = (strip.y + strip.h, face.y) if source < dest else (strip.y, face.y + face.h)
            assert strip.w == face.w
        assert meets[0] == pytest.approx(meets[1], abs=0.2)


def test_messages_of_a_movement_are_in_an_order_in_which_they_can_go() -> None:
    """Of a sum along a tree, a worker's message is below those of which it sends the sum."""
    P = dj.planning_world(8)
    plan = nn.SumReduce(P.grid([8]), P.grid([1])).plan(dict.fromkeys(P.ranks, dj.ShapeDtype((3,), SINGLE)))
    arrows = of_class(parsed(draw_plan("SumReduce", plan).svg), "arrow")
    height = {}
    for arrow in arrows:
        source, dest = map(int, title_of(arrow).split(":")[0].split(" to "))
        height[source, dest] = float(str(arrow[-1].get("d")).split("L")[0].split()[1])
    assert len(height) == 7
    for (_, worker), above in height.items():
        assert all(above < below for (source, _), below in height.items() if source == worker)


def test_many_messages_are_squares() -> None:
    """One for each pair, with the plan's bytes; with very many, shade by shade."""
    P = dj.planning_world(64)
    for n in (8, 64):
        P_x, P_y = P.grid([n, 1]), P.grid([1, n])
        layer, spec = nn.Repartition(P_x, P_y), dj.TensorSpec((2 * n, 64), P_x)
        root = parsed(dj.draw(layer, spec).svg)
        x = {worker: dj.ShapeDtype(spec.shape_on(worker), SINGLE) for worker in range(64)}
        want = planned_bytes(layer_operations(layer, P, x))
        assert len(want) == n * (n - 1) and not of_class(root, "arrow")
        paths = "".join(path.get("d") or "" for path in root.iter(f"{SVG}path") if path.get("fill-opacity"))
        assert drawn_bytes(root) == want if n == 8 else paths.count("z") == len(want)


@pytest.mark.parametrize("grids", [((64, 64), (4096, 1)), ((20_000, 1), (1, 20_000))], ids=str)
def test_thousands_of_workers_are_summed_up(grids: Any) -> None:
    """The first 64 are drawn, and what is left out is said; also where each worker sends to all others."""
    size = prod(grids[0])
    P = dj.planning_world(size)
    P_x, P_y = (P.grid(grid) for grid in grids)
    drawing = dj.draw(nn.Repartition(P_x, P_y), dj.TensorSpec((size, size), P_x))
    parsed(drawing.svg)
    assert f"{size - 64:,} more of the" in drawing.text and "messages with omitted workers" in drawing.text


def test_a_convolution_and_a_product_on_4096_workers_are_drawn() -> None:
    """Within the same size; operations of large teams name their workers as ranges."""
    P = dj.planning_world(4096)
    P_x = P.grid([1, 1, 16, 16, 16])
    conv = nn.DistributedConv3d(P_x, in_channels=1, out_channels=4, kernel_size=3, padding=1)
    drawing = dj.draw(conv, dj.TensorSpec((1, 1, 128, 128, 128), P_x))
    parsed(drawing.svg)
    assert "bcast of 448 bytes among workers 0-4095 with root 0" in drawing.text
    P_f = P.grid([1, 64])
    linear = nn.DistributedLinear(P_f, P_f, P.grid([64, 64]), in_features=640, out_features=640)
    drawing = dj.draw(linear, dj.TensorSpec((8, 640), P_f))
    parsed(drawing.svg)
    assert "and 56 more team operations" in drawing.text


def test_a_network_names_the_layers_in_which_something_moves() -> None:
    """And leaves out movements beyond a number, with their bytes."""
    P = dj.planning_world(4).grid([1, 1, 2, 2])
    conv = nn.DistributedConv2d(P, in_channels=2, out_channels=2, kernel_size=3, padding=1)
    drawing = dj.draw(nn.Sequential(*[conv] * 12), dj.TensorSpec((1, 2, 8, 8), P))
    parsed(drawing.svg)
    assert "0 halos" in drawing.text and "Omitted: " in drawing.text
