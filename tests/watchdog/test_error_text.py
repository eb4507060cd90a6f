"""The text of errors: the lines of the user's program only."""

import json
from functools import cached_property

import jax
import jax.numpy as jnp
import pytest

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.watchdog.error_text import comparable, error_text, hiding_own_lines, show_own_lines
from distdl_jax.watchdog.launch.said_once import same_text

FILE = __file__


@pytest.fixture(autouse=True)
def filtered():
    """As users have it: the tests show all frames."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "auto")
    yield
    jax.config.update("jax_traceback_filtering", before)


def caught(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError


def frames(text):
    return [line for line in text.splitlines() if line.startswith("  File ")]


def wrong_layer():
    P = dj.planning_world(1).grid([1, 1, 1, 1])
    return nn.DistributedConv2d(P, in_channels=4, out_channels=3, kernel_size=3, padding="SAME")


class Lazy:
    """An error below a file of Python's own library."""

    @cached_property
    def value(self):
        return json.loads("{")


@pytest.mark.parametrize(
    "function, lines",
    [
        (wrong_layer, 2),
        (lambda: jax.jit(lambda x: 1 // 0)(1.0), 3),
        (lambda: jax.lax.scan(lambda c, x: (c @ "x", c), jnp.ones(3), None, length=2), 3),
        (lambda: dj.functional.mean(jnp.ones(3), dj.planning_world(1).grid([1]), axes=7), 2),
        (lambda: nn.Sequential(3), 2),
    ],
)
def test_only_the_users_lines_are_shown(function, lines):
    error = caught(function)
    text = error_text(error)
    assert len(frames(text)) == lines and all(FILE in frame for frame in frames(text)), text
    assert "JAX has removed" not in text and "~~~" not in text and str(error) in text


def test_errors_of_other_libraries_keep_their_lines():
    text = error_text(caught(lambda: Lazy().value))
    assert "json/decoder.py" in text and "functools.py" not in text


def test_causes_are_shown_and_what_the_library_has_caught_is_not():
    def causes():
        try:
            wrong_layer()
        except ValueError as error:
            raise KeyError("of the user") from error

    text = error_text(caught(causes))
    assert text.index("`padding` (='SAME')") < text.index("direct cause") < text.index("KeyError: 'of the user'")
    assert all(FILE in frame for frame in frames(text))


def test_all_lines_are_shown_on_request():
    jax.config.update("jax_traceback_filtering", "off")
    error = caught(wrong_layer)
    before = error.__traceback__
    show_own_lines(error)
    assert error.__traceback__ is before and "validation.py" in error_text(error)


def test_an_error_inside_libraries_keeps_its_lines_and_says_how_to_see_more():
    from distdl_jax.plans import windows

    namespace = {"__name__": "distdl_jax.some", "windows": windows}
    exec(compile("def inside():\n    return {}['no key']\n", windows.__file__, "exec"), namespace)
    text = error_text(caught(namespace["inside"]))
    assert "JAX_TRACEBACK_FILTERING=off shows where" in text and len(frames(text)) == 1


def test_a_decorated_function_raises_without_its_own_frames():
    @hiding_own_lines
    def raises():
        raise ValueError("x")

    error = caught(raises)
    assert [frame.f_code.co_name for frame in _frames(error)] == ["caught", "raises"]


def _frames(error):
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def test_addresses_and_numbers_of_workers():
    assert comparable("<f at 0x7f01ab>") == comparable("<f at 0x7e55>") != comparable("<g at 0x7e55>")
    assert same_text([]) == "" and same_text([7, 3, 4, 5]) == "Workers 3-5, 7 raised the same.\n"
