"""A user's program is checked with the library's types, as `make venv` installs it: editable."""

import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

pytest.importorskip("mypy")

PROGRAM = """
import distdl_jax as dj

P = dj.Partition()
reveal_type(P.size)
dj.Partition(3)
step = dj.jit(lambda x: 2 * x)
layer = dj.nn.DistributedLinear(P.grid([1, 1]), in_features=2.5)
"""

LOSS = """
import jax
import distdl_jax as dj

def loss(weight: jax.Array, x: jax.Array, scale: float = 1.0) -> jax.Array:
    return scale * (weight * x).sum()

def with_aux(weight: jax.Array, x: jax.Array) -> tuple[jax.Array, str]:
    return (weight * x).sum(), "aux"

reveal_type(dj.value_and_grad(loss))
reveal_type(dj.grad(loss))
reveal_type(dj.value_and_grad(with_aux, has_aux=True))
reveal_type(dj.grad(with_aux, has_aux=True))
reveal_type(dj.jit(loss).__call__)
reveal_type(dj.jit(dj.value_and_grad(loss)).__call__)
reveal_type(dj.jit(static_argnames="scale")(loss).__call__)
reveal_type(dj.simulate(2, lambda: 1.5))

@dj.jit
def step(weight: jax.Array, x: jax.Array) -> jax.Array:
    return weight - dj.grad(loss)(weight, x)

reveal_type(step.lower)
step(jax.numpy.ones(3))
dj.value_and_grad(loss)(jax.numpy.ones(3), y=jax.numpy.ones(3))
dj.check(loss, jax.numpy.ones(3), "x")
"""


@pytest.mark.skipif("__editable__" not in str(distribution("distdl_jax").files), reason="not an editable install")
def test_a_users_program_is_checked(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    found = _checked(PROGRAM, tmp_path, environment)
    assert 'Revealed type is "int"' in found
    assert 'program.py:6: error: Argument 1 to "Partition" has incompatible type "int"' in found
    assert "program.py:8: error" in found


def test_jit_and_derivatives_have_the_arguments_of_their_function(tmp_path: Path) -> None:
    """Names and types of arguments are checked; results have the types of values and of aux."""
    found = _checked(LOSS, tmp_path, {**os.environ, "MYPYPATH": str(Path(__file__).parents[2])})
    array = "jax.Array"
    of_loss = f"(weight: {array}, x: {array}, scale: float =)"
    revealed = [line.partition("Revealed type is ")[2] for line in found.splitlines() if "Revealed" in line]
    of_aux = f"(weight: {array}, x: {array})"
    assert [_plain(text) for text in revealed] == [
        f"def {of_loss} -> tuple[{array}, Any]",
        f"def {of_loss} -> Any",
        f"def {of_aux} -> tuple[tuple[{array}, str], Any]",
        f"def {of_aux} -> tuple[Any, str]",
        f"def {of_loss} -> {array}",
        f"def {of_loss} -> tuple[{array}, Any]",
        f"def {of_loss} -> {array}",
        "list[float]",
        "Any",
    ]
    for line, error in (
        (25, 'Missing positional argument "x"'),
        (26, 'Unexpected keyword argument "y"'),
        (27, 'Argument 3 to "check" has incompatible type "str"'),
    ):
        assert f"program.py:{line}: error: {error}" in found, found


def _checked(program: str, folder: Path, environment: dict[str, str]) -> str:
    """Return what mypy says of a user's program."""
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert "Revealed type" in done.stdout, done.stdout + done.stderr
    return done.stdout


def _plain(revealed: str) -> str:
    """Return a type as mypy reveals it, without quotes and the modules that differ between its releases."""
    return revealed.strip('"').replace("builtins.", "").replace("jax._src.basearray.Array", "jax.Array")
