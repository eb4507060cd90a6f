"""Every example runs, as a user starts it, and prints the right numbers."""

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launcher.settings import long_run
from programs import FAST_TO_COMPILE, ROOT, run, run_all, run_alone, simulate_all

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


@pytest.fixture(scope="module", params=[run_all, simulate_all], ids=["mpi", "simulated"])
def outputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each example of a primitive prints on four workers, and scatter_gather in a folder of its own."""
    paths = [EXAMPLES / f"{name}.py" for name in (*PRIMITIVES, "scatter_gather")]
    printed: dict[str, str] = request.param(4, paths, cwd=tmp_path_factory.mktemp("examples"))
    return printed


def drawn(output: str, name: str) -> list[list[float]]:
    """What the workers hold of the tensor that was drawn under `name`, row after row."""
    lines = output.split(f"\n{name}\n   worker 0", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    blocks: list[list[float]] = [[] for _ in range(4)]
    for line in lines:
        for worker, cell in enumerate(line.split("|")):
            blocks[worker] += [float(word) for word in cell.split() if word != "nothing"]
    return blocks


@pytest.mark.parametrize("name", PRIMITIVES)
def test_a_primitive_moves_what_it_should(name: str, outputs: dict[str, str]) -> None:
    output = outputs[f"{name}.py"]
    forward, adjoint = EXPECTED[name]
    assert drawn(output, "y = F x") == forward
    assert drawn(output, "dx = F* dy") == adjoint
    left, right = re.search(r"<F x, dy> = (\S+) +<x, F\* dy> = (\S+)", output).groups()  # type: ignore[union-attr]
    assert left == right


def test_scatter_gather_makes_its_own_array(outputs: dict[str, str]) -> None:
    assert "blocks of (3, 4), (3, 4), (2, 4), (2, 4)." in outputs["scatter_gather.py"]
    assert "mean 0.000, standard deviation 1.000" in outputs["scatter_gather.py"]


@pytest.mark.parametrize("size", [1, 3])
def test_scatter_gather_of_a_file(size: int, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(3, 5, size=(2, 3, 4)).astype(np.float32)  # one of three workers gets nothing
    np.save(tmp_path / "x.npy", x)
    arguments = ("--input", tmp_path / "x.npy", "--output", tmp_path / "y.npy")
    status, output = run(size, EXAMPLES / "scatter_gather.py", *arguments, flags=FAST_TO_COMPILE)
    assert status == 0, output
    x = x.astype(np.float64)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), (x - x.mean()) / x.std(), rtol=1e-12)


def test_too_few_workers_are_told_how_many(tmp_path: Path) -> None:
    status, output = run(1, EXAMPLES / "broadcast.py")
    assert status == 2
    assert "This needs 4 workers: mpirun -n 4 python" in output
    assert "or --simulate 4" in output


@pytest.mark.parametrize("size", [2, 4] if long_run() else [2])
def test_digits_trains_as_the_sequential_network_does(size: int, tmp_path: Path) -> None:
    """The example checks its accuracy (0.95) and the parameters' difference (1e-10) itself, and fails without them."""
    arguments = ("--out", tmp_path / "curve" / "digits.png")
    status, output = run(size, EXAMPLES / "digits_mlp.py", *arguments, limit=290, flags=FAST_TO_COMPILE)
    assert status == 0, output
    accuracies = re.search(r"Test accuracy: (\S+) distributed, (\S+) sequential", output).groups()  # type: ignore[union-attr]
    difference = float(re.search(r"Largest difference between their parameters: (\S+)", output)[1])  # type: ignore[index]
    assert float(accuracies[0]) >= 0.95
    assert accuracies[0] == accuracies[1]
    assert difference < 1e-10
    assert (tmp_path / "curve" / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_digits_on_one_worker_fails_where_it_does_not_learn(tmp_path: Path) -> None:
    arguments = ("--epochs", 1, "--dtype", "float32", "--out", tmp_path / "digits.png")
    status, output = run(1, EXAMPLES / "digits_mlp.py", *arguments, limit=120, flags=FAST_TO_COMPILE)
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


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    """80 images to train on and 20 to test on, in files as MNIST comes in, some of them zipped; nothing to learn."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 80), ("t10k", 20)):
        images = rng.integers(0, 256, (count, 28, 28), np.uint8)
        head = np.array([count, 28, 28], ">u4").tobytes()
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + head + images.tobytes())
        labels = rng.integers(0, 10, count).astype(np.uint8)
        content = b"\0\0\x08\x01" + np.array([count], ">u4").tobytes() + labels.tobytes()
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(content))
    return tmp_path


NOISE = "--epochs 1 --batch-size 32 --mnist ."  # the last batch has 16 images


@pytest.mark.parametrize("size", [1, 2, 4] if long_run() else [2])
def test_lenet5_follows_the_sequential_network_step_by_step(size: int, noise: Path) -> None:
    """A few steps are enough to tell two networks apart."""
    arguments = (*NOISE.split(), "--out", noise / "lenet5.png")
    status, output = run(size, EXAMPLES / "lenet5.py", *arguments, limit=290, cwd=noise, flags=FAST_TO_COMPILE)
    assert status == 1, output
    assert "80 images to train on, 20 to test on" in output
    assert "FAILED: the test accuracy must be 0.98 or more." in output
    for what in ("their parameters", "their losses at any step"):
        assert float(re.search(rf"Largest difference between {what}: (\S+)", output)[1]) < 1e-10  # type: ignore[index]
    assert "FAILED: the differences" not in output


def test_lenet5_names_the_file_that_is_missing(noise: Path) -> None:
    (noise / "t10k-images-idx3-ubyte").unlink()
    status, output = run(1, EXAMPLES / "lenet5.py", "--mnist", noise, flags=FAST_TO_COMPILE)
    assert status != 0
    assert f"--mnist: {noise} holds neither t10k-images-idx3-ubyte nor t10k-images-idx3-ubyte.gz" in output


@pytest.mark.limit(300)
@pytest.mark.parametrize("name", ["lenet5", "digits_mlp", "unet3d"] if long_run() else ["lenet5"])
def test_the_networks_train_on_simulated_workers(name: str, noise: Path) -> None:
    """As over MPI: the same losses as the sequential network's, and worker 0 alone prints and draws."""
    picture = noise / f"{name}.png"
    short = {
        "lenet5": NOISE.replace("32", "40"),  # two whole batches: half as many programs
        "digits_mlp": "--epochs 2",
        "unet3d": "--volume 12 --memory-volume 0 --channels 2 4 --samples 2 --steps 3 --check --dtype float64",
    }[name].split()
    size = 2 if name == "unet3d" else 4
    arguments = (EXAMPLES / f"{name}.py", "--simulate", size, *short, "--out", picture)
    status, output = run_alone(*arguments, limit=290, cwd=noise, flags=FAST_TO_COMPILE)
    assert status == (0 if name == "unet3d" else 1), output  # so few steps don't reach the accuracy
    found = re.findall(r"Largest difference between their .*: (\S+)", output)
    assert len(found) == (1 if name == "unet3d" else 2)
    assert max(map(float, found)) < 1e-10
    assert picture.read_bytes().startswith(b"\x89PNG")


def simulated(size: int, *arguments: object, **options: Any) -> tuple[int, str]:
    return run_alone(*arguments, "--simulate", size, **options)


@pytest.mark.parametrize("start", [run, simulated] if long_run() else [run])
def test_gauss_newton_solves_what_plain_jax_solves(start: Callable[..., tuple[int, str]]) -> None:
    """Step by step: the objective, and the conductivity at the end; the example checks both, and that it gets there."""
    status, output = start(
        2, EXAMPLES / "gauss_newton.py", "--size", 13, "--steps", 4, "--inner", 6, limit=120, flags=FAST_TO_COMPILE
    )
    assert status == 0, output
    assert len(re.findall(r"Largest difference between .*: (\S+)", output)) == 2
    assert len(re.findall(r"step +4  objective", output)) == 2


TRANSFORMER = "--dtype float64 --layers 1 --width 16 --heads 2 --length 15 --batch-size 2 --steps 2 --generate 3"


@pytest.mark.limit(300)
@pytest.mark.parametrize("partition", ["tensor", "ring", "heads"] if long_run() else ["tensor"])
@pytest.mark.parametrize("start", [simulated, run] if long_run() else [simulated])
def test_the_transformer_follows_plain_jax(
    start: Callable[..., tuple[int, str]], partition: str, tmp_path: Path
) -> None:
    """Step by step; and with a cache it chooses the characters that plain JAX chooses without one."""
    arguments = ("--partition", partition, *TRANSFORMER.split(), "--out", tmp_path / "loss.png")
    status, output = start(2, EXAMPLES / "transformer.py", *arguments, limit=280, flags=FAST_TO_COMPILE)
    assert status == 0, output
    found = re.findall(r"Largest difference between their .*: (\S+)", output)
    assert len(found) == 2 and max(map(float, found)) < 1e-10
    assert "would have chosen 3 of these 3 characters" in output
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "name, size, options",
    [
        ("fno", 2, "--size 8 --width 2 --modes 2 --blocks 1 --samples 4"),
        ("resnet", 2, "--size 8 --width 1 --blocks 1"),
        *(
            (
                ("resnet", 4, "--size 32 --width 1"),
                ("resnet", 4, "--size 16 --width 2 --blocks 1 1 --partition 2x1x2x1"),
                ("resnet", 4, "--size 16 --width 2 --blocks 1 1 --partition 4x1x1x1"),
                ("fno", 4, "--dims 3 --size 6 --width 2 --modes 2 --samples 4 --partition 2x1x1x2x1"),
                ("super_resolution", 4, "--size 6 --width 3 --samples 6 --partition 2x1x2x1"),
                ("vgg", 4, "--width 1"),
            )
            if long_run()
            else ()
        ),
    ],
)
def test_whole_networks_beside_plain_jax(name: str, size: int, options: str, tmp_path: Path) -> None:
    """On simulated workers, step by step: the example compares losses and parameters itself; and it draws."""
    few = ["--steps", "2", "--batch-size", "2", "--dtype", "float64"]
    picture = tmp_path / "picture.png"
    arguments = (EXAMPLES / f"{name}.py", *few, *options.split(), "--out", picture)
    status, output = simulated(size, *arguments, limit=290, cwd=tmp_path, flags=FAST_TO_COMPILE)
    assert status == 0, output
    found = re.findall(r"Largest difference between their .*: (\S+)", output)
    assert len(found) == (3 if name == "resnet" else 2) and max(map(float, found)) < 1e-10
    assert picture.read_bytes().startswith(b"\x89PNG")
