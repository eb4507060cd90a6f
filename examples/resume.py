"""Training that can be killed at any moment, and goes on where it was: on as many workers as there are then.

    mpirun -n 4 python -m distdl_jax examples/resume.py --steps 200     # kill it, with Ctrl-C or worse
    mpirun -n 3 python -m distdl_jax examples/resume.py --steps 200     # it goes on from its last checkpoint
    python examples/resume.py --steps 200 --simulate 2

LeNet-5 of examples/lenet5.py. A checkpoint holds the parameters, the optimiser's state, the random key that the order
of the images comes from, and the step. On SIGTERM or SIGUSR1 to any worker (Slurm: --signal=USR1@60) all workers save
after the same step, and the program ends with status 0. What comes out is what a run gives that nobody has disturbed:
to the bit on as many workers, to rounding on others.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

# One thread a worker, because the workers share the machine's cores. XLA reads both when jax is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("NPROC", "1")

import distdl_jax as dj
import jax
import numpy as np
import optax

import launch
from lenet5 import Data, lenet5, local_blocks
from training import loss, say


def read_digits(images: int) -> Data:
    """Read the first of scikit-learn's digits, each pixel of 8 x 8 as 3 x 3 of them, with a margin of two."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.kron(digits.images[:images] / 16, np.ones((3, 3)))
    return Data(np.pad(pixels, ((0, 0), (2, 2), (2, 2)))[:, None], np.eye(10)[digits.target[:images]])


def batch(data: Data, key: jax.Array, step: int, size: int) -> Data:
    """Return the images of a step: each epoch has an order of its own, which the key decides."""
    epoch, place = divmod(step, len(data.images) // size)
    seed = np.asarray(jax.random.key_data(jax.random.fold_in(key, epoch)))
    rows = np.random.default_rng(seed).permutation(len(data.images))[place * size : (place + 1) * size]
    return Data(data.images[rows], data.labels[rows])


def main() -> int:
    launch.simulate_if_asked()
    parser = argparse.ArgumentParser(description="Train LeNet-5, and go on after whatever ended it.")
    parser.add_argument("--path", type=Path, default=Path("out/resume"), help="where the checkpoints are")
    parser.add_argument("--out", type=Path, help="where the trained parameters go, a safetensors file")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="save after every so many steps")
    parser.add_argument("--images", type=int, default=1792)
    parser.add_argument("--batch-size", type=int, default=32)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)

    P_world = dj.Partition()
    network = lenet5(P_world)
    optimiser = optax.sgd(0.05, momentum=0.9)
    params = network.init(jax.random.key(0), "float64")
    state = {"params": params, "optimiser": optimiser.init(params), "key": jax.random.key(1), "step": 0}
    specs = dj.training_specs(network, state["optimiser"], key=state["key"], step=state["step"])
    data = P_world.broadcast_data(read_digits(options.images) if P_world.rank == 0 else None)

    @dj.jit
    def train(params, optimiser_state, data):
        value, gradient = dj.value_and_grad(partial(loss, network))(params, data)
        updates, optimiser_state = optimiser.update(gradient, optimiser_state, params)
        return optax.apply_updates(params, updates), optimiser_state, value

    with dj.checkpoint.Manager(options.path, keep=2) as manager, dj.checkpoint.Preemption() as preemption:
        if manager.latest_step() is not None:
            state = manager.restore(specs)
            say(f"goes on after step {int(state['step'])}, on {P_world.size} workers")
        for step in range(int(state["step"]), options.steps):
            images = local_blocks(network, batch(data, state["key"], step, options.batch_size))
            state["params"], state["optimiser"], value = train(state["params"], state["optimiser"], images)
            state["step"] = step + 1
            stops = preemption.stop()
            if stops or state["step"] % options.every == 0 or state["step"] == options.steps:
                manager.save(state, specs, state["step"])
                say(f"step {state['step']:4}  loss {float(value):.5f}")
            if stops:
                say(f"told to stop: saved after step {state['step']}")
                return 0
    if options.out is not None:
        dj.checkpoint.export(options.out, state["params"], specs["params"])
    say(f"trained {options.steps} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
