"""A picture of a distributed function's plan: a row for each movement, with its bytes."""

import jax
import jax.numpy as jnp
from tools.draw.reading import SVG, of_class, parsed, title_of

import distdl_jax as dj
from distdl_jax.tools.draw.plans import MOST_ROWS


def drawn(f, times: int = 1):  # type: ignore[no-untyped-def]
    """Return the plan of the first of four workers, and its picture."""

    def repeated(x: jax.Array) -> jax.Array:
        for _ in range(times):
            x = f(x)
        return x

    def program():  # type: ignore[no-untyped-def]
        spec = dj.TensorSpec((12, 8), dj.Partition().grid([2, 2]))
        plan = dj.distribute(repeated, (spec,), dj.BLOCKS, gather=None).plan(jax.ShapeDtypeStruct((6, 4), "float32"))
        return plan, dj.draw(plan)

    return dj.simulate(4, program)[0]


def test_each_movement_has_a_row_with_its_bytes() -> None:
    plan, drawing = drawn(lambda x: jnp.cumsum(x - jnp.roll(x, 1, axis=0), axis=1).sum(1))
    root = parsed(drawing.svg)
    bars = [title_of(rect) for rect in root.iter(f"{SVG}rect") if " for " in title_of(rect)]
    assert len(bars) == len(plan.moved) > 1
    assert bars[0].startswith("neighbours for ") and "12 x 8 in 2 x 2 blocks: 16 B in 1 message" in bars[0]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert f"This worker sends {plan.messages} messages, {plan.bytes} B, in order" in texts
    assert next(text for text in texts if text and " in 1 message" in text) == "16 B in 1 message"
    assert drawing.text == f"{title_of(root)}\n{plan}"
    # Where the cut changes there is an arrow from the blocks before to those after.
    changed = [moved for moved in plan.moved if moved.before != moved.after or "sum" in moved.what]
    assert len(of_class(root, "arrow")) == len(changed)


def test_long_plans_are_cut_and_empty_ones_say_so() -> None:
    plan, drawing = drawn(lambda x: jnp.sin(x - jnp.roll(x, 1, axis=0)), MOST_ROWS + 2)
    assert f"Drawn are {MOST_ROWS} of {len(plan.moved)} movements." in drawing.svg
    _, drawing = drawn(jnp.sin)
    assert parsed(drawing.svg)[0].text == "Nothing moves" and str(drawing) == "Nothing moves"
