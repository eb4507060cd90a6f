"""Bad arguments of public functions: each gives one of the library's errors, which names the argument, on every worker.

Generated: every argument of every function gets every bad value. What is data of the user's own function is left out:
there the function has its say.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import distdl_jax as dj
from distdl_jax import nn


class Thing:
    """A value without a meaning, which looks the same on every worker."""

    def __repr__(self) -> str:
        return "Thing()"


def values(P: dj.Partition) -> dict[str, Any]:
    return {
        "None": None,
        "text": "a",
        "integer": 3,
        "true": True,
        "negative": -7,
        "float": 1.5,
        "list": [1.0, 2.0],
        "tuple": (9,),
        "thing": Thing(),
        "dictionary": {"q": jnp.ones(2)},
        "matrix": jnp.ones((3, 3)),
        "integers": jnp.ones(2, int),
        "complex": jnp.ones(2, complex),
        "spec": dj.TensorSpec((4,), P),
        "partition": P.create_partition_inclusive([1]),
        "function": jnp.sum,
    }


def calls(P: dj.Partition) -> dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, str]]]:
    """Each function, its good arguments, and of each one that is to be spoiled the values that it accepts."""
    C, C3 = P.grid([2]), P.grid([1, 1, 2])
    spec, x, key = dj.TensorSpec((4,), C), jnp.ones(2), jax.random.key(0)
    tree, specs = {"w": x}, {"w": spec}
    line, points = jnp.ones((1, 1, 2)), jnp.ones((1, 2, 1))
    arrays, anyone = "matrix integers complex", "None partition"
    rates = "None integer negative float function"

    def square(x: Any) -> Any:
        return jnp.sum(x**2)

    def stepped(make: Callable[..., Any]) -> Callable[..., Any]:
        def step(**options: Any) -> Any:
            optimiser = make(**options)
            return optimiser.update(tree, optimiser.init(tree), tree)

        return step

    reduced = {"x": x, "P_x": C, "axes_reduce": 0}
    of_reduced = {"P_x": "partition", "axes_reduce": "None"}
    derived = {"fun": square, "primals": (x,), "tangents": (x,), "partition": P}
    pulled = {"fun": square, "argnums": 0, "partition": P}

    def of_x(derivative: Callable[..., Any]) -> Callable[..., Any]:
        return lambda **options: derivative(**options)(x)

    return {
        "all_reduce": (dj.all_reduce, {**reduced, "op": "sum"}, {**of_reduced, "x": arrays, "op": ""}),
        "all_max": (dj.functional.all_max, reduced, {**of_reduced, "x": "matrix integers"}),
        "init_block": (
            dj.init_block,
            {"initializer": jax.nn.initializers.normal(), "key": key, "spec": spec, "dtype": float},
            {"key": "", "spec": "spec", "dtype": "None"},
        ),
        "random.bernoulli": (dj.random.bernoulli, {"key": key, "p": 0.5, "spec": spec}, {"key": "", "spec": "spec"}),
        "random.uniform": (dj.random.uniform, {"key": key, "spec": spec}, {"key": "", "spec": "spec"}),
        "random.normal": (dj.random.normal, {"key": key, "spec": spec}, {"key": "", "spec": "spec"}),
        "replicated": (dj.replicated, {"tree": tree, "P": C, "axes": 0}, {"P": "partition", "axes": "None"}),
        "zero_volume_tensor": (dj.zero_volume_tensor, {"batch_size": 2}, {"batch_size": "None integer"}),
        "zero_volume_tensor, like": (dj.zero_volume_tensor, {"like": x}, {"like": f"None spec {arrays}"}),
        "gather": (dj.gather, {"tree": tree, "specs": specs, "root": 0}, {"specs": "spec", "root": ""}),
        "specs_like": (
            dj.specs_like,
            {"state": {"m": tree}, "params": tree, "param_specs": specs},
            {"param_specs": "spec"},  # one for a whole tree
        ),
        "jvp": (dj.jvp, derived, {"fun": "function", "primals": "", "tangents": "", "partition": anyone}),
        "hvp": (
            dj.hvp,
            {**derived, "argnums": 0},
            {"fun": "function", "primals": "", "tangents": "", "argnums": "", "partition": anyone},
        ),
        "linear_transpose": (
            lambda fun, partition: dj.linear_transpose(fun, x, partition=partition),
            {"fun": lambda x: 2 * x, "partition": P},
            {"fun": "function", "partition": anyone},
        ),
        "jit": (dj.jit, {"fun": square}, {"fun": "function None"}),
        "check": (lambda fun: dj.check(fun, x), {"fun": square}, {"fun": "function"}),
        "grad": (of_x(dj.grad), pulled, {"fun": "function", "argnums": "", "partition": anyone}),
        "value_and_grad": (of_x(dj.value_and_grad), pulled, {"fun": "function", "argnums": "", "partition": anyone}),
        "optim.global_norm": (
            dj.optim.global_norm,
            {"tree": tree, "specs": specs, "partition": P},
            {"specs": "spec", "partition": "None"},
        ),
        "optim.clip_by_global_norm": (
            stepped(dj.optim.clip_by_global_norm),
            {"max_norm": 1.0, "specs": specs, "partition": P},
            {"max_norm": "integer float", "specs": "spec", "partition": "None"},
        ),
        "optim.adaptive_grad_clip": (
            stepped(dj.optim.adaptive_grad_clip),
            {"clipping": 0.1, "specs": specs, "eps": 1e-3, "axis": 0},
            {"clipping": "integer float", "eps": "integer float", "axis": "None", "specs": "spec"},
        ),
        "optim.scale_by_trust_ratio": (
            stepped(dj.optim.scale_by_trust_ratio),
            {"specs": specs, "min_norm": 0.0},
            {"specs": "spec", "min_norm": "integer float"},
        ),
        "optim.lbfgs": (
            dj.optim.lbfgs,
            {"specs": specs, "memory_size": 2, "partition": P},
            {"memory_size": "integer", "partition": anyone, "linesearch": "None", "learning_rate": rates},
        ),
        "nn.HaloExchange": (
            nn.HaloExchange,
            {"P_x": C, "halo": ((1, 1),), "periodic": (True,)},
            {"P_x": "partition", "halo": "", "periodic": ""},
        ),
        "halo_exchange": (
            dj.functional.halo_exchange,
            {"x": x, "P_x": C, "halo": ((1, 1),), "periodic": (True,)},
            {"P_x": "partition", "halo": "", "periodic": ""},
        ),
        "all_gather": (dj.functional.all_gather, {"x": x, "P_x": C, "axes": 0}, {"P_x": "partition", "axes": ""}),
        "all_to_all": (
            lambda **arguments: dj.functional.all_to_all(x[None], C.grid([1, C.size]), **arguments),
            {"split_axis": 0, "concat_axis": 1},
            {"split_axis": "", "concat_axis": ""},
        ),
        "top_k": (
            dj.functional.top_k,
            {"x": x, "P_x": C, "k": 1, "axis": 0},
            {"P_x": "partition", "k": "integer", "axis": ""},
        ),
        "argmax": (dj.functional.argmax, {"x": x, "P_x": C, "axis": 0}, {"P_x": "partition", "axis": ""}),
        "roll": (
            dj.functional.roll,
            {"x": x, "P_x": C, "shift": 1, "axis": 0},
            {"P_x": "partition", "shift": "integer negative tuple integers", "axis": ""},
        ),
        "window_partition": (
            dj.functional.window_partition,
            {"x": x, "P_x": C, "window_size": 1, "axes": 0},
            {"P_x": "partition", "window_size": "", "axes": ""},
        ),
        "pixel_shuffle": (
            dj.functional.pixel_shuffle,
            {"x": line, "P_x": C3, "upscale_factor": 1, "axes": 2, "channel_axis": 1},
            {"upscale_factor": "", "axes": "None", "channel_axis": ""},
        ),
        "cumsum": (
            dj.functional.cumsum,
            {"x": x, "P_x": C, "axis": 0, "reverse": False},
            {"P_x": "partition", "axis": "", "reverse": "true"},
        ),
        "associative_scan": (
            dj.functional.associative_scan,
            {"f": jnp.add, "x": x, "P_x": C, "axis": 0},
            {"P_x": "partition", "axis": ""},
        ),
        "grid_sample": (
            dj.functional.grid_sample,
            {
                "x": line,
                "grid": points,
                "P_x": C3,
                "mode": "bilinear",
                "padding_mode": "zeros",
                "max_displacement": 1.0,
            },
            {"grid": "", "mode": "", "padding_mode": "", "max_displacement": "integer float tuple None"},
        ),
        "mean": (dj.functional.mean, {"x": x, "P_x": C, "axes": 0}, {"P_x": "partition", "axes": "None"}),
        "DistributedPointwise": (
            nn.DistributedPointwise,
            {"P_x": C, "in_features": 3, "dim": 0, "out_features": 2},
            {"P_x": "partition", "in_features": "integer", "dim": ""},
        ),
        "DistributedPReLU": (
            nn.DistributedPReLU,
            {"P_x": C, "num_parameters": 1, "init": 0.1},
            {"num_parameters": "", "init": "integer negative float"},
        ),
        "rfft": (
            dj.functional.rfft,
            {"x": x, "P_x": C, "axes": 0},
            {"P_x": "partition", "axes": "None", "norm": "None"},
        ),
        "checkpoint.save": (
            lambda step: dj.checkpoint.save("/nowhere/at/all", tree, specs, step),
            {"step": 0},
            {"step": "integer"},
        ),
        "Concatenate": (nn.Concatenate, {"P_x": C, "axis": 0}, {"axis": ""}),
        "DistributedLayerNorm": (
            nn.DistributedLayerNorm,
            {"P_x": C, "normalized_shape": 4, "eps": 1e-5},
            {"normalized_shape": "integer tuple", "eps": "integer float"},
        ),
        "Dropout": (nn.Dropout, {"P_x": C, "p": 0.5}, {"p": ""}),
        "DistributedAdaptiveAvgPool": (
            nn.DistributedAdaptiveAvgPool,
            {"P_x": C3, "output_size": 2},
            {"output_size": "integer None tuple"},
        ),
        "DistributedPad": (
            nn.DistributedPad,
            {"P_x": C, "padding": [(1, 1)], "value": 0.0},
            {"padding": "", "value": "integer negative float true"},
        ),
        "DistributedUpsample": (
            nn.DistributedUpsample,
            {"P_x": C3, "scale_factor": 2.0},
            {"scale_factor": "integer float tuple"},
        ),
        "DistributedHuberLoss": (nn.DistributedHuberLoss, {"P_x": C, "delta": 1.0}, {"delta": "integer float"}),
        "LossScale": (
            dj.optim.LossScale,
            {"initial": 2.0, "factor": 2.0, "period": 3},
            {"initial": "integer float", "factor": "integer float", "period": "integer"},
        ),
        "output_spec": (nn.AllSumReduce(C, 0).output_spec, {"x_spec": spec}, {"x_spec": "spec"}),
    }


def outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[str, str]:
    try:
        function(**arguments)
    except dj.DistDLError as error:
        return type(error).__name__, str(error)
    except Exception as error:
        return "foreign", f"{type(error).__name__}: {error}"
    return "accepted", ""


@pytest.mark.simulated(2)
def test_one_sentence_on_every_worker() -> None:
    P = dj.Partition()
    wrong = []
    for name, (function, arguments, spoiled) in calls(P).items():
        for argument, accepted in spoiled.items():
            for bad, value in values(P).items():
                outside = (bad, argument) == ("partition", "P_x") and not value.active and "x" in arguments
                placeholder = {"x": dj.zero_volume_tensor()} if outside else {}
                mine = outcome(function, {**arguments, argument: value, **placeholder})
                kinds = {kind for kind, _ in P.allgather_data(mine)}
                expected = {"accepted"} if bad in accepted.split() else {"InvalidArgumentError", "InvalidTypeError"}
                expected |= set() if bad in accepted.split() else {"PlanError"}
                names = mine[0] == "accepted" or any(f"`{each}" in mine[1] for each in (argument, "tangents"))
                if len(kinds) > 1 or not kinds <= expected or not names:
                    wrong.append(f"{name}, {argument} = {bad}: {kinds}, {mine[1]}")
    assert not wrong, "\n".join(wrong)
