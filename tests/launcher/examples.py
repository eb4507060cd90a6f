"""Hypothesis settings under which every rank draws the same examples."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.errors import HypothesisException

from launcher.settings import long_run

LONG = 10 if long_run() else 1


class ExampleFailed(BaseException):
    """Carries a failed example out of hypothesis at once.

    Not an `Exception`, so that hypothesis does not replay the example: a replay on the failing rank alone would
    call collectives that the other ranks do not, and hang.
    """


def examples(count: int) -> int:
    """Return `count`, or ten times that in a long run: for `@settings(max_examples=examples(20))`."""
    return count * LONG


def load_profile() -> None:
    """Make the profile `world` the default.

    No random seed, no database and no clock: each could make one rank draw something else than the others.
    """
    settings.register_profile(
        "world",
        derandomize=True,
        deadline=None,
        database=None,
        print_blob=True,
        max_examples=examples(100),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("world")


def fail_at_once(item: pytest.Item) -> None:
    """Let the first failing example of a hypothesis test end it, without a replay or shrinking."""
    handle = getattr(getattr(item, "obj", None), "hypothesis", None)
    if handle is None or hasattr(handle.inner_test, "fails_at_once"):
        return
    inner: Callable[..., Any] = handle.inner_test

    @functools.wraps(inner)
    def run_example(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return inner(*args, **kwargs)
        except HypothesisException:
            raise
        except (Exception, pytest.fail.Exception) as error:
            shown = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
            raise ExampleFailed(f"failing example: {inner.__name__}({shown})") from error

    run_example.fails_at_once = True  # type: ignore[attr-defined]
    handle.inner_test = run_example
