"""Bad arguments of public functions: each gives one of the library's errors, which names the argument, on every worker.

Generated: every argument of every function gets every bad value. What is data of the user's own function is left out:
there the function has its say.
"""

from collections.abc import Callable, Sequence
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


Call = tuple[Callable[..., Any], dict[str, Any], dict[str, Sequence[str]]]
USUAL = {
    **dict.fromkeys(("P", "P_x"), ("partition",)),
    **dict.fromkeys(("spec", "specs", "param_specs", "x_spec"), ("spec",)),  # one also for a whole tree
    "partition": ("None", "partition"),
    "fun": ("function",),
}
"""The values that arguments of these names accept, unless a call says others."""


def call(function: Callable[..., Any], spoiled: str, **arguments: Any) -> Call:
    """A function with good arguments, and those that are to be spoiled, each with the values that it accepts."""
    words = (word.partition("=") for word in spoiled.split())
    return function, arguments, {name: its.split(",") if its else USUAL.get(name, ()) for name, _, its in words}


def calls(P: dj.Partition) -> dict[str, Call]:
    C, C3 = P.grid([2]), P.grid([1, 1, 2])
    spec, x, key = dj.TensorSpec((4,), C), jnp.ones(2), jax.random.key(0)
    tree, specs, normal = {"w": x}, {"w": spec}, jax.nn.initializers.normal()
    line, points = jnp.ones((1, 1, 2)), jnp.ones((1, 2, 1))

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

    arrays, number = "matrix,integers,complex", "integer,float"
    derived = {"fun": square, "primals": (x,), "tangents": (x,), "partition": P}
    pulled = {"fun": square, "argnums": 0, "partition": P}
    halo = {"P_x": C, "halo": ((1, 1),), "periodic": (True,)}
    sample = {"mode": "bilinear", "padding_mode": "zeros", "max_displacement": 1.0}
    optim, limits = dj.optim, f"linesearch=None learning_rate=None,negative,function,{number}"
    return {
        "all_reduce": call(dj.all_reduce, f"P_x axes_reduce=None x={arrays} op", x=x, P_x=C, axes_reduce=0, op="sum"),
        "all_max": call(F.all_max, "P_x axes_reduce=None x=matrix,integers", x=x, P_x=C, axes_reduce=0),
        "init_block": call(dj.init_block, "key spec dtype=None", key=key, spec=spec, initializer=normal, dtype=float),
        "random.bernoulli": call(dj.random.bernoulli, "key spec", key=key, spec=spec, p=0.5),
        "random.uniform": call(dj.random.uniform, "key spec", key=key, spec=spec),
        "random.normal": call(dj.random.normal, "key spec", key=key, spec=spec),
        "replicated": call(dj.replicated, "P axes=None", tree=tree, P=C, axes=0),
        "zero_volume_tensor": call(dj.zero_volume_tensor, "batch_size=None,integer", batch_size=2),
        "zero_volume_tensor, like": call(dj.zero_volume_tensor, f"like=None,spec,{arrays}", like=x),
        "gather": call(dj.gather, "specs root", tree=tree, specs=specs, root=0),
        "specs_like": call(dj.specs_like, "param_specs", state={"m": tree}, params=tree, param_specs=specs),
        "jvp": call(dj.jvp, "fun primals tangents partition", **derived),
        "hvp": call(dj.hvp, "fun primals tangents argnums partition", **derived, argnums=0),
        "linear_transpose": call(transposed, "fun partition", fun=lambda x: 2 * x, partition=P),
        "jit": call(dj.jit, "fun=function,None", fun=square),
        "check": call(lambda fun: dj.check(fun, x), "fun", fun=square),
        "grad": call(of_x(dj.grad), "fun argnums partition", **pulled),
        "value_and_grad": call(of_x(dj.value_and_grad), "fun argnums partition", **pulled),
        "global_norm": call(optim.global_norm, "specs partition=None", tree=tree, specs=specs, partition=P),
        "clip_by_global_norm": call(
            stepped(optim.clip_by_global_norm),
            f"max_norm={number} specs partition=None",
            max_norm=1.0,
            specs=specs,
            partition=P,
        ),
        "adaptive_grad_clip": call(
            stepped(optim.adaptive_grad_clip),
            f"clipping={number} eps={number} axis=None specs",
            clipping=0.1,
            specs=specs,
            eps=1e-3,
            axis=0,
        ),
        "scale_by_trust_ratio": call(
            stepped(optim.scale_by_trust_ratio), f"specs min_norm={number}", specs=specs, min_norm=0.0
        ),
        "lbfgs": call(optim.lbfgs, f"memory_size=integer partition {limits}", specs=specs, memory_size=2, partition=P),
        "nn.HaloExchange": call(nn.HaloExchange, "P_x halo periodic", **halo),
        "halo_exchange": call(F.halo_exchange, "P_x halo periodic", x=x, **halo),
        "all_gather": call(F.all_gather, "P_x axes", x=x, P_x=C, axes=0),
        "all_to_all": call(swapped, "split_axis concat_axis", split_axis=0, concat_axis=1),
        "top_k": call(F.top_k, "P_x k=integer axis", x=x, P_x=C, k=1, axis=0),
        "argmax": call(F.argmax, "P_x axis", x=x, P_x=C, axis=0),
        "roll": call(F.roll, "P_x shift=integer,negative,tuple,integers axis", x=x, P_x=C, shift=1, axis=0),
        "window_partition": call(F.window_partition, "P_x window_size axes", x=x, P_x=C, window_size=1, axes=0),
        "pixel_shuffle": call(
            F.pixel_shuffle,
            "upscale_factor axes=None channel_axis",
            x=line,
            P_x=C3,
            upscale_factor=1,
            axes=2,
            channel_axis=1,
        ),
        "cumsum": call(F.cumsum, "P_x axis reverse=true", x=x, P_x=C, axis=0, reverse=False),
        "associative_scan": call(F.associative_scan, "P_x axis", f=jnp.add, x=x, P_x=C, axis=0),
        "grid_sample": call(
            F.grid_sample,
            f"grid mode padding_mode max_displacement=tuple,None,{number}",
            x=line,
            grid=points,
            P_x=C3,
            **sample,
        ),
        "mean": call(F.mean, "P_x axes=None", x=x, P_x=C, axes=0),
        "rfft": call(F.rfft, "P_x axes=None norm=None", x=x, P_x=C, axes=0),
        "checkpoint.save": call(saved, "step=integer", step=0),
        "DistributedPointwise": call(
            nn.DistributedPointwise, "P_x in_features=integer dim", P_x=C, in_features=3, dim=0, out_features=2
        ),
        "DistributedPReLU": call(
            nn.DistributedPReLU, f"num_parameters init=negative,{number}", P_x=C, num_parameters=1, init=0.1
        ),
        "Concatenate": call(nn.Concatenate, "axis", P_x=C, axis=0),
        "DistributedLayerNorm": call(
            nn.DistributedLayerNorm, f"normalized_shape=integer,tuple eps={number}", P_x=C, normalized_shape=4, eps=1e-5
        ),
        "Dropout": call(nn.Dropout, "p", P_x=C, p=0.5),
        "AdaptiveAvgPool": call(nn.DistributedAdaptiveAvgPool, "output_size=integer,None,tuple", P_x=C3, output_size=2),
        "DistributedPad": call(
            nn.DistributedPad, f"padding value=negative,true,{number}", P_x=C, padding=[(1, 1)], value=0.0
        ),
        "Upsample": call(nn.DistributedUpsample, f"scale_factor=tuple,{number}", P_x=C3, scale_factor=2.0),
        "DistributedHuberLoss": call(nn.DistributedHuberLoss, f"delta={number}", P_x=C, delta=1.0),
        "LossScale": call(
            optim.LossScale, f"initial={number} factor={number} period=integer", initial=2.0, factor=2.0, period=3
        ),
        "output_spec": call(nn.AllSumReduce(C, 0).output_spec, "x_spec", x_spec=spec),
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
                errors = {"InvalidArgumentError", "InvalidTypeError", "PlanError"}
                expected = {"accepted"} if bad in accepted else errors
                names = mine[0] == "accepted" or any(f"`{each}" in mine[1] for each in (argument, "tangents"))
                if len(kinds) > 1 or not kinds <= expected or not names:
                    wrong.append(f"{name}, {argument} = {bad}: {kinds}, {mine[1]}")
    assert not wrong, "\n".join(wrong)
