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
from distdl_jax import functional as F
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
    arrays, anyone, on, number = "matrix integers complex", "None partition", "partition", "integer float"
    a_spec, a_function = "spec", "function"

    def square(x: Any) -> Any:
        return jnp.sum(x**2)

    def stepped(make: Callable[..., Any]) -> Callable[..., Any]:
        def step(**options: Any) -> Any:
            optimiser = make(**options)
            return optimiser.update(tree, optimiser.init(tree), tree)

        return step

    def of_x(derivative: Callable[..., Any]) -> Callable[..., Any]:
        return lambda **options: derivative(**options)(x)

    def transposed(fun: Any, partition: Any) -> Any:
        return dj.linear_transpose(fun, x, partition=partition)

    def swapped(**arguments: Any) -> Any:
        return F.all_to_all(x[None], C.grid([1, C.size]), **arguments)

    def saved(step: Any) -> None:
        dj.checkpoint.save("/nowhere/at/all", tree, specs, step)

    reduced, of_reduced = dict(x=x, P_x=C, axes_reduce=0), dict(P_x=on, axes_reduce="None")
    derived = dict(fun=square, primals=(x,), tangents=(x,), partition=P)
    of_derived = dict(fun=a_function, primals="", tangents="", partition=anyone)
    pulled, of_pulled = dict(fun=square, argnums=0, partition=P), dict(fun=a_function, argnums="", partition=anyone)
    halo, of_halo = dict(P_x=C, halo=((1, 1),), periodic=(True,)), dict(P_x=on, halo="", periodic="")
    sample = dict(x=line, grid=points, P_x=C3, mode="bilinear", padding_mode="zeros", max_displacement=1.0)
    of_sample = dict(grid="", mode="", padding_mode="", max_displacement="integer float tuple None")
    clipped = dict(clipping=0.1, specs=specs, eps=1e-3, axis=0)
    of_lbfgs = dict(
        memory_size="integer", partition=anyone, linesearch="None", learning_rate=f"None negative {number} function"
    )
    drawn, of_drawn = dict(key=key, spec=spec), dict(key="", spec=a_spec)
    initial = dict(initializer=jax.nn.initializers.normal(), dtype=float)
    summed = nn.AllSumReduce(C, 0)
    return {
        "all_reduce": (dj.all_reduce, dict(reduced, op="sum"), dict(of_reduced, x=arrays, op="")),
        "all_max": (F.all_max, reduced, dict(of_reduced, x="matrix integers")),
        "init_block": (dj.init_block, dict(drawn, **initial), dict(of_drawn, dtype="None")),
        "random.bernoulli": (dj.random.bernoulli, dict(drawn, p=0.5), of_drawn),
        "random.uniform": (dj.random.uniform, drawn, of_drawn),
        "random.normal": (dj.random.normal, drawn, of_drawn),
        "replicated": (dj.replicated, dict(tree=tree, P=C, axes=0), dict(P=on, axes="None")),
        "zero_volume_tensor": (dj.zero_volume_tensor, dict(batch_size=2), dict(batch_size="None integer")),
        "zero_volume_tensor, like": (dj.zero_volume_tensor, dict(like=x), dict(like=f"None spec {arrays}")),
        "gather": (dj.gather, dict(tree=tree, specs=specs, root=0), dict(specs=a_spec, root="")),
        # One spec for a whole tree.
        "specs_like": (
            dj.specs_like,
            dict(state=dict(m=tree), params=tree, param_specs=specs),
            dict(param_specs="spec"),
        ),
        "jvp": (dj.jvp, derived, of_derived),
        "hvp": (dj.hvp, dict(derived, argnums=0), dict(of_derived, argnums="")),
        "linear_transpose": (
            transposed,
            dict(fun=lambda x: 2 * x, partition=P),
            dict(fun=a_function, partition=anyone),
        ),
        "jit": (dj.jit, dict(fun=square), dict(fun="function None")),
        "check": (lambda fun: dj.check(fun, x), dict(fun=square), dict(fun=a_function)),
        "grad": (of_x(dj.grad), pulled, of_pulled),
        "value_and_grad": (of_x(dj.value_and_grad), pulled, of_pulled),
        "global_norm": (
            dj.optim.global_norm,
            dict(tree=tree, specs=specs, partition=P),
            dict(specs="spec", partition="None"),
        ),
        "clip_by_global_norm": (
            stepped(dj.optim.clip_by_global_norm),
            dict(max_norm=1.0, specs=specs, partition=P),
            dict(max_norm=number, specs=a_spec, partition="None"),
        ),
        "adaptive_grad_clip": (
            stepped(dj.optim.adaptive_grad_clip),
            clipped,
            dict(clipping=number, eps=number, axis="None", specs=a_spec),
        ),
        "scale_by_trust_ratio": (
            stepped(dj.optim.scale_by_trust_ratio),
            dict(specs=specs, min_norm=0.0),
            dict(specs=a_spec, min_norm=number),
        ),
        "lbfgs": (dj.optim.lbfgs, dict(specs=specs, memory_size=2, partition=P), of_lbfgs),
        "nn.HaloExchange": (nn.HaloExchange, halo, of_halo),
        "halo_exchange": (F.halo_exchange, dict(halo, x=x), of_halo),
        "all_gather": (F.all_gather, dict(x=x, P_x=C, axes=0), dict(P_x=on, axes="")),
        "all_to_all": (swapped, dict(split_axis=0, concat_axis=1), dict(split_axis="", concat_axis="")),
        "top_k": (F.top_k, dict(x=x, P_x=C, k=1, axis=0), dict(P_x=on, k="integer", axis="")),
        "argmax": (F.argmax, dict(x=x, P_x=C, axis=0), dict(P_x=on, axis="")),
        "roll": (
            F.roll,
            dict(x=x, P_x=C, shift=1, axis=0),
            dict(P_x=on, shift="integer negative tuple integers", axis=""),
        ),
        "window_partition": (
            F.window_partition,
            dict(x=x, P_x=C, window_size=1, axes=0),
            dict(P_x=on, window_size="", axes=""),
        ),
        "pixel_shuffle": (
            F.pixel_shuffle,
            dict(x=line, P_x=C3, upscale_factor=1, axes=2, channel_axis=1),
            dict(upscale_factor="", axes="None", channel_axis=""),
        ),
        "cumsum": (F.cumsum, dict(x=x, P_x=C, axis=0, reverse=False), dict(P_x=on, axis="", reverse="true")),
        "associative_scan": (F.associative_scan, dict(f=jnp.add, x=x, P_x=C, axis=0), dict(P_x=on, axis="")),
        "grid_sample": (F.grid_sample, sample, of_sample),
        "mean": (F.mean, dict(x=x, P_x=C, axes=0), dict(P_x=on, axes="None")),
        "rfft": (F.rfft, dict(x=x, P_x=C, axes=0), dict(P_x=on, axes="None", norm="None")),
        "checkpoint.save": (saved, dict(step=0), dict(step="integer")),
        "DistributedPointwise": (
            nn.DistributedPointwise,
            dict(P_x=C, in_features=3, dim=0, out_features=2),
            dict(P_x=on, in_features="integer", dim=""),
        ),
        "DistributedPReLU": (
            nn.DistributedPReLU,
            dict(P_x=C, num_parameters=1, init=0.1),
            dict(num_parameters="", init=f"negative {number}"),
        ),
        "Concatenate": (nn.Concatenate, dict(P_x=C, axis=0), dict(axis="")),
        "DistributedLayerNorm": (
            nn.DistributedLayerNorm,
            dict(P_x=C, normalized_shape=4, eps=1e-5),
            dict(normalized_shape="integer tuple", eps=number),
        ),
        "Dropout": (nn.Dropout, dict(P_x=C, p=0.5), dict(p="")),
        "AdaptiveAvgPool": (
            nn.DistributedAdaptiveAvgPool,
            dict(P_x=C3, output_size=2),
            dict(output_size="integer None tuple"),
        ),
        "DistributedPad": (
            nn.DistributedPad,
            dict(P_x=C, padding=[(1, 1)], value=0.0),
            dict(padding="", value=f"negative true {number}"),
        ),
        "Upsample": (nn.DistributedUpsample, dict(P_x=C3, scale_factor=2.0), dict(scale_factor=f"tuple {number}")),
        "DistributedHuberLoss": (nn.DistributedHuberLoss, dict(P_x=C, delta=1.0), dict(delta=number)),
        "LossScale": (
            dj.optim.LossScale,
            dict(initial=2.0, factor=2.0, period=3),
            dict(initial=number, factor=number, period="integer"),
        ),
        "output_spec": (summed.output_spec, dict(x_spec=spec), dict(x_spec=a_spec)),
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
