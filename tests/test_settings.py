"""Every setting: what is accepted, what is not, and what must be the same on all workers."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jobs import ROOT

from distdl_jax.kernels import convolution as convolutions
from distdl_jax.kernels import problem as problems
from distdl_jax.kernels.convolution import convolution
from distdl_jax.kernels.geometry import Placement
from distdl_jax.kernels.problem import Problem
from distdl_jax.settings import SETTINGS, Settings, read_settings, setting_problems, settings_table, warning_of_unknown

FAST = "DISTDL_JAX_FAST_CONVOLUTIONS"
# What is accepted, with the values that it stands for, and what is not.
SWITCH = ({"0": False, "1": True}, ["2", "yes", "true", " 1", "-1"])
VALUES = {
    "timeout": (
        {"0": (0, 0), "90": (90, 90), "1.5": (1.5, 1.5), "1e3": (1000, 1000)},
        ["soon", "-1", "inf", "nan", "1,5", "90 s"],
    ),
    "debug": SWITCH,
    "fast_convolutions": SWITCH,
    "progress": SWITCH,
    "onednn": ({"on": "on", "off": "off", "always": "on"}, ["1", "yes", "On"]),
    "gpus": ({word: word for word in ("own", "share", "given")}, ["0", "all", "Share"]),
}
EVERY = [pytest.param(name, id=setting.name) for name, setting in SETTINGS.items()]


def test_every_setting_is_tested():
    assert set(VALUES) == set(SETTINGS)


@pytest.mark.parametrize("name", EVERY)
def test_values_that_are_accepted(name):
    variable = SETTINGS[name].name
    for text, expected in VALUES[name][0].items():
        reading = read_settings({variable: text})
        assert getattr(reading.settings, name) == expected and not reading.wrong
        assert not [*setting_problems([reading])]


@pytest.mark.parametrize("name", EVERY)
def test_not_set_or_empty_is_the_default(name):
    assert read_settings({SETTINGS[name].name: ""}) == read_settings({})
    assert read_settings({}).settings == Settings()


@pytest.mark.parametrize("name", EVERY)
def test_values_that_are_not_accepted(name):
    """They count as not set until all workers refuse them, in a sentence that says what is accepted."""
    setting = SETTINGS[name]
    for text in VALUES[name][1]:
        reading = read_settings({setting.name: text})
        assert reading.settings == Settings()
        (problem,) = setting_problems([reading])
        assert problem == f"The environment variable {setting.name} (={text!r}) must be {setting.accepts}."
        (problem,) = setting_problems([read_settings({}), reading, read_settings({})])
        assert f"(={text!r}, on worker 1) must be" in problem


@pytest.mark.parametrize("name", EVERY)
def test_values_that_differ_between_workers(name):
    setting = SETTINGS[name]
    first, second = [read_settings({setting.name: text}) for text in list(VALUES[name][0])[:2]]
    everyone = [first, second, first]
    problems = [*setting_problems(everyone)]
    assert len(problems) == setting.same
    for problem in problems:
        assert problem.startswith(f"All workers must have the same {setting.name}, but it is ")
        assert problem.endswith(" on worker 1.")


def test_the_same_value_may_be_written_in_two_ways():
    for variable, texts in {"TIMEOUT": ("90", "90.0", "9e1"), "DEBUG": ("0", ""), "ONEDNN": ("always", "")}.items():
        assert not [*setting_problems([read_settings({f"DISTDL_JAX_{variable}": text}) for text in texts])]


def test_names_that_are_none():
    readings = [
        read_settings({"DISTDL_JAX_DEBUGG": "1", "DISTDL_JAX_DEBUG": "1", "HOME": "/"}),
        read_settings({"DISTDL_JAX_COLOUR": "red"}),
        # The tests' and the build's own.
        read_settings({"DISTDL_JAX_TEST_LONG": "1", "DISTDL_JAX_SKIP_MPI_CHECK": "1"}),
    ]
    text = warning_of_unknown(readings)
    assert "no such setting: DISTDL_JAX_COLOUR, DISTDL_JAX_DEBUGG (did you mean DISTDL_JAX_DEBUG?)." in text
    assert warning_of_unknown(readings[2:]) is None


def test_the_page_has_the_table():
    assert settings_table() in (ROOT / "docs" / "settings.md").read_text()


def test_no_other_file_reads_the_environment():
    """But for what others set: the launcher's names, glibc's, XLA's and where the user's cache is; the doctor looks
    at all of them."""
    found = {
        (str(path.relative_to(ROOT)), line.strip())
        for path in (ROOT / "distdl_jax").rglob("*.py")
        for line in Path(path).read_text().splitlines()
        if re.search(r"\benviron\b", line) and path.name != "settings.py"
    }
    assert {path for path, _ in found if "DISTDL" in _} == set()
    readers = ("watchdog/launch/launcher.py", "watchdog/launch/supervised.py", "watchdog/launch/supervisor.py")
    readers += ("watchdog/launch/environment.py", "jax_compat.py")
    readers += ("transports/threads/workers.py", "transports/mpi/launch_checks.py")
    readers += ("tools/doctor/worker_checks.py", "tools/doctor/job_checks.py")
    readers += ("kernels/onednn_library.py", "kernels/onednn_build.py")
    assert {path for path, _ in found} <= {f"distdl_jax/{reader}" for reader in readers}


@pytest.mark.parametrize("fast", [True, False])
def test_convolutions_are_written_out_only_if_wanted(monkeypatch, fast):
    """In three dimensions on a CPU; plain is one operation of XLA's."""
    monkeypatch.setattr(problems, "current_settings", lambda: read_settings({FAST: str(int(fast))}).settings)
    x, weight = jnp.ones((1, 2, 6, 6, 6)), jnp.ones((2, 2, 3, 3, 3))
    problem = Problem(x.shape, weight.shape, Placement((1,) * 3, ((1, 1),) * 3, (1,) * 3), 1, x.dtype.name)
    monkeypatch.setattr(convolutions, "algorithm", lambda problem, direction: "products")
    program = jax.make_jaxpr(lambda x, weight: convolution(problem, x, weight))(x, weight)
    assert ("[1,2,6,6,6] = conv_general_dilated[" in str(program)) != fast
