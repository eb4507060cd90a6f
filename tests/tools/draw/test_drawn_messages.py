"""The picture of `dj.check`: every message once, in an order in which it can go, and who is left waiting."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tools.draw.reading import of_class, parsed

import distdl_jax as dj
from distdl_jax import functional as F
from distdl_jax.tools.draw.messages import MOST_EVENTS, DrawnEvent, draw_messages
from distdl_jax.watchdog.programs.ir import Cond, Loop, Operation, Program
from distdl_jax.watchdog.programs.matching import play_back
from distdl_jax.watchdog.programs.report import Report


@pytest.mark.simulated(4)
def test_a_check_is_drawn_alike_on_all_workers() -> None:
    """With an arrow for each message, and a line for the operation of a team in a loop, with its passes."""
    P = dj.Partition()
    P_x = P.grid([2, 2])

    def fun(x: jax.Array) -> Any:
        wide = F.halo_exchange(x, P_x, ((1, 1), (0, 0)))

        def step(total: Any, _: Any) -> tuple[Any, None]:
            return total + F.all_sum_reduce(jnp.sum(wide), P.grid([4]), axes_keep=()), None

        return jax.lax.scan(step, 0.0, None, length=5)[0]

    report = dj.check(fun, dj.TensorSpec((4, 4), P_x).block(jnp.ones((4, 4))))
    drawing = dj.draw(report)
    root = parsed(drawing.svg)
    assert len(of_class(root, "arrow")) == 4
    assert "5 times" in drawing.text and "allreduce of workers 0-3" in drawing.text
    assert P.allgather_data(drawing) == [drawing] * 4


def message(source: int, dest: int, kind: str, count: int = 3) -> Operation:
    if kind == "send":
        return Operation("send", (), dest=dest, count=count, itemsize=4, dtype="float32")
    return Operation("recv", (), source=source, received=count, itemsize=4, dtype="float32")


def report(programs: dict[int, Program], problem: str | None = None) -> Report:
    return Report("step", programs, problem)


def test_messages_are_in_an_order_in_which_they_can_go() -> None:
    """A chain from worker to worker: each passes on what it has got, though worker 0's program is read first."""
    passes: dict[int, Program] = {
        0: (message(2, 0, "recv"),),
        1: (message(1, 2, "send"),),
        2: (message(1, 2, "recv"), message(2, 0, "send")),
    }
    happened, waiting = play_back(passes)
    assert [team for _, team, _ in happened] == [(1, 2), (2, 0)] and not waiting
    assert drawn_bytes_of(report(passes)) == {(1, 2): 12, (2, 0): 12}


def test_workers_that_wait_are_marked() -> None:
    """A worker sends to one whose program is over."""
    programs: dict[int, Program] = {0: (message(0, 1, "send"), message(0, 1, "send")), 1: (message(0, 1, "recv"),)}
    drawing = dj.draw(report(programs, "worker 1's plan ends"))
    assert drawn_bytes_of(report(programs)) == {(0, 1): 12}
    assert "worker 0 waits: send to worker 1 (3 x float32)" in drawing.text
    assert drawing.text.endswith("worker 1's plan ends")
    assert ">?</text>" in drawing.svg


def test_loops_are_drawn_once_and_branches_the_first() -> None:
    inner: dict[int, Program] = {0: (message(0, 1, "send"),), 1: (message(0, 1, "recv"),)}
    programs: dict[int, Program] = {w: (Loop(7, inner[w]), Loop(None, (Cond((inner[w], ())),))) for w in (0, 1)}
    drawing = dj.draw(report(programs))
    assert len(of_class(parsed(drawing.svg), "arrow")) == 2
    assert "7 times" in drawing.text and "as often as the data decide" in drawing.text


def test_receives_from_whoever_sends_first_are_matched() -> None:
    anyone = Operation("recv", (0, 1, 2), received=3, itemsize=4, dtype="float32", from_any=True)
    programs: dict[int, Program] = {0: (anyone, anyone), 1: (message(1, 0, "send"),), 2: (message(2, 0, "send"),)}
    assert drawn_bytes_of(report(programs)) == {(1, 0): 12, (2, 0): 12}


def test_many_messages_and_workers_are_summed_up() -> None:
    """The picture stays small, and says what is left out."""
    events = [DrawnEvent("message", (i % 99, (i + 1) % 99), 8, "") for i in range(1000)]
    drawing = draw_messages("step", range(100), events, {}, [])
    root = parsed(drawing.svg)
    assert len(of_class(root, "arrow")) == MOST_EVENTS
    assert "36 more workers" in drawing.text and f"{MOST_EVENTS} of 1,000" in drawing.text


def drawn_bytes_of(report: Report) -> dict[tuple[int, int], int]:
    """Return the bytes of each arrow's title: `source → dest  n bytes`."""
    found: dict[tuple[int, int], int] = {}
    for line in dj.draw(report).text.splitlines()[1:]:
        words = line.split()
        if len(words) > 5 and words[2] == "→":
            pair = int(words[1]), int(words[3])
            found[pair] = found.get(pair, 0) + int(words[4])
    assert len(found) == len(of_class(parsed(dj.draw(report).svg), "arrow"))
    return found
