"""Bars in a table: one scale for all rows, parts that add up, and text that says the same."""

import pytest
from tools.draw.reading import SVG, parsed, title_of

from distdl_jax.tools.draw.bars import FILLS, LONGEST, bars

ROWS = [
    (["0 Conv2d", "4", "1.2 MB"], [900.0, 300.0]),
    (["1 <relu> & more", "0", "0 B"], []),
    (["2 Linear", "12", "0.3 MB"], [100.0, 200.0]),
]


def test_lengths_share_one_scale() -> None:
    root = parsed(bars("A step", ["layer", "messages", "bytes"], ROWS, ["forward", "backward"], ["A note."]).svg)
    drawn = [rect for rect in root.iter(f"{SVG}rect") if title_of(rect)]
    assert [title_of(rect) for rect in drawn] == [
        *("0 Conv2d: forward", "0 Conv2d: backward", "2 Linear: forward", "2 Linear: backward")
    ]
    assert [rect.get("fill") for rect in drawn] == [*FILLS[:2], *FILLS[:2]]
    got = [float(rect.get("width", "nan")) for rect in drawn]
    assert got == pytest.approx([LONGEST * n / 1200 for n in (900, 300, 100, 200)], abs=0.06)
    x, width = ([float(rect.get(name, "nan")) for rect in drawn] for name in ("x", "width"))
    assert x[1] == pytest.approx(x[0] + width[0], abs=0.11) and x[0] == x[2]
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"A step", "layer", "messages", "1.2 MB", "1 <relu> & more", "forward", "A note."} <= texts


def test_text_is_the_same_table() -> None:
    assert bars("A step", ["layer", "messages", "bytes"], ROWS, ["forward", "backward"], ["A note."]).text == (
        "A step\n"
        "layer            messages   bytes\n"
        "0 Conv2d                4  1.2 MB  ######################========\n"
        "1 <relu> & more         0     0 B\n"
        "2 Linear               12  0.3 MB  ##======\n"
        "A note."
    )


def test_no_bars_and_no_rows() -> None:
    assert bars("Empty", ["layer"], []).text == "Empty\nlayer"
    parsed(bars("Empty", ["layer"], []).svg)
    parsed(bars("Zeros", ["layer"], [(["a"], [0.0, 0.0])], ["one", "two"]).svg)
