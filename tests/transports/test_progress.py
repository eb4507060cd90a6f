"""`dj.progress`: the same items everywhere, and what is written of them: on one worker, and only of long work."""

import io
import os
import subprocess
import sys
import termios
from operator import length_hint
from types import SimpleNamespace

import numpy as np
import pytest
from jobs import ROOT

import distdl_jax as dj
from distdl_jax.transports import progress as progress_line
from distdl_jax.transports.progress import Progress

BAR = """
import time
from distdl_jax import progress
from distdl_jax.transports import progress as progress_line
progress_line.BAR_AFTER = 0.0
for item in progress(range(4), label="training", unit="batch"):
    time.sleep(0.12)
"""


def captured(monkeypatch):
    """Return what stderr becomes, without tqdm, all work being long. No fixture: pytest sets stderr after them."""
    monkeypatch.setattr(progress_line, "LONG", 0.0)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    return stderr


@pytest.mark.world(1)
def test_a_stream_that_can_only_write(monkeypatch, tmp_path):
    """What some programs put in the place of stderr, to write to two files, say, has one method."""
    written = captured(monkeypatch)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=written.write))
    assert sum(dj.progress(range(3), label="numbers")) == 3
    assert "numbers: 3 steps in 0 s" in written.getvalue()
    spec = dj.TensorSpec((2,), dj.Partition().grid([1]))
    dj.checkpoint.save(tmp_path / "run", np.ones(2), spec, 1)
    assert dj.checkpoint.restore(tmp_path / "run", spec).tolist() == [1, 1]


@pytest.mark.world(2)
def test_worker_0_alone_writes_under_mpi(monkeypatch):
    written = captured(monkeypatch)
    rank = dj.Partition().rank
    assert list(dj.progress("abc", label="letters")) == ["a", "b", "c"]
    assert written.getvalue() == ("letters: 3 steps in 0 s\n" if rank == 0 else "")


def test_worker_0_alone_writes_in_a_simulation(monkeypatch):
    written = captured(monkeypatch)

    def program():
        return sum(dj.progress(range(4), label=f"worker {dj.Partition().rank}"))

    assert dj.simulate(3, program) == [6, 6, 6]
    assert written.getvalue() == "worker 0: 4 steps in 0 s\n"


def test_work_of_ten_seconds_has_a_line_at_its_end(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: now[0])
    monkeypatch.setitem(sys.modules, "tqdm", None)
    for epochs in (2, 3):
        for _ in dj.progress(range(epochs), label="training", unit="epoch"):
            now[0] += 4
    assert capsys.readouterr().err == "training: 3 epochs in 12 s\n"


def test_lines_of_bytes_and_of_one_unit():
    shown = Progress((), 4 * 2**30, "checkpoint", "B", False)
    shown.advance(2**30)
    assert shown._line(64.0) == "checkpoint: 1024 MiB in 64 s"
    shown = Progress((), None, "", "link", False)
    shown.advance()
    assert shown._line(10.0) == "1 link in 10 s"


def test_it_is_turned_off_by_a_setting(monkeypatch):
    written = captured(monkeypatch)
    monkeypatch.setenv("DISTDL_JAX_PROGRESS", "0")
    assert list(dj.progress(range(2))) == [0, 1]
    assert written.getvalue() == ""


def test_an_error_in_a_loop_goes_on(monkeypatch):
    captured(monkeypatch)
    with pytest.raises(KeyError):
        for _ in dj.progress(range(2)):
            raise KeyError


@pytest.mark.parametrize("has_tqdm", [True, False])
@pytest.mark.parametrize("closed", [True, False])
def test_a_closed_stderr_ends_no_work(monkeypatch, closed, has_tqdm, capsys):
    written = captured(monkeypatch)
    if has_tqdm:
        monkeypatch.delitem(sys.modules, "tqdm")
        pytest.importorskip("tqdm")
        monkeypatch.setattr(progress_line, "BAR_AFTER", 0.0)
    written.close()
    monkeypatch.setattr(sys, "stderr", written if closed else None)
    assert list(dj.progress(range(2), label="to stdout?")) == [0, 1]
    assert capsys.readouterr().out == ""


def test_a_bar_on_a_terminal():
    pytest.importorskip("tqdm")
    ours, its = os.openpty()
    termios.tcsetwinsize(its, (24, 80))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", BAR], stderr=its, env=environment, check=True, timeout=120)
    os.close(its)
    written = os.read(ours, 100000).decode()
    os.close(ours)
    assert "training: 100%" in written and "4/4" in written and "\r" in written, written


def test_wrong_arguments():
    for error, wrong in ((dj.InvalidArgumentError, {"total": -1}), (dj.InvalidTypeError, {"label": 3})):
        with pytest.raises(error, match=f"`{next(iter(wrong))}`"):
            dj.progress(range(2), **wrong)


def test_batches_know_how_many_are_left():
    spec = dj.TensorSpec((2,), dj.planning_world(1).grid([1]))
    batches = dj.data.batches(np.zeros((10, 2)), spec, 4, epochs=2, state={"epoch": 0, "batch": 1})
    assert length_hint(batches, -1) == 5
    next(batches)
    assert length_hint(batches, -1) == 4
    assert length_hint(dj.data.batches(np.zeros((10, 2)), spec, 4, epochs=None), -1) == -1
