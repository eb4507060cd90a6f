"""Pictures of partitions and tensors: every block once, with its worker and its box, and text for a terminal."""

import re
from math import prod
from pathlib import Path

import pytest
from tools.draw.reading import of_class, parsed, title_of

import distdl_jax as dj
from distdl_jax import nn

SPECS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one dimension": ((10,), (4,)),
    "many in one dimension": ((100,), (40,)),
    "two dimensions": ((7, 5), (2, 3)),
    "images": ((2, 3, 9, 8), (1, 1, 2, 2)),
    "samples": ((8, 3, 9, 8), (4, 1, 1, 1)),
    "a volume": ((1, 1, 9, 8, 7), (1, 1, 2, 2, 2)),
    "a volume in slabs": ((1, 2, 9, 8, 7), (1, 1, 4, 1, 1)),
    "space and time": ((1, 1, 4, 4, 4, 6), (1, 1, 2, 2, 2, 2)),
    "a cube of 64": ((64, 64, 64), (4, 4, 4)),
    "64 rows": ((64, 3), (64, 1)),
    "64 samples of volumes": ((64, 1, 8, 8, 8), (64, 1, 1, 1, 1)),
    "five dimensions": ((4, 4, 4, 4, 4), (2, 2, 2, 2, 2)),
    "more workers than rows": ((3, 4), (5, 1)),
}


@pytest.mark.parametrize("name", SPECS)
def test_every_block_is_drawn_with_its_worker_and_box(name: str) -> None:
    """Empty ones are listed; so are workers outside, and dimensions that aren't drawn."""
    shape, grid = SPECS[name]
    P = dj.planning_world(prod(grid) + 3).grid(grid)
    drawing = dj.draw(dj.TensorSpec(shape, P))
    root = parsed(drawing.svg)
    found = [title_of(block) for block in of_class(root, "block")]
    want = []
    for worker in P.ranks:
        box = dj.TensorSpec(shape, dj.planning_world(prod(grid) + 3, worker).grid(grid)).box
        if box and all(start < stop for start, stop in box):
            want.append(f"worker {worker}: [{', '.join(f'{start}:{stop}' for start, stop in box)}]")
    assert sorted(found) == sorted(want)
    assert ("Empty blocks: " in drawing.text) == (len(want) < P.size)
    outside = f"{prod(grid)}-{prod(grid) + 2}"
    assert f"Without a block: workers {outside}." in drawing.text
    numbers = re.findall(r"(?<=[|])\s+(\d+)\s+(?=[|])", drawing.text)
    assert sorted(map(int, numbers)) == sorted(int(re.findall(r"\d+", each)[0]) for each in want)


def test_copies_are_drawn_one_by_one_or_named_together() -> None:
    """Few copies have a picture each; of many, a block has the workers that hold it."""
    few = dj.draw(dj.TensorSpec((6,), dj.planning_world(6).grid([3, 2]), replicated=0))
    assert len(of_class(parsed(few.svg), "block")) == 6 and "copy 2" in few.text
    many = dj.draw(dj.TensorSpec((6,), dj.planning_world(16).grid([8, 2]), replicated=0))
    titles = [title_of(block) for block in of_class(parsed(many.svg), "block")]
    assert titles == ["workers 0, 2, 4, 6, 8, 10, 12, 14: [0:3]", "workers 1, 3, 5, 7, 9, 11, 13, 15: [3:6]"]
    scalar = dj.draw(dj.TensorSpec((), dj.planning_world(3), replicated=True))
    assert len(of_class(parsed(scalar.svg), "block")) == 3


@pytest.mark.parametrize("n", [65, 4096, 100_000])
def test_of_many_workers_the_first_are_drawn(n: int) -> None:
    P = dj.planning_world(n)
    for drawing in (dj.draw(P), dj.draw(P.grid([n, 1])), dj.draw(dj.TensorSpec((n, 4), P.grid([n, 1])))):
        assert len(of_class(parsed(drawing.svg), "block")) == 64
        assert f"{n - 64:,} more of the" in drawing.text


def test_a_partition_shows_its_order() -> None:
    """In a row; of a grid the docstring has an example. Outside workers are listed."""
    P = dj.planning_world(5)
    row = dj.draw(P.create_partition_inclusive([4, 2]))
    assert "2 workers in a row" in row.text and "Outside: workers 0, 1, 3." in row.text
    empty = dj.Partition.of_workers(P.world, ())
    assert "0 workers" in parsed(dj.draw(empty).svg)[0].text


def test_a_broadcast_as_text() -> None:
    P = dj.planning_world(2)
    layer = nn.Broadcast(P.grid([1]), P.grid([2]))
    text = str(dj.draw(layer, dj.TensorSpec((3,), layer.P_x)))
    of_x = "x: 3 on 1 worker, not split\n   0:3\n +-----+\n |  0  |\n +-----+\nWithout a block: worker 1.\n"
    assert text.startswith(f"Broadcast\n\n{of_x}y: 3 on 2 workers, not split\n copy 0\n")
    assert " copy 1\n   0:3\n +-----+\n |  1  |\n +-----+\nThere are 2 copies of the tensor.\n" in text
    assert text.endswith("\nbroadcast: 1 message, 12 bytes\n  12 bytes: 0 → 1")


def test_a_drawing_is_a_value(tmp_path: Path) -> None:
    """Jupyter takes its SVG; it saves it, and compares by what it shows. Text in it can't break the document."""
    P = dj.planning_world(4)
    drawing, again = dj.draw(P.grid([2, 2])), dj.draw(dj.planning_world(4, 3).grid([2, 2]))
    assert drawing == again and hash(drawing) == hash(again)
    drawing.save(tmp_path / "grid.svg")
    assert (tmp_path / "grid.svg").read_text() == drawing.svg == drawing._repr_svg_()
    assert repr(drawing) == "<Drawing: 2 x 2 grid of 4 workers>"
    with pytest.raises(AttributeError):
        drawing.svg = ""  # type: ignore[misc]


def test_what_is_no_spec_is_refused() -> None:
    P = dj.planning_world(2).grid([2, 1])
    layer = nn.Repartition(P, P)
    with pytest.raises(dj.InvalidTypeError, match="`x_spec`"):
        dj.draw(layer, (4, 4))  # type: ignore[arg-type]
    with pytest.raises(dj.PlanError):
        dj.draw(nn.DistributedLinear(P, in_features=3, out_features=2), dj.TensorSpec((4, 5), P))


def test_what_can_not_be_drawn_is_refused() -> None:
    P = dj.planning_world(2).grid([2, 1])
    layer, spec = nn.Repartition(P, P), dj.TensorSpec((2, 3), P)
    for args, options, error, words in (
        ((3,), {}, dj.InvalidTypeError, r"`x` \(=3\) must be a partition, a spec, a layer"),
        ((nn.Repartition,), {}, dj.InvalidTypeError, "must be a partition"),
        ((layer,), {}, dj.InvalidTypeError, r"`x_spec` \(=None\)"),
        ((P, spec), {}, dj.InvalidArgumentError, "`x_spec` must be omitted: it is for a layer"),
        ((layer, spec), {"halos": {0: ()}}, dj.InvalidArgumentError, "`halos` must be omitted: it is for an nn.Halo"),
        ((layer, spec), {"dtype": "text"}, dj.InvalidTypeError, "`dtype`"),
    ):
        with pytest.raises(error, match=words):
            dj.draw(*args, **options)
