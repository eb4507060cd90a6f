"""A mistake that all workers make is said once, in a few lines; nothing that one of them alone says is lost."""

import re
from pathlib import Path

import pytest
from jobs import run, run_alone

MOST = 12  # lines in all

MISTAKES = {
    "a keyword": ('kernel_size=3, pading=1, in_channels="4"', "unexpected keyword argument 'pading'"),
    "a word": ('kernel_size=3, padding="SAME", in_channels=4', "`padding` (='SAME') must be 'same', 'valid'"),
    "channels": ("kernel_size=3, padding=1, in_channels=5", "`x` has 4 channels, but in_channels=5."),
}
PROGRAM = """
import jax
import jax.numpy as jnp
import distdl_jax as dj
from distdl_jax import nn

def build(P):
    return nn.Sequential(nn.DistributedConv2d(P.grid([1, 1, P.size, 1]), out_channels=8, {arguments}), jax.nn.relu)

def main():
    net = build(dj.Partition())
    params, x = net.init(jax.random.key(0)), jnp.ones((2, 4, 4, 8))

    {jit}
    def loss(params, x):
        return jnp.sum(net(params, x) ** 2)

    loss(params, x)

main()
"""
DIFFER = """
import sys, time
import distdl_jax as dj
from distdl_jax.transports.threads import workers
from distdl_jax.watchdog.launch import said_once

workers.GRACE = said_once.COUNTED = said_once.LONGEST = 30.0  # more than a busy machine takes
P = dj.Partition()
P.allgather_data(0)
if P.rank == 1:
    time.sleep(0.1)
raise OSError(f"no part {P.rank // 3} of the data")
"""


def played(folder: Path, way: str, text: str, workers: int = 4) -> tuple[int, list[str]]:
    """Return the exit status of a program, and its lines."""
    path = folder / "train.py"
    path.write_text(text)
    if way == "MPI":
        status, output = run(workers, "-m", "distdl_jax", path, anew=True)
    else:
        status, output = run_alone("-m", "distdl_jax", "--simulate", workers, path)
    return status, output.splitlines()


@pytest.mark.limit(300)
@pytest.mark.parametrize("way", ["MPI", "simulate"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_said_once(name: str, way: str, tmp_path: Path) -> None:
    arguments, sentence = MISTAKES[name]
    status, lines = played(tmp_path, way, PROGRAM.format(arguments=arguments, jit="@dj.jit"))
    text = "\n".join(lines)
    assert status == 1 and len(lines) <= MOST, text
    assert text.count(sentence) == 1, text
    files = {Path(file).name for file in re.findall(r'File "(.*)", line', text)}
    assert files == {"train.py"}, text


@pytest.mark.limit(300)
@pytest.mark.parametrize("way", ["MPI", "simulate"])
def test_errors_that_differ_are_all_said(way: str, tmp_path: Path) -> None:
    """Each once, with its workers, one of which raises later."""
    status, lines = played(tmp_path, way, DIFFER)
    text = "\n".join(lines)
    assert status == 1, text
    for part in (0, 1):
        assert sum(line == f"OSError: no part {part} of the data" for line in lines) == 1, text
    assert re.search(r"Workers (0-1|1-2|0, 2) raised the same", text), text


@pytest.mark.limit(300)
def test_an_error_before_the_first_partition_is_said_once(tmp_path: Path) -> None:
    status, lines = played(tmp_path, "MPI", "import not_installed_anywhere\n")
    text = "\n".join(lines)
    assert status == 1 and len(lines) <= MOST, text
    assert text.count("ModuleNotFoundError") == 1 and "before it had a partition with others" in text, text


@pytest.mark.limit(300)
def test_all_frames_are_shown_on_request(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.format(arguments=MISTAKES["a word"][0], jit="@dj.jit"))
    settings = {"JAX_TRACEBACK_FILTERING": "off"}
    status, output = run(2, "-m", "distdl_jax", tmp_path / "train.py", settings=settings, anew=True)
    assert status == 1 and "validation.py" in output, output


@pytest.mark.limit(300)
@pytest.mark.parametrize("how", ["os.dup2(nowhere.fileno(), 2)", "sys.stderr = nowhere"])
def test_output_of_their_own_shares_nothing(how: str, tmp_path: Path) -> None:
    """A worker whose errors go elsewhere, as to /dev/null, says nothing for the others."""
    silent = f"""
import os, sys
import distdl_jax as dj
P = dj.Partition()
nowhere = open(os.devnull, "w")
if P.rank == 0:
    {how}
P.allgather_data(0)
raise ValueError("heard")
"""
    status, lines = played(tmp_path, "MPI", silent, workers=2)
    assert status == 1 and "ValueError: heard" in lines, lines
