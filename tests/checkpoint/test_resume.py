"""The proof: training that is killed at any moment, again and again, ends where training that was left alone ends."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jobs import FAST_TO_COMPILE, ROOT, patience, run_alone, start, start_up
from launcher.settings import long_run

import distdl_jax as dj
from distdl_jax import TensorSpec, checkpoint, nn
from distdl_jax.partitions.formats.arrays import arrays_in

# A run whose state after step n is known: only saving and restoring can go wrong.
COUNTS = """
import os, sys, threading
import numpy as np
import distdl_jax as dj

path = sys.argv[1]

def program():
    P = dj.Partition()
    specs = {
        "x": dj.TensorSpec((1000, 7), P.grid([P.size, 1])),
        "step": dj.TensorSpec((), P, replicated=True),
    }
    with dj.checkpoint.Manager(path, keep=2) as manager:
        step, (rows, _) = 0, specs["x"].box
        if (last := manager.latest_step()) is not None:
            state = manager.restore(specs)
            step = int(state["step"])
            assert step == last
            np.testing.assert_array_equal(state["x"], whole(step)[slice(*rows)])
        if P.rank == 0:
            print("goes on", step, flush=True)
        while True:
            step += 1
            save = manager.save if step % 3 else lambda *args: dj.checkpoint.save(path, *args)
            save({"x": whole(step)[slice(*rows)], "step": step}, specs, step)

def whole(step):
    return np.arange(7000.0).reshape(1000, 7) + step
"""

# On threads: one process starts all of them, as forks of itself, which costs less than a Python each.
FORKS = """
for n in map(int, sys.stdin):
    child = os.fork()
    if child == 0:
        threading.Timer(float(sys.argv[2]), lambda: os._exit(5)).start()
        dj.simulate(n, program)
    print("child", child, flush=True)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.limit(900)
def test_killed_at_random_moments(tmp_path: Path) -> None:
    """All workers at once, nearly always while something is written: there is always a whole checkpoint, and never an
    older one than was there before. Each child verifies what it finds."""
    kills = 100 if long_run() else 8
    draw = random.Random(0)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    command = [sys.executable, "-c", COUNTS + FORKS, str(tmp_path / "run"), "120"]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdin and parent.stdout
    last, progress = 0, 0
    for kill in range(kills):
        print(1 + kill % 4, file=parent.stdin, flush=True)
        child, found = 0, -1
        while not child or found < 0:
            kind, number = parent.stdout.readline().rsplit(maxsplit=1)
            assert kind != "ended", f"the child ended with status {number}: it found what is damaged"
            child, found = (int(number), found) if kind == "child" else (child, int(number))
        assert found >= last
        progress += found > last
        last = found
        while kill % 4 and max(steps_in(tmp_path / "run"), default=0) <= found:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert parent.stdout.readline().split() == ["ended", str(-signal.SIGKILL)]
    parent.stdin.close()
    assert parent.wait(60) == 0
    assert progress >= kills // 2


def test_to_the_bit_on_the_same_partition(tmp_path: Path) -> None:
    """Saved and restored after every step, with adam and a random key, against what was left alone."""
    import optax

    optimiser = optax.adam(0.1)

    def program() -> None:
        P = dj.Partition()
        P_W = P.grid([3, 1])
        P_x = P.grid([1, 1])
        P_y = P.grid([1, 3])
        layer = nn.DistributedLinear(P_x, P_y, P_W, 5, 7)
        params = layer.init(jax.random.key(0), "float64")
        alone = {"params": params, "optimiser": optimiser.init(params), "key": jax.random.key(1), "rate": 0.5}
        everywhere = TensorSpec((), P, replicated=True)
        specs = {
            "params": layer.param_specs(),
            "optimiser": dj.specs_like(alone["optimiser"], params, layer.param_specs()),
            "key": everywhere,
            "rate": everywhere,
        }

        @dj.jit
        def train(state: Any) -> Any:
            key, use = jax.random.split(state["key"])
            x = jax.random.normal(use, (4, 5)) if P_x.active else dj.zero_volume_tensor(batch_size=4)
            gradient = dj.grad(lambda params: jnp.sum(layer(params, x) ** 2))(state["params"])
            updates, moments = optimiser.update(gradient, state["optimiser"], state["params"])
            updates = jax.tree.map(lambda u: state["rate"] * u, updates)
            return {
                "params": optax.apply_updates(state["params"], updates),
                "optimiser": moments,
                "key": key,
                "rate": state["rate"] * 0.75,
            }

        resumed = alone
        for step in range(4):
            alone, resumed = train(alone), train(resumed)
            checkpoint.save(tmp_path, resumed, specs, step)
            resumed = checkpoint.restore(tmp_path, specs)
        assert jax.tree.structure(alone) == jax.tree.structure(resumed)
        for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(resumed), strict=True):
            assert (a.dtype, jax.typeof(a)) == (b.dtype, jax.typeof(b))
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    dj.simulate(3, program)


RESUME = ROOT / "examples" / "resume.py"
SHORT = ["--images", "32", "--batch-size", "16", "--every", "1"]


def workers_of(launcher: int, program: Path) -> list[int]:
    """The processes of the launcher that run a program."""
    parents: dict[int, int] = {}
    runs: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                line = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
            if b"python" in line[0] and str(program).encode() in line[1:2]:
                runs.append(int(entry.name))

    def is_below(pid: int) -> bool:
        while pid > 1 and pid != launcher:
            pid = parents.get(pid, 0)
        return pid == launcher

    return sorted(pid for pid in runs if is_below(pid))


def steps_in(path: Path) -> list[int]:
    try:
        return [int(name[5:15]) for name in os.listdir(path) if name.startswith("step-")]
    except FileNotFoundError:
        return []


def killed(n: int, path: Path, whom: str, after: int, later: float) -> tuple[int, str]:
    """Run the example until it has saved the step `after` (0: at once), and some seconds more, then kill its workers,
    or end the launcher where there are none yet; its status, and what it printed."""
    process = start(n, RESUME, *SHORT, "--steps", 10000, "--path", path, flags=FAST_TO_COMPILE, anew=True)
    give_up = time.monotonic() + patience(240)
    while max(steps_in(path), default=0) < after and process.poll() is None:
        assert time.monotonic() < give_up
        time.sleep(0.002)
    time.sleep(later)
    pids = workers_of(process.pid, RESUME)
    assert len(pids) == n or not after
    for pid in pids if whom == "all" else pids[-1:]:
        os.kill(pid, signal.SIGKILL)
    if not pids:
        process.terminate()
    output, _ = process.communicate(timeout=patience(60))
    return process.returncode, output


@pytest.mark.limit(14400)
def test_the_example_resumes_to_the_same_end(tmp_path: Path) -> None:
    """One worker or all killed, as it starts, restores, trains or saves, going on on other numbers of workers."""
    path = tmp_path / "run"
    draw = random.Random(2)
    seen: Counter[str] = Counter()
    last = 0
    for kill in range(100 if long_run() else 1):
        n, before = 1 + (kill + 1) % 4, last
        moment = draw.choice(["at any moment", "after a step"]) if kill else "after a step"
        whom = draw.choice(["one", "all"]) if kill else "one"
        after, later = (before + 1, 0.02) if moment == "after a step" else (0, 1.5 * start_up())
        status, output = killed(n, path, whom, after, later=draw.uniform(0, later))
        last = max(steps_in(path), default=0)
        print(f"kill {kill + 1}: {whom} of {n}, {moment}; saved before {before}, now {last}", flush=True)
        assert status != 0 and last >= after, output
        if found := re.search("goes on after step ([0-9]+)", output):
            assert before == int(found[1]), output
        seen[f"{whom}, {moment}"] += 1
        seen["while something was written"] += path.exists() and any(name[0] == "." for name in os.listdir(path))
        seen["with progress"] += last > before
    print(dict(seen))

    def trained(path: Path) -> tuple[dict[str, np.ndarray], str]:
        """The parameters three steps after the last one that was saved, and what was printed."""
        out = path.with_suffix(".safetensors")
        line = [*SHORT, "--steps", last + 3, "--path", path, "--out", out]
        status, output = run_alone(RESUME, *line, flags=FAST_TO_COMPILE)
        assert status == 0, output
        return {
            name: array.read(tuple((0, n) for n in array.shape)) for name, array in arrays_in(str(out)).items()
        }, output

    # Rounding grows with the steps: left alone, 2 workers differ from one by 1e-9 after 400, by 1e-12 after 200 or so.
    (expected, _), (got, output) = trained(tmp_path / "alone"), trained(path)
    assert f"goes on after step {last}" in output, output
    assert expected.keys() == got.keys() and len(got) == 10
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-12)
