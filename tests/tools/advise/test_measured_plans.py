"""In a job whole steps are measured: what the answer says, how it is kept in a file, and how Ctrl-C ends it."""

import json
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.errors import InvalidArgumentError
from distdl_jax.tools.advise import measure

pytestmark = pytest.mark.world(2)

NETWORK = [nn.linear(out_features=8), jax.nn.relu, nn.linear(out_features=4)]
X_SHAPE = (8, 16)


def advise(**options: object) -> "dj.tools.advise.advise.Advice":
    return dj.advise(NETWORK, X_SHAPE, workers=dj.Partition(), **{"measure": 0.5, **options})


def test_measured() -> None:
    """All workers get the same answer; the obvious plans, and what stayed, have times; the network trains."""
    advice = dj.advise([*NETWORK, nn.batch_norm()], X_SHAPE, workers=dj.Partition(), measure=0.5)
    told = dj.Partition().allgather_data((advice.verdict, advice.placement, advice.faster))
    assert told[0] == told[1]
    assert advice.placement.seconds > 0 and advice.faster.rounds >= 1
    assert "faster" in advice.verdict and "round" in str(advice).splitlines()[0] and "step, ms" in str(advice)
    assert all(each.seconds > 0 for each in advice.runners_up)
    for place, grid in advice.runners_up[0].grids.items():
        assert advice.why(place, grid).seconds is not None
    params = advice.network.init(jax.random.key(0))
    x = jnp.ones(advice.x_spec.local_shape)
    state = advice.network.init_state()

    def loss(params: tuple) -> jax.Array:
        return jnp.sum(advice.network(params, x, state=state, training=True)[0] ** 2)

    value, gradient = dj.jit(dj.value_and_grad(loss))(params)
    assert np.isfinite(value) and jax.tree.structure(gradient) == jax.tree.structure(params)


def test_arrays_that_do_not_fit_together_are_made_for_each_step() -> None:
    """With a limit that all plans keep, but not all of them together, measuring works as well."""
    estimated = advise(measure=0)
    assert estimated.verdict.startswith("Nothing was measured, since `measure` is 0") and estimated.faster is None
    limit = max(each.memory for each in (*estimated.runners_up, estimated.placement))
    assert advise(memory=limit).placement.seconds > 0


def test_results_are_kept_where_asked(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A second call finds what the first measured; another shape is another result; a damaged file is refused."""
    path = _shared(tmp_path_factory) / "advice.json"
    first = advise(results=path)
    content = json.loads(path.read_text())
    (key,) = content["results"]
    assert json.loads(key)["x_shape"] == list(X_SHAPE) and "jax" in json.loads(key)["versions"]
    second = advise(results=path)
    assert (second.verdict, second.placement, second.runners_up) == (first.verdict, first.placement, first.runners_up)
    dj.advise(NETWORK, (10, 16), workers=dj.Partition(), measure=0.2, results=path)
    dj.Partition().allgather_data(0)
    assert len(json.loads(path.read_text())["results"]) == 2
    dj.Partition().allgather_data(0)
    if dj.Partition().rank == 0:
        path.write_text("{}")
    with pytest.raises(InvalidArgumentError, match="`results`"):
        advise(results=path)


def test_nothing_is_written_unless_asked(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, before = _shared(tmp_path_factory), os.getcwd()
    os.chdir(folder)
    try:
        advise(measure=0.1)
    finally:
        os.chdir(before)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("worker", [0, 1])
def test_ctrl_c_ends_measuring_after_a_round(worker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one worker alone: both stop after the same round, with what is known then."""
    steps: list[measure.Trial] = []
    pressed: list[bool] = []

    def seconds(trial: measure.Trial, *args: object) -> float:
        steps.append(trial)
        if dj.Partition().rank == worker and steps.count(trial) == 4 and not pressed:
            pressed.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        return taken(trial, *args)

    taken = measure.Trial.seconds
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(measure.Trial, "seconds", seconds)
    advice = advise(measure=60)
    assert "Ctrl-C stopped measuring after 2 rounds" in advice.verdict and advice.faster.rounds == 2
    assert signal.getsignal(signal.SIGINT) == before


def test_ctrl_c_while_plans_are_compiled_gives_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:

    def seconds(trial: measure.Trial, *args: object) -> float:
        if dj.Partition().rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return 1.0

    monkeypatch.setattr(measure.Trial, "seconds", seconds)
    advice = advise(measure=60)
    assert advice.verdict.startswith("Nothing was measured, since Ctrl-C was") and advice.placement.seconds is None


def _shared(factory: pytest.TempPathFactory) -> Path:
    """Return a folder that both workers know."""
    P = dj.Partition()
    return Path(P.broadcast_data(str(factory.mktemp("advice")) if P.rank == 0 else None))
