"""The hooks of pytest: `pytest_plugins = ["launcher.plugin"]` in the top `conftest.py` brings them in."""

import gc
from collections import Counter
from pathlib import Path

import pytest
from _pytest.unraisableexception import gc_collect_iterations_key

from launcher import examples, hooks, marks, mpiexec
from launcher.costs import Costs
from launcher.parent import Parent
from launcher.slowdown import Slowdown
from launcher.time_limit import TimeLimit
from launcher.worker import Worker

MARKERS = (
    "world(*sizes): run the test on every rank of an MPI world of each of these sizes",
    "simulated(*sizes): run the test on the threads of a world of each of these sizes, in one process",
    "limit(seconds): how long the test may take before it fails with every rank's stacks (default 120)",
)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("world", "tests in MPI worlds")
    group.addoption(
        "--in-world",
        action="store_true",
        help="run as one rank of a world that you started: mpiexec -n 4 python -m pytest --in-world tests/test_x.py",
    )
    group.addoption("--costs", default=None, metavar="FILE", help="write the processor seconds of every test, as JSON")
    group.addoption("--world-dir", default=None, help="where a rank that pytest started writes its reports (internal)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is imported, which stays
    config.stash[gc_collect_iterations_key] = 1  # at the end; five times is a second, on every rank
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    examples.load_profile()
    if config.option.in_world:
        home = config.option.world_dir
        config.pluginmanager.register(Worker(config, Path(home) if home else None), "world-worker")
        return
    if mpiexec.size_around() > 1:
        raise pytest.UsageError("pytest starts its MPI worlds itself; under mpiexec it needs --in-world")
    mpiexec.leave_mpi_alone()  # initialised here it would break the children of this process
    slowdown = Slowdown()
    config.pluginmanager.register(TimeLimit(slowdown), "world-time-limit")
    config.pluginmanager.register(costs := Costs(slowdown), "world-costs")
    config.pluginmanager.register(Parent(config, slowdown, costs), "world-parent")


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    world, threads = map(metafunc.definition.get_closest_marker, ("world", "simulated"))
    if world is None and threads is None:
        return
    sizes = list(marks.declared(world)) if world else []
    ids = [f"world{size}" for size in sizes]
    if threads:
        sizes += map(marks.Simulated, marks.declared(threads))
        ids += [f"simulated{size}" for size in marks.declared(threads)]
    if marks.ARGUMENT not in metafunc.fixturenames:
        metafunc.fixturenames.append(marks.ARGUMENT)
    metafunc.parametrize(marks.ARGUMENT, sizes, ids=ids)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test of a world of threads on each of them, with the same arguments."""
    size = marks.simulated(pyfuncitem)
    if size is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    pyfuncitem.ihook.pytest_world_simulate(size=int(size), test=lambda: pyfuncitem.obj(**arguments))
    return True


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Sort plain tests first, then the simulated ones, then world after world, each in the order of the files."""
    for item in session.items:
        if item.get_closest_marker("simulated") and not marks.has_size(item):
            raise pytest.UsageError(f"{item.nodeid}: simulated marks a test, a class or a module, not one parameter")
    session.items.sort(key=marks.of)
    gc.freeze()  # no need to look through what has been imported, again and again
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [] if config.option.world_dir else mpiexec.versions()


def pytest_report_collectionfinish(items: list[pytest.Item]) -> str:
    counts = Counter(map(marks.of, items))
    return "worlds: " + ", ".join(
        f"{counts[group]} in {'this process' if group == marks.PARENT else f'a {group}'}" for group in sorted(counts)
    )
