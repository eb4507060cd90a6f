"""Every example runs, as a user starts it, and prints the right numbers."""

import gzip
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from jobs import FAST_TO_COMPILE, ROOT, run, run_all
from launcher.settings import long_run

EXAMPLES = ROOT / "examples"
PRIMITIVES = (
    *("broadcast", "sum_reduce", "all_sum_reduce", "repartition", "halo_exchange", "all_gather", "reduce_scatter"),
)

# By hand: y = F x and dx = F* dy on workers 0 to 3, row after row; dy is 10^r on worker r.
EXPECTED: dict[str, tuple[list, list]] = {
    "broadcast": (
        [[0, 1, 2], [10, 11, 12], [0, 1, 2], [10, 11, 12]],
        [[101] * 3, [1010] * 3, [], []],
    ),
    "sum_reduce": (
        [[1010, 2020, 3030], [], [], [101, 202, 303]],
        [[1000] * 3, [1] * 3, [1000] * 3, [1] * 3],
    ),
    "all_sum_reduce": (
        [[11, 22, 33], [11, 22, 33], [1100, 2200, 3300], [1100, 2200, 3300]],
        [[11] * 3, [11] * 3, [1100] * 3, [1100] * 3],
    ),
    "repartition": (
        [[], [0, 1, 10, 11, 20, 21], [2, 3, 12, 13, 22, 23], [4, 14, 24]],
        [[10, 10, 100, 100, 1000]] * 3 + [[]],
    ),
    "halo_exchange": (
        [
            [0, 1, 2, 10, 11, 12, 20, 21, 22],
            [2, 3, 12, 13, 22, 23],
            [10, 11, 12, 20, 21, 22, 30, 31, 32],
            [12, 13, 22, 23, 32, 33],
        ],
        [[1, 1, 101, 101], [11, 10, 1111, 1010], [101, 101, 100, 100], [1111, 1010, 1100, 1000]],
    ),
    "all_gather": (
        [[0, 1, 2, 3], [0, 1, 2, 3], [10, 11, 12, 13], [10, 11, 12, 13]],
        [[11, 11], [11, 11], [1100, 1100], [1100, 1100]],
    ),
    "reduce_scatter": (
        [[1111, 2222], [3333, 4444], [5555], [6666]],
        [[1, 1, 10, 10, 100, 1000]] * 4,
    ),
}


pytestmark = pytest.mark.limit(1200)  # programs have limits of their own


@dataclass(frozen=True)
class Example:
    """A program with its options, on so many workers over MPI, or on so many simulated ones."""

    name: str
    options: str = ""
    size: int = 0
    simulate: int = 0

    def __str__(self) -> str:
        where = f"mpi{self.size}" if self.size else f"simulated{self.simulate}"
        return re.sub("[^a-z0-9]+", "_", f"{self.name} {where} {self.options.split(' --out')[0]}").strip("_")

    @property
    def command(self) -> list[object]:
        simulate = ["--simulate", self.simulate] if self.simulate else []
        return [EXAMPLES / f"{self.name}.py", *simulate, *self.options.format(self=self).split()]


def examples(*chosen: Example, only_long: tuple[Example, ...] = ()) -> pytest.MarkDecorator:
    """Return the examples that a test looks at; some in a long run alone."""
    return pytest.mark.parametrize("example", [*chosen, *(only_long if long_run() else ())], ids=str)


Ended = tuple[int, str]
Ends = Callable[[Example], Ended]


@pytest.fixture(scope="module")
def ends(request: pytest.FixtureRequest, folder: Path) -> Ends:
    """Return each example's status and output. Those on as many workers share a world, the simulated ones a process."""
    calls = (item.callspec.params for item in request.session.items if hasattr(item, "callspec"))
    chosen = dict.fromkeys(params["example"] for params in calls if isinstance(params.get("example"), Example))

    @cache
    def all_of(size: int) -> dict[Example, Ended]:
        there = [example for example in chosen if example.size == size]
        commands = [example.command for example in there]
        return dict(zip(there, run_all(commands, size or None, limit=600, cwd=folder), strict=True))

    return lambda example: all_of(example.size)[example]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, array: np.ndarray) -> Path:
    """Make the folder where the examples run: an array, and images."""
    path = tmp_path_factory.mktemp("examples")
    np.save(path / "x.npy", array)
    write_noise(path)
    return path


def write_noise(folder: Path) -> None:
    """Write 80 images to train on and 20 to test on, as MNIST's files, some of them zipped; nothing to learn."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 80), ("t10k", 20)):
        images = rng.integers(0, 256, (count, 28, 28), np.uint8)
        head = np.array([count, 28, 28], ">u4").tobytes()
        (folder / f"{part}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + head + images.tobytes())
        labels = rng.integers(0, 10, count).astype(np.uint8)
        content = b"\0\0\x08\x01" + np.array([count], ">u4").tobytes() + labels.tobytes()
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(content))


@pytest.fixture(scope="module")
def array() -> np.ndarray:
    """Return an array of which one of three workers gets nothing."""
    return np.random.default_rng(0).normal(3, 5, size=(2, 3, 4)).astype(np.float32)


OUT = " --out out/{self}.png"


def is_drawn(example: Example, folder: Path) -> bool:
    return (folder / "out" / f"{example}.png").read_bytes().startswith(b"\x89PNG")


def differences(output: str, between: str = ".*") -> list[float]:
    """Return how an example says that it differs from plain JAX, the sequential network, or the like."""
    return [float(text) for text in re.findall(rf"Largest difference between {between}: (\S+)", output)]


def drawn(output: str, name: str) -> list[list[float]]:
    """Return the numbers that the workers hold of the tensor that was drawn under `name`, row after row."""
    lines = output.split(f"\n{name}\n   worker 0", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    blocks: list[list[float]] = [[] for _ in range(4)]
    for line in lines:
        for worker, cell in enumerate(line.split("|")):
            blocks[worker] += [float(word) for word in cell.split() if word != "nothing"]
    return blocks


OVER_MPI = [Example(name, size=4) for name in PRIMITIVES]
ON_THREADS = [Example(name, simulate=4) for name in PRIMITIVES]


@examples(*OVER_MPI[::2], *ON_THREADS[1::2], only_long=(*OVER_MPI[1::2], *ON_THREADS[::2]))
def test_a_primitive_moves_what_it_should(example: Example, ends: Ends) -> None:
    """They share all but what they move: in a short run each is started in one of the two ways."""
    status, output = ends(example)
    assert status == 0, output
    forward, adjoint = EXPECTED[example.name]
    assert drawn(output, "y = F x") == forward
    assert drawn(output, "dx = F* dy") == adjoint
    left, right = re.search(r"<F x, dy> = (\S+) +<x, F\* dy> = (\S+)", output).groups()  # type: ignore[union-attr]
    assert left == right


@examples(Example("scatter_gather", size=4), Example("scatter_gather", simulate=4))
def test_scatter_gather_makes_its_own_array(example: Example, ends: Ends) -> None:
    _, output = ends(example)
    assert "blocks of (3, 4), (3, 4), (2, 4), (2, 4)." in output
    assert "mean 0.000, standard deviation 1.000" in output


@examples(*(Example("scatter_gather", "--input x.npy --output {self}.npy", size) for size in (1, 3)))
def test_scatter_gather_of_a_file(example: Example, ends: Ends, folder: Path, array: np.ndarray) -> None:
    status, output = ends(example)
    assert status == 0, output
    x = array.astype(np.float64)
    np.testing.assert_allclose(np.load(folder / f"{example}.npy"), (x - x.mean()) / x.std(), rtol=1e-12)


@examples(Example("broadcast", size=1))
def test_too_few_workers_are_told_how_many(example: Example, ends: Ends) -> None:
    status, output = ends(example)
    assert status == 2
    assert "This needs 4 workers: mpirun -n 4 python" in output
    assert "or --simulate 4" in output


@examples(Example("digits_mlp", OUT, 2), only_long=(Example("digits_mlp", OUT, 4),))
def test_digits_trains_as_the_sequential_network_does(example: Example, ends: Ends, folder: Path) -> None:
    """The example checks its accuracy (0.95) and the parameters' difference (1e-10) itself, and fails without them."""
    status, output = ends(example)
    assert status == 0, output
    accuracies = re.search(r"Test accuracy: (\S+) distributed, (\S+) sequential", output).groups()  # type: ignore[union-attr]
    assert float(accuracies[0]) >= 0.95
    assert accuracies[0] == accuracies[1]
    assert max(differences(output, "their parameters")) < 1e-10
    assert is_drawn(example, folder)


@examples(Example("digits_mlp", "--epochs 1 --dtype float32" + OUT, 1))
def test_digits_on_one_worker_fails_where_it_does_not_learn(example: Example, ends: Ends) -> None:
    status, output = ends(example)
    assert status == 1, output
    assert "FAILED: the test accuracy must be 0.95 or more." in output


@pytest.mark.parametrize(
    "text, reason",
    [
        ("4x4", "layer 1 on 4x4 takes 16 workers, but there are 4: start it with mpirun -n 16"),
        ("1x2,2x2", "has 2 shapes; give one, or one for each of 3 layers"),
        ("2x2,2x2,2x1", "its shape must be 1 x something"),
        ("2x", "is neither mixed, inputs, outputs, whole nor a shape P_fo x P_fi such as 2x2"),
    ],
)
def test_digits_refuses_a_partition(text: str, reason: str) -> None:
    from argparse import ArgumentTypeError

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import digits_options
    with pytest.raises(ArgumentTypeError, match=re.escape(reason)):
        digits_options.weight_shapes(text, workers=4, layers=3)


NOISE = "--epochs 1 --batch-size 32 --mnist ." + OUT  # the last batch has 16 images
LENET5_SIMULATED = Example("lenet5", NOISE, simulate=4)


@examples(Example("lenet5", NOISE, 2), only_long=(*(Example("lenet5", NOISE, n) for n in (1, 4)), LENET5_SIMULATED))
def test_lenet5_follows_the_sequential_network_step_by_step(example: Example, ends: Ends, folder: Path) -> None:
    """A few steps are enough to tell two networks apart. Worker 0 alone prints and draws."""
    status, output = ends(example)
    assert status == 1, output
    assert output.count("80 images to train on, 20 to test on") == 1
    assert "FAILED: the test accuracy must be 0.98 or more." in output
    assert max(differences(output, "their parameters") + differences(output, "their losses at any step")) < 1e-10
    assert "FAILED: the differences" not in output
    assert is_drawn(example, folder)


def test_lenet5_names_the_file_that_is_missing(tmp_path: Path) -> None:
    write_noise(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").unlink()
    status, output = run(1, EXAMPLES / "lenet5.py", "--mnist", tmp_path, flags=FAST_TO_COMPILE)
    assert status != 0
    assert f"--mnist: {tmp_path} holds neither t10k-images-idx3-ubyte nor t10k-images-idx3-ubyte.gz" in output


UNET3D = "--volume 12 --memory-volume 24 --channels 2 4 --samples 2 --steps 2 --check --dtype float64" + OUT


@examples(
    Example("unet3d", UNET3D.replace("24", "0"), simulate=2),
    only_long=(Example("unet3d", UNET3D, 2),),
)
def test_the_unet_trains_as_the_sequential_network_does(example: Example, ends: Ends, folder: Path) -> None:
    """Losses equal at every step, in float64; the planned memory of a worker falls with the number of workers."""
    status, output = ends(example)
    assert status == 0, output
    assert max(differences(output, "their losses at any step, relative to the first")) < 1e-10
    assert is_drawn(example, folder)
    if example.size:
        rows = re.findall(r"^ +([12]) +\d+ x \d+ x \d+ +(\S+) +(\S+) +(\S+)$", output, re.MULTILINE)
        assert [row[0] for row in rows] == ["2", "1"]
        two, one = (float(row[2]) for row in rows)
        assert two < 0.75 * one, output


GAUSS_NEWTON = "--size 13 --steps 4 --inner 6"


@examples(Example("gauss_newton", GAUSS_NEWTON, 2), only_long=(Example("gauss_newton", GAUSS_NEWTON, simulate=2),))
def test_gauss_newton_solves_what_plain_jax_solves(example: Example, ends: Ends) -> None:
    """Step by step: the objective, and the conductivity at the end; the example checks both, and that it gets there."""
    status, output = ends(example)
    assert status == 0, output
    assert len(differences(output)) == 2
    assert len(re.findall(r"step +4  objective", output)) == 2


FEW = "--steps 2 --batch-size 2 --dtype float64 "
TRANSFORMER = FEW + "--layers 1 --width 16 --heads 2 --length 15 --generate 3 --partition "


@examples(
    Example("transformer", TRANSFORMER + "tensor" + OUT, simulate=2),
    only_long=(
        *(Example("transformer", TRANSFORMER + partition + OUT, simulate=2) for partition in ("ring", "heads")),
        *(Example("transformer", TRANSFORMER + partition + OUT, 2) for partition in ("tensor", "ring", "heads")),
    ),
)
def test_the_transformer_follows_plain_jax(example: Example, ends: Ends, folder: Path) -> None:
    """Step by step; and with a cache it chooses the characters that plain JAX chooses without one."""
    status, output = ends(example)
    assert status == 0, output
    found = differences(output, "their .*")
    assert len(found) == 2 and max(found) < 1e-10
    assert "would have chosen 3 of these 3 characters" in output
    assert is_drawn(example, folder)


def network(name: str, workers: int, options: str) -> Example:
    return Example(name, FEW + options + OUT, simulate=workers)


MIXTURE = "--layers 1 --width 8 --heads 2 --length 15 --hidden 8 --experts 3 --samples 8 --capacity 1.0"


@examples(
    network("fno", 2, "--size 8 --width 2 --modes 2 --blocks 1 --samples 4"),
    network("mesh_network", 2, "--size 6 --width 4 --blocks 1 --samples 4"),
    network("fno4d", 2, "--size 4 --times 4 --width 2 --modes 2 --blocks 1 --samples 2 --partition 1x1x1x1x1x2"),
    network("moe_transformer", 2, MIXTURE),
    network("poisson_cnn", 2, "--size 7 --width 2 --samples 2"),
    network("resnet", 2, "--size 8 --width 1 --blocks 1"),
    only_long=(
        network("moe_transformer", 4, MIXTURE + " --beside --partition 2x2x1"),
        network("resnet", 4, "--size 32 --width 1"),
        network("resnet", 4, "--size 16 --width 2 --blocks 1 1 --partition 2x1x2x1"),
        network("resnet", 4, "--size 16 --width 2 --blocks 1 1 --partition 4x1x1x1"),
        network("fno4d", 4, "--size 5 --times 3 --width 2 --modes 2 --samples 4 --partition 1x1x2x1x1x2"),
        network("mesh_network", 4, "--size 7 --width 4 --blocks 2 --samples 4 --partition 2x2x1"),
        network("poisson_cnn", 4, "--size 9 --width 2 --samples 4 --partition 2x1x2x1"),
        network("fno", 4, "--dims 3 --size 6 --width 2 --modes 2 --samples 4 --partition 2x1x1x2x1"),
        # Smaller ones have gradients so close to 0 that adam makes 1e-8 of their rounding, on one worker too.
        network("super_resolution", 4, "--size 8 --width 4 --samples 6 --partition 2x1x2x1"),
        network("vgg", 4, "--width 1"),
        Example("digits_mlp", "--epochs 2" + OUT, simulate=4),
    ),
)
def test_whole_networks_beside_plain_jax(example: Example, ends: Ends, folder: Path) -> None:
    """On simulated workers, step by step: the example compares losses and parameters itself; and it draws."""
    status, output = ends(example)
    assert status == (1 if example.name == "digits_mlp" else 0), output  # two epochs don't reach the accuracy
    found = differences(output, "their .*")
    assert len(found) == (3 if example.name in ("moe_transformer", "resnet") else 2) and max(found) < 1e-10
    assert is_drawn(example, folder)
