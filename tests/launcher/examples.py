"""How many examples random tests draw, and the settings of hypothesis."""

from hypothesis import HealthCheck, settings

from launcher.settings import long_run

LONG = 10 if long_run() else 1


def examples(count: int) -> int:
    """Return `count`, or ten times that in a long run: for `@settings(max_examples=examples(20))`."""
    return count * LONG


def load_profile() -> None:
    """Draw the same in every run, without a clock."""
    slow = [HealthCheck.too_slow]
    settings.register_profile("tests", derandomize=True, deadline=None, database=None, suppress_health_check=slow)
    settings.load_profile("tests")
