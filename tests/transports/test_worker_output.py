"""What simulated workers print in a notebook, and how an interrupt ends them."""

import os
import signal
import subprocess
import sys
import time

import pytest
from notebook_runner import front_end

import distdl_jax as dj
from distdl_jax.transports.threads import workers

pytestmark = pytest.mark.limit(120)


def test_in_a_notebook_each_worker_has_a_column(capsys):
    def program():
        P = dj.Partition()
        for i in range(3):
            if P.rank != 1:
                print(f"<{i}> of", P.rank)
            P.allgather_data(i)  # so that lines of the workers would alternate

    with front_end() as shown:
        print("before")
        dj.simulate(3, program)
        dj.simulate(2, lambda: None)
        print("after")
    assert capsys.readouterr().out == "before\nafter\n"
    (table,) = (each.value for each in shown)
    assert repr(table) == "worker 0\n<0> of 0\n<1> of 0\n<2> of 0\nworker 2\n<0> of 2\n<1> of 2\n<2> of 2"
    html = table._repr_html_()
    assert html.count("<th ") == html.count("<pre ") == 2
    assert ">&lt;0&gt; of 2\n&lt;1&gt; of 2\n&lt;2&gt; of 2</pre>" in html


def test_the_table_grows_while_the_workers_run_and_is_whole_when_they_fail(monkeypatch):
    monkeypatch.setattr(workers, "TURN", 0.01)
    seen = []

    def program():
        P = dj.Partition()
        print("one")
        while P.rank == 0 and not shown:
            time.sleep(0.01)
        seen.append(len(shown))
        P.allgather_data(0)
        print("two")
        raise KeyError(P.rank)

    with front_end() as shown, pytest.raises(KeyError):
        dj.simulate(2, program)
    assert max(seen) == 1 == len(shown)
    assert "one\ntwo" in repr(shown[0].value)


def test_an_error_in_a_notebook_takes_few_lines(monkeypatch):
    """As IPython asks an error for its text; cells have their names."""
    monkeypatch.setattr("distdl_jax.watchdog.error_text._shows_all", lambda: False)  # as users have it

    def build(P):
        return dj.nn.DistributedConv2d(P, in_channels=4, out_channels=8, kernel_size=3, padding="SAME")

    def program():
        return build(dj.Partition().grid([1, 1, 2, 2]))

    with front_end() as shown, pytest.raises(dj.InvalidArgumentError) as caught:
        sys.modules["IPython"].get_ipython = Shell
        dj.simulate(4, program)
    assert not shown
    with front_end():
        sys.modules["IPython"].get_ipython = Shell
        lines = caught.value._render_traceback_()
    assert len(lines) <= 12 and lines[0] == "Traceback (most recent call last):"
    assert [line for line in lines if line.startswith("  ") and line[2] != " "][-1].startswith("  Cell In[3], line ")
    assert "`padding` (='SAME') must be" in lines[-2]
    assert lines[-1] == "Raised on worker 0 of 4, in dj.simulate. Workers 1-3 raised the same."


class Shell:
    """IPython's, in a kernel, of which all code is cell 3."""

    kernel = compile = property(lambda self: self)

    def format_code_name(self, name):
        return "Cell", "In[3]"


def test_elsewhere_workers_print_as_any_program_does(capsys):
    dj.simulate(2, lambda: print("here\n", end=""))
    assert capsys.readouterr().out == "here\nhere\n"


INTERRUPTED = """
import signal, threading, time
import jax
import distdl_jax as dj

before = set(threading.enumerate())

def program():
    P = dj.Partition()
    P.allgather_data(0)
    if P.rank == 0:
        print("running", flush=True)
        dj.functional.broadcast(dj.zero_volume_tensor(), P.grid([1], [1]), P.grid([1], [0]))  # waits for worker 1
    elif P.rank == 1:
        while True:
            jax.jit(lambda x: x + 1)(1.0)
    elif P.rank == 2:
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                pass
    else:
        jax.jit(lambda x: dj.functional.broadcast(x, P.grid([1], [2]), P.grid([1], [3])))(dj.zero_volume_tensor())

try:
    dj.simulate(4, program)
except KeyboardInterrupt:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("left:", [t.name for t in threading.enumerate() if t not in before], flush=True)
    print("again:", dj.simulate(2, lambda: dj.Partition().allgather_data(1)))
"""


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_ends_workers_that_wait_and_that_compute(times):
    """Also where the user is impatient, and interrupts a second time."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        time.sleep(0.5)
        start = time.monotonic()
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        left = process.stdout.readline()
        seconds = time.monotonic() - start
        rest = process.stdout.read()
    assert left == "left: []\n"
    assert rest == "again: [[1, 1], [1, 1]]\n"
    assert process.returncode == 0
    assert seconds < 4  # waits of a busy machine included
