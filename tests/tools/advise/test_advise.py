"""What an advice says outside of a job, for what reason, and what is refused in a sentence."""

from pathlib import Path

import pytest

import distdl_jax as dj
from distdl_jax import nn
from distdl_jax.errors import InvalidArgumentError, InvalidTypeError, PlanError
from distdl_jax.tools.advise.command import advise_on_file
from distdl_jax.tools.cost.machines import Machine

ONE = dj.planning_world(1).grid([1, 1])
CONV = nn.conv2d(out_channels=4, kernel_size=3, padding=1)
RESIDUAL = [nn.conv2d(out_channels=4, kernel_size=1), nn.batch_norm(), nn.skip(CONV, nn.group_norm(num_groups=2), CONV)]
SLOW = Machine(latency=1e-2, bandwidth=1e7, flops=1e12, memory_bandwidth=1e12, memory=1e9)


def test_outside_of_a_job_the_first_line_says_that_nothing_was_measured() -> None:
    advice = dj.advise(RESIDUAL, (2, 3, 9, 8), workers=2)
    lines = str(advice).splitlines()
    assert lines[0] == advice.verdict and lines[0].startswith("Nothing was measured, since `workers` (=2) is a number")
    assert advice.faster is None and advice.placement.seconds is None
    assert "the batch split" in str(advice) and "the split of dimension 2" in str(advice)
    assert [each.estimate for each in advice.runners_up] == sorted(each.estimate for each in advice.runners_up)
    assert advice.placement.estimate <= advice.runners_up[0].estimate
    cost, found = dj.cost(advice.network, advice.x_spec), advice.placement
    assert found.messages == cost.messages.max() == advice.cost.messages.max()
    assert found.bytes == cost.bytes.max() and found.memory == cost.memory.max()


def test_a_machine_on_which_messages_cost_most_gives_one_worker() -> None:
    advice = dj.advise(RESIDUAL, (2, 3, 9, 8), workers=2, machine=SLOW)
    assert advice.placement.messages == 0 and set(advice.placement.grids.values()) == {(1, 1, 1, 1)}


def test_workers_that_are_threads_are_not_measured() -> None:
    """In dj.simulate all workers compute in one process, so that times say nothing."""

    def program() -> str:
        return dj.advise([CONV], (2, 2, 8, 8), workers=dj.Partition()).verdict

    for verdict in dj.simulate(2, program):
        assert verdict.startswith("Nothing was measured, since the workers are not separate")


def test_why() -> None:
    """The chosen grid gives the chosen plan; another one says what it costs; text and numbers name layers alike."""
    advice = dj.advise(RESIDUAL, (2, 3, 90, 80), workers=2)
    assert advice.why(0, advice.placement.grids["0"]) == advice.placement
    forced = advice.why("2.0", (1, 1, 1, 1))
    assert forced.grids["2.0"] == forced.grids["2.2"] == (1, 1, 1, 1)
    assert forced.estimate > advice.placement.estimate and forced.memory > 0 and forced.seconds is None
    for layer, grid in ((7, (1, 1, 1, 1)), (0, (1, 1, 1)), (0, (5, 1, 1, 1))):
        with pytest.raises(InvalidArgumentError):
            advice.why(layer, grid)


def test_memory_limits() -> None:
    """In bytes, as text, and as the machine's; too little is refused with the least that would do."""
    with pytest.raises(PlanError, match=r"`memory` \(100 B\) is too little.*the smallest needs [0-9.]+ KiB"):
        dj.advise(RESIDUAL, (2, 3, 9, 8), workers=2, memory="100 B")
    most = dj.advise(RESIDUAL, (2, 3, 9, 8), workers=2).placement.memory
    assert dj.advise(RESIDUAL, (2, 3, 9, 8), workers=2, memory=most).placement.memory <= most
    assert dj.advise(RESIDUAL, (2, 3, 9, 8), workers=2, memory="1 GiB").placement.memory == most


@pytest.mark.parametrize(
    ("network", "x_shape", "error", "message"),
    [
        ([nn.DistributedConv2d], (1, 2, 4, 4), InvalidTypeError, "nn.describe"),
        ([CONV], (4,), InvalidArgumentError, "two lengths"),
        ([nn.DistributedLinear(ONE, ONE, ONE, 4, 4)], (4, 4), InvalidTypeError, r"network\[0\].*Linear"),
        ([CONV, 3], (1, 2, 4, 4), InvalidTypeError, r"network\[1\]"),
        ([CONV, nn.conv3d(out_channels=1, kernel_size=1)], (1, 2, 4, 4), PlanError, r"network\[1\].*conv3d"),
        ([nn.skip(nn.conv2d(out_channels=4, kernel_size=3))], (1, 4, 4, 4), PlanError, "shape of x"),
        ([], (1, 2), InvalidTypeError, "one or more"),
    ],
)
def test_refused(network: list, x_shape: tuple[int, ...], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        dj.advise(network, x_shape, workers=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("workers", 0),
        ("memory", "4 cats"),
        ("optimiser", "none"),
        ("machine", 3),
        ("measure", -1),
        ("measure", "1 s"),
    ],
)
def test_arguments_that_are_refused(name: str, value: object) -> None:
    with pytest.raises((InvalidArgumentError, InvalidTypeError), match=f"`{name}` "):
        dj.advise([CONV], (1, 2, 4, 4), **{"workers": 2, name: value})


def test_unknown_arguments_of_descriptions() -> None:
    for make, word in ((lambda: nn.conv2d(kernel=3), "kernel_size"), (lambda: nn.linear(P_x=ONE), "P_x")):
        with pytest.raises(InvalidTypeError, match=word):
            make()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "network.py"
    file.write_text("from distdl_jax import nn\nnetwork = [nn.linear(out_features=8)]\nx_shape = (64, 32)\n")
    assert advise_on_file([str(file), "--workers", "4", "--memory", "1 GiB"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Nothing was measured") and "linear" in printed
    file.write_text("network = []\n")
    assert advise_on_file([str(file), "--workers", "4"]) == 1
    assert "`x_shape`" in capsys.readouterr().err
