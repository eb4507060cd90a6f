"""The settings: every environment variable that the library reads, each declared once.

They are read once, when the first world is opened, and then checked on all workers together: an invalid value on one
worker raises the same error on all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple

from distdl_jax.validation import difference

_OTHERS = ("DISTDL_JAX_TEST_", "DISTDL_JAX_SKIP_MPI_CHECK", "DISTDL_JAX_SUPERVISOR")
"""Prefixes of the names that the tests, the build and the launcher read."""


class TimeLimits(NamedTuple):
    """Seconds after which the clock ends the job; 0 for no limit.

    - `waiting`: for others that don't arrive. It should exceed the time to load a data set or to write a checkpoint.
    - `program`: for a program that all workers are in.
    """

    waiting: float
    program: float


class Setting(NamedTuple):
    """One environment variable.

    - `default`, `accepts`: the default value, and the accepted values, for messages.
    - `parse`: the value of a text; raises `ValueError` or `KeyError` for invalid ones.
    - `purpose`: as a sentence.
    - `same`: whether it must be the same on all workers.
    """

    name: str
    default: str
    accepts: str
    parse: Callable[[str], Any]
    purpose: str
    same: bool = True


def _seconds(text: str) -> TimeLimits:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError
    return TimeLimits(seconds, seconds)


_SWITCH = {"0": False, "1": True}.__getitem__

SETTINGS: dict[str, Setting] = {
    "timeout": Setting(
        "DISTDL_JAX_TIMEOUT",
        "1800, and 14400 for a program that all workers are in",
        "a number of seconds, or 0 for no limit",
        _seconds,
        "How long a worker waits for others before the clock ends the job.",
    ),
    "debug": Setting(
        "DISTDL_JAX_DEBUG",
        "0",
        "0 or 1",
        _SWITCH,
        "With 1 each worker's last operations are recorded, and reported when the clock ends the job; `init` compares "
        "the workers' random keys; `dj.replicated`, layers with copies and `dj.check_replicated` compare copies, "
        "`dj.value_and_grad` losses, and a distributed function its whole arguments.",
    ),
    "fast_convolutions": Setting(
        "DISTDL_JAX_FAST_CONVOLUTIONS",
        "1",
        "0 or 1",
        _SWITCH,
        "With 0 convolutions on CPUs are XLA's own: several times slower, in less memory.",
    ),
    "onednn": Setting(
        "DISTDL_JAX_ONEDNN",
        "on",
        "on or off",
        {"on": "on", "off": "off", "always": "on"}.__getitem__,  # "always" formerly meant more than "on"
        "Whether float32 convolutions on CPUs are oneDNN's, if `python -m distdl_jax.onednn` has compiled them.",
    ),
    "gpus": Setting(
        "DISTDL_JAX_GPUS",
        "own",
        "own, share or given",
        {word: word for word in ("own", "share", "given")}.__getitem__,
        "How `python -m distdl_jax` assigns GPUs to workers: one each, with an error if there are too few; one for "
        "several, which share its memory; or as given by CUDA_VISIBLE_DEVICES.",
    ),
    "progress": Setting(
        "DISTDL_JAX_PROGRESS",
        "1",
        "0 or 1",
        _SWITCH,
        "With 0 the progress of long work is not shown: checkpoints, measurements, loops in `dj.progress`.",
        same=False,
    ),
}
"""Every setting, by its attribute of `Settings`."""


class Settings(NamedTuple):
    """The values of all settings."""

    timeout: TimeLimits = TimeLimits(1800.0, 4 * 3600.0)
    debug: bool = False
    fast_convolutions: bool = True
    onednn: str = "on"
    gpus: str = "own"
    progress: bool = True

    def describe(self, name: str) -> str:
        """Return a setting's value, as one would set it."""
        match getattr(self, name):
            case TimeLimits() as limits:
                return f"{limits.waiting:g}" if limits.waiting == limits.program else "not set"
            case value:
                return str(int(value) if isinstance(value, bool) else value)


class Reading(NamedTuple):
    """The settings in one worker's environment.

    - `settings`: with the default in place of an invalid value.
    - `wrong`: the invalid values, by the attribute of the setting.
    - `unknown`: names that look like settings, but are not.
    """

    settings: Settings
    wrong: Mapping[str, str]
    unknown: tuple[str, ...]


def read_settings(environment: Mapping[str, str]) -> Reading:
    """Read the settings; raises nothing. An empty variable counts as unset."""
    values: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for attribute, setting in SETTINGS.items():
        if text := environment.get(setting.name, ""):
            try:
                values[attribute] = setting.parse(text)
            except (ValueError, KeyError):
                wrong[attribute] = text
    known = {setting.name for setting in SETTINGS.values()}
    ours = (name for name in environment if name.startswith("DISTDL_JAX_") and not name.startswith(_OTHERS))
    return Reading(Settings(**values), wrong, tuple(sorted(set(ours) - known)))


@cache
def own_reading() -> Reading:
    """Read this process's environment, once, when the first world is opened."""
    return read_settings(os.environ)


def current_settings() -> Settings:
    """Return the settings of this process."""
    return own_reading().settings


def shows_progress() -> bool:
    """Return whether `dj.progress` may show something; it may be called before a world is opened."""
    return read_settings(os.environ).settings.progress


def traceback_filtering() -> str:
    """Return JAX's setting of which frames errors show, where JAX is not imported yet."""
    return os.environ.get("JAX_TRACEBACK_FILTERING", "")


def setting_problems(everyone: Sequence[Reading]) -> Iterator[str]:
    """Yield a sentence for each value that is invalid, or differs between workers although it must not.

    `everyone` has the reading of each worker, by rank; the sentences are the same on all workers.
    """
    for attribute, setting in SETTINGS.items():
        wrong = [
            (worker, reading.wrong[attribute]) for worker, reading in enumerate(everyone) if attribute in reading.wrong
        ]
        values = {worker: reading.settings.describe(attribute) for worker, reading in enumerate(everyone)}
        if wrong:
            worker, value = wrong[0]
            where = f", on worker {worker}" if len(everyone) > 1 else ""
            yield f"The environment variable {setting.name} (={value!r}{where}) must be {setting.accepts}."
        elif setting.same and (text := difference(setting.name, values)):
            yield text


def warning_of_unknown(everyone: Sequence[Reading]) -> str | None:
    """Return a warning about names on any worker that look like settings but are not; None if there are none."""
    names = sorted({name for reading in everyone for name in reading.unknown})
    if not names:
        return None
    known = [setting.name for setting in SETTINGS.values()]
    # All have one prefix, so only a very close name is meant.
    guesses = {name: get_close_matches(name, known, 1, cutoff=0.9) for name in names}
    listed = (f"{name} (did you mean {guess[0]}?)" if guess else name for name, guess in guesses.items())
    return f"Ignored, since distdl_jax has no such setting: {', '.join(listed)}. The settings are {', '.join(known)}."


def settings_table() -> str:
    """Return all settings, as the table in docs/settings.md."""
    lines = ["| variable | default | accepted | purpose | same on all workers |", "|---|---|---|---|---|"]
    for setting in SETTINGS.values():
        same = "yes" if setting.same else "no"
        lines.append(f"| `{setting.name}` | {setting.default} | {setting.accepts} | {setting.purpose} | {same} |")
    return "\n".join(lines)
