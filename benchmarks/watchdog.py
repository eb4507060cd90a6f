"""What the watch costs: mpiexec -n 4 python benchmarks/watchdog.py

Processor time only: the watch waits for nobody, and the machine may be shared.

1. In this job: until the library is imported, the first partition is made and the first plan compared; and the watch's
   thread while steps go on.
2. On worker 0, for worlds of up to 1,024 workers that are played: the real coordinator and reporters, with their
   messages pickled as MPI would have them, in steady state, in steps of half a minute, and while one worker compiles;
   the agreement on a plan; and what of the first partition grows with the number of workers.
"""

import gc
import json
import pickle
import platform
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

started = time.process_time()

import distdl_jax as dj  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from distdl_jax.functional import all_sum_reduce  # noqa: E402
from distdl_jax.plans.trees import gathered  # noqa: E402
from distdl_jax.settings import TimeLimits  # noqa: E402
from distdl_jax.transports.mpi.control import ControlChannel, Envelope  # noqa: E402
from distdl_jax.transports.mpi.launch_checks import check_workers_agree  # noqa: E402
from distdl_jax.watchdog.programs.ir import Operation  # noqa: E402
from distdl_jax.watchdog.programs.matching import find_mismatch  # noqa: E402
from distdl_jax.watchdog.watch.call_log import CallLog  # noqa: E402
from distdl_jax.watchdog.watch.core import Core, Facts  # noqa: E402
from distdl_jax.watchdog.watch.deadlock import State  # noqa: E402
from distdl_jax.watchdog.watch.dependencies import takes_all  # noqa: E402
from distdl_jax.watchdog.watch.messages import Detail, Message, Say  # noqa: E402
from distdl_jax.watchdog.watch.thread import watchdog_thread  # noqa: E402

TURN = 0.05
"""Seconds between two turns of a watch."""

SIZES = (4, 16, 64, 256, 1024)
OPERATIONS = 500
LIMITS = TimeLimits(1800.0, 14400.0)


# --- this job ---


def in_this_job() -> dict[str, float]:
    """Seconds of processor time of the slowest worker; of the watch's thread, per second."""
    spent = {"import": time.process_time() - started}
    begun = time.process_time()
    world = dj.Partition()
    spent["first partition"] = time.process_time() - begun

    def many(x: jax.Array) -> jax.Array:
        for _ in range(100):
            x = all_sum_reduce(x, world, axes_keep=()) / world.size
        return x

    begun = time.process_time()
    dj.jit(many).trace(jnp.ones(8))
    spent["first plan of 100 operations, with its trace"] = time.process_time() - begun
    if watchdog_thread._thread is not None:
        step = dj.jit(lambda x: all_sum_reduce(x, world, axes_keep=()) / world.size)
        step(jnp.ones(8)).block_until_ready()
        clock = time.pthread_getcpuclockid(watchdog_thread._thread.ident)
        begun, seconds = time.monotonic(), time.clock_gettime(clock)
        for _ in range(50):
            step(jnp.ones(8)).block_until_ready()
            time.sleep(0.1)
        spent["watch's thread, per second"] = (time.clock_gettime(clock) - seconds) / (time.monotonic() - begun)
    spent_by_all = world.allgather_data(spent)
    return {name: max(one[name] for one in spent_by_all) for name in spent}


# --- worlds that are played ---


@dataclass
class Worker:
    """One that is played: its core, its calls, and what has arrived for it."""

    core: Core
    log: CallLog
    inbox: deque
    run: int = 0


class Played:
    """A world of `size` workers: worker 0 and 1 take all their turns, and are timed; the others one each second."""

    def __init__(self, size: int) -> None:
        self.now = 0.0
        everyone = tuple(range(size))
        self.workers = [Worker(Core(rank, everyone, LIMITS), CallLog(), deque()) for rank in everyone]
        programs = dict.fromkeys(everyone, tuple(Operation("allreduce", everyone, count=n) for n in range(OPERATIONS)))
        self.workers[0].core.coordinator.remember("step", programs)
        self.spent, self.most = [0.0] * size, [0.0] * size

    def post_all(self, posts: list[tuple[int, Message]]) -> None:
        for to, message in posts:
            if not isinstance(message, Say):
                self.workers[to].inbox.append(pickle.dumps(message))

    def turn(self, rank: int, facts: Facts) -> None:
        worker, begun = self.workers[rank], time.thread_time()
        while worker.inbox:
            self.post_all(worker.core.hear(pickle.loads(worker.inbox.popleft()), self.now))
        calls = replace(worker.log.summary(), passed=worker.log.number)
        compiled = 0.0 if facts.state.kind == "compiling" else float("inf")
        facts = replace(facts, state=replace(facts.state, calls=calls), detail=Detail(compiled))
        self.post_all(worker.core.turn(facts, self.now))
        spent = time.thread_time() - begun
        self.spent[rank] += spent
        self.most[rank] = max(self.most[rank], spent)

    def play(self, seconds: float, facts) -> dict[str, float]:
        """Measure the processor time of worker 0 and 1, per second, and the longest turn."""
        turns = round(seconds / TURN)
        for turn in range(turns):
            self.now = turn * TURN
            for rank in range(len(self.workers)):
                if rank < 2 or (turn + rank) % 20 == 0:
                    worker = self.workers[rank]
                    seen = facts(rank, self.now)
                    if seen.run != worker.run and seen.run:
                        worker.log.begin("step")
                        worker.log.end(True)
                    worker.run = seen.run
                    state = replace(seen.state, program=worker.log.number if seen.run else 0)
                    self.turn(rank, replace(seen, state=state))
        return {
            "worker 0": self.spent[0] / seconds,
            "another worker": self.spent[1] / seconds,
            "longest turn": self.most[0],
        }


def executing(run: int) -> Facts:
    return Facts(State("executing", episode=run, function="step"), run)


def short_steps(rank: int, now: float) -> Facts:
    return executing(1 + int(now / 0.1))


def long_steps(rank: int, now: float) -> Facts:
    """Steps of half a minute, to which the workers come at different times."""
    place, late = now % 30, (7 * rank + int(now / 30)) % 15
    return executing(1 + int(now / 30)) if late <= place < 29 else Facts()


def one_compiles(rank: int, now: float) -> Facts:
    """Let the others begin to wait one after the other."""
    if rank == 1:
        return Facts(State("compiling"))
    return executing(1) if now > rank % 60 else Facts()


class Letters:
    """A mailbox in which all that a worker needs lies already."""

    def __init__(self, letters: list[tuple[int, bytes]]) -> None:
        self.letters = deque(letters)

    def post(self, message: object, to: int) -> None:
        pickle.dumps(message)

    def next(self) -> tuple[int, object]:
        source, letter = self.letters.popleft()
        return source, pickle.loads(letter)


class Nobody:
    """A monitor that knows of no failure."""

    epoch = 0

    def __init__(self) -> None:
        self.calls = CallLog()

    def raise_if_failed(self) -> None:
        pass

    raise_if_past = raise_if_failed


def agreement(size: int) -> dict[str, float]:
    """The first worker's part in the agreement on a plan of equal programs: the messages, and what it decides."""
    everyone = tuple(range(size))
    program = tuple(Operation("allreduce", everyone, count=n) for n in range(OPERATIONS))
    packed, children = pickle.dumps(program), gathered(everyone, 0)[1]

    def below(worker: int) -> tuple[int, ...]:
        return (worker, *(other for child in gathered(everyone, worker)[1] for other in below(child)))

    def letter(worker: int) -> bytes:
        calls = CallLog().summary()
        return pickle.dumps(Envelope(0, "the plan", everyone, "benchmark", {packed: below(worker)}, calls))

    channel = ControlChannel(Letters([(child, letter(child)) for child in children]), 0, Nobody())
    spent: dict[str, float] = {}

    def decide(programs: dict[int, object]) -> None:
        begun = time.thread_time()
        assert find_mismatch(programs) is None and takes_all(programs)
        Core(0, tuple(range(size)), LIMITS).coordinator.remember("step", programs)
        spent["deciding"] = time.thread_time() - begun

    begun = time.thread_time()
    channel.agree(everyone, "the plan", program, decide)
    whole = time.thread_time() - begun
    return {"messages": whole - spent["deciding"], **spent}


class Alike:
    """A communicator of workers that all say the same: what each gets travels pickled, one by one, as in mpi4py."""

    def __init__(self, size: int) -> None:
        self.size = size

    def Get_rank(self) -> int:
        return 0

    def allgather(self, said: object) -> list[object]:
        packed = pickle.dumps(said)
        return [pickle.loads(packed) for _ in range(self.size)]


def start(size: int) -> dict[str, float]:
    """A worker's part in the first partition that grows with their number: comparing software and settings of all."""
    begun = time.thread_time()
    check_workers_agree(Alike(size))
    return {"comparing": time.thread_time() - begun}


def played() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    gc.disable()  # what Python collects now and then is not the watch's
    for size in SIZES:
        for name, seconds, facts in (
            ("short steps", 20, short_steps),
            ("steps of 30 s", 90, long_steps),
            ("one compiles for 10 minutes", 600, one_compiles),
        ):
            row = {"workers": size, "what": name, **Played(size).play(seconds, facts)}
            rows.append(row)
            print(
                f"{size:5} workers, {name:<28} worker 0 {100 * row['worker 0']:6.3f} % of a core, another "
                f"{100 * row['another worker']:6.3f} %, longest turn {1e3 * row['longest turn']:7.2f} ms",
                flush=True,
            )
        row = {"workers": size, "what": "plan", **agreement(size)}
        rows.append(row)
        what = f"a plan of {OPERATIONS} operations:"
        messages, deciding = 1e3 * row["messages"], 1e3 * row["deciding"]
        print(f"{size:5} workers, {what} messages {messages:6.1f} ms, deciding {deciding:.1f} ms", flush=True)
        rows.append({"workers": size, "what": "start", **start(size)})
        comparing = 1e3 * float(rows[-1]["comparing"])
        print(f"{size:5} workers, the first partition: comparing software and settings {comparing:.1f} ms", flush=True)
    return rows


job = in_this_job()
P_world = dj.Partition()
if P_world.rank == 0:
    for name, seconds in job.items():
        print(f"{P_world.size:5} workers, {name}: {1e3 * seconds:.1f} ms", flush=True)
    about = {"workers": P_world.size, "jax": jax.__version__, "machine": platform.processor() or platform.machine()}
    result = {**about, "job": job, "played": played() if P_world.size <= 2 else []}
    path = Path("out/benchmarks") / f"watchdog-{P_world.size}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))
    print(f"wrote {path}", flush=True)
