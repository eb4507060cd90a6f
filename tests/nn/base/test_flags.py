"""What must be True or False: anything else is refused, by its name, wherever a layer or a function asks for it."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distdl_jax as dj
from distdl_jax import functional, nn
from distdl_jax.partitions.static import Static

ROOMS = (dj, nn, dj.optim, dj.data, dj.random)
CLASSES = {
    its.__name__: its
    for room in ROOMS
    for its in (getattr(room, name) for name in room.__all__)
    if inspect.isclass(its)
}
FLAGS = [
    pytest.param(cls, name, id=f"{cls.__name__}.{name}")
    for cls in CLASSES.values()
    if issubclass(cls, Static)
    for name, parameter in inspect.signature(cls).parameters.items()
    if parameter.annotation in ("bool", bool)
]

P = dj.planning_world(1).grid([1, 1])
P3 = P.grid([1, 1, 1])
X = jnp.ones((2, 3))
LINEAR = nn.DistributedLinear(P, P, P, 3, 3)


@pytest.mark.parametrize("bad", ["no", 2, None, 1.0, np.ones(1, bool)], ids=repr)
@pytest.mark.parametrize(("cls", "name"), FLAGS)
def test_a_layer_checks_its_flags_before_all_else(cls: type, name: str, bad: object) -> None:
    parameters = inspect.signature(cls).parameters.values()
    missing = {each.name: None for each in parameters if each.default is inspect.Parameter.empty}
    with pytest.raises(dj.InvalidTypeError, match=rf"`{name}` \(=.*\) must be True or False\."):
        cls(**{**missing, name: bad})


def test_all_classes_with_flags_are_among_these() -> None:
    found = {flag.values[0].__name__ for flag in FLAGS}
    assert {"DistributedMultiHeadAttention", "DistributedLayerNorm", "DistributedPoissonNLLLoss", "Dropout"} <= found
    assert len(FLAGS) > 20


def test_a_users_class_may_be_abstract_and_hand_its_arguments_on() -> None:
    class Block(nn.DistributedLinear, ABC):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)

        @abstractmethod
        def depth(self) -> int: ...

    class Own(Block):
        def depth(self) -> int:
            return 1

    with pytest.raises(TypeError, match="abstract"):
        Block(P, in_features=4, out_features=4)  # type: ignore[abstract]
    assert Own(P, P, P, 3, np.int64(3), bias=np.bool_(False)) == Own(P, P, P, 3, 3, bias=False)
    with pytest.raises(dj.InvalidTypeError, match=r"`bias` \(='no'\) must be True or False\."):
        Own(P, P, P, 3, 3, bias="no")


TRUE = [True, np.True_, 1, np.int8(1), np.array(True), jnp.array(True)]


def test_what_asks_for_a_flag_says_what_it_raises() -> None:
    """Layers, methods and functions: where they say what they raise at all."""
    classes = {name: cls for name, cls in CLASSES.items() if not issubclass(cls, Exception)}
    found = {f"{name}.{each}": its for name, cls in classes.items() for each, its in inspect.getmembers(cls)}
    found |= {name: getattr(room, name) for room in (*ROOMS, functional) for name in dir(room)}
    raises = {}
    for name, its in (classes | {name: its for name, its in found.items() if inspect.isfunction(its)}).items():
        _, *said = (its.__doc__ or "").split("**Raises:**")
        if said and any(each.annotation in ("bool", bool) for each in inspect.signature(its).parameters.values()):
            raises[name] = said[0].split("\n\n")[0]
    assert {"DistributedLinear", "Sequential.__call__", "broadcast", "grad"} <= raises.keys()
    assert not [name for name, said in raises.items() if "InvalidTypeError" not in said]


@pytest.mark.parametrize("flag", TRUE, ids=repr)
def test_what_is_true(flag: Any) -> None:
    for made, wanted in (
        (nn.DistributedLinear(P, P, P, 3, 3, bias=flag), LINEAR),
        (nn.DistributedLayerNorm(P, 3, bias=flag), nn.DistributedLayerNorm(P, 3)),
        (nn.DistributedLayerNorm(P, 3, 1e-5, flag), nn.DistributedLayerNorm(P, 3)),
    ):
        assert made == wanted and hash(made) == hash(wanted) and repr(made) == repr(wanted)


def test_a_layer_of_ones_own_is_checked_too() -> None:
    @dataclass(frozen=True)
    class Plain(Static):
        wide: bool = False

    @dataclass(frozen=True)
    class Inherits(Plain):
        deep: bool = False

        def __post_init__(self) -> None:
            raise AssertionError

    assert not Plain().wide
    for cls, name in ((Plain, "wide"), (Inherits, "wide"), (Inherits, "deep")):
        with pytest.raises(dj.InvalidTypeError, match=f"`{name}` "):
            cls(**{name: "no"})


KEY = jax.random.key(0)
ATTENTION, STATEFUL = nn.DistributedMultiHeadAttention(P3, 4, 2), nn.DistributedBatchNorm(P, 3)
IN_TRAINING: dict[str, Callable[..., Any]] = {
    "Dropout": partial(nn.Dropout(P), X, key=KEY),
    "BatchNorm": partial(STATEFUL, STATEFUL.init(KEY), X, state=STATEFUL.init_state()),
    "attention": partial(ATTENTION, ATTENTION.init(KEY), jnp.ones((1, 2, 4))),
    "Sequential": partial(nn.Sequential(jax.nn.relu), ({},), X),
    "Residual": partial(nn.Residual(nn.Sequential(jax.nn.relu)), {"body": ({},), "shortcut": {}}, X),
    "Remat": partial(nn.Remat(nn.Dropout(P)), {}, X, key=KEY),
}


@pytest.mark.parametrize("name", IN_TRAINING)
def test_training_is_true_or_false(name: str) -> None:
    call, wanted = IN_TRAINING[name], IN_TRAINING[name](training=True)
    for training in TRUE:
        jax.tree.map(np.testing.assert_array_equal, call(training=training), wanted)
    assert name != "Remat" or wanted.tolist() == IN_TRAINING["Dropout"](training=True).tolist()
    with pytest.raises(dj.InvalidTypeError, match=r"`training` \(='no'\) must be True or False\."):
        call(training="no")
    for traced in (True, 1):
        with pytest.raises(dj.InvalidTypeError, match=r"`training` .* but is traced; it must be known while tracing"):
            jax.jit(lambda training: call(training=training))(traced)


def square(x: Any) -> Any:
    return jnp.sum(x**2)


CALLS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "grad": ("has_aux", lambda flag: dj.grad(square, has_aux=flag)),
    "value_and_grad": ("has_aux", lambda flag: dj.value_and_grad(square, has_aux=flag)),
    "jvp": ("has_aux", lambda flag: dj.jvp(square, (X,), (X,), has_aux=flag)),
    "linearize": ("has_aux", lambda flag: dj.linearize(square, X, has_aux=flag)),
    "batches": ("drop_last", lambda flag: dj.data.batches(
        np.ones((4, 3)), dj.TensorSpec((2, 3), P), 2, drop_last=flag, prefetch=0)),
    "repartition": ("preserve_batch", lambda flag: functional.repartition(X, P, P, preserve_batch=flag)),
    **{
        f"{function.__name__}, {flag}": (flag, lambda its, f=function, flag=flag: f(X, P, P, **{flag: its}))
        for function in (functional.broadcast, functional.sum_reduce)
        for flag in ("preserve_batch", "transpose_src", "transpose_dest")
    },
    "broadcast partition": ("transpose_src", lambda flag: P.create_broadcast_partition_to(P, transpose_src=flag)),
    "reduction partition": ("transpose_dest", lambda flag: P.create_reduction_partition_to(P, transpose_dest=flag)),
    "subtopology": (r"remain_dims\[1\]", lambda flag: P.create_cartesian_subtopology_partition([True, flag])),
    "halo exchange": (r"periodic\[1\]", lambda flag: functional.halo_exchange(
        X, P, ((0, 0), (0, 0)), periodic=[False, flag])),
    "halo layer": (r"periodic\[0\]", lambda flag: nn.HaloExchange(P, ((0, 0), (0, 0)), periodic=[flag, 1])),
    "from_torch": ("state", lambda flag: dj.from_torch({}, nn.Sequential(jax.nn.relu), state=flag)),
    "lbfgs": ("scale_init_precond", lambda flag: dj.optim.lbfgs({}, scale_init_precond=flag)),
}  # fmt: skip


@pytest.mark.simulated(1)
@pytest.mark.parametrize("name", CALLS)
def test_a_flag_of_a_function(name: str) -> None:
    argument, call = CALLS[name]
    for each in TRUE if argument == r"remain_dims\[1\]" else (False, 0, np.array(False), jnp.array(False)):
        call(each) if argument != "has_aux" else None
    with pytest.raises(dj.InvalidTypeError, match=rf"`{argument}` \(='no'\) must be True or False\."):
        call("no")
