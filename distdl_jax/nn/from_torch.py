"""Conversion of PyTorch's parameters: names and layouts of its modules' `state_dict`, layer by layer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distdl_jax.errors import InvalidArgumentError, InvalidTypeError
from distdl_jax.nn.attention.attention import DistributedMultiHeadAttention
from distdl_jax.nn.base.layer import Layer, keeps_state
from distdl_jax.nn.dense.pointwise import DistributedPointwise
from distdl_jax.nn.networks.network import Network
from distdl_jax.nn.networks.remat_precision import Wrapper
from distdl_jax.nn.norm.weight_norms import SpectralNorm, WeightNorm
from distdl_jax.nn.recurrent.cells import RecurrentCell
from distdl_jax.nn.recurrent.over_time import OverTime
from distdl_jax.partitions.tensors import TensorSpec, device_array
from distdl_jax.plans.shape_dtype import shape_text
from distdl_jax.validation import checked_boolean

Arrays = dict[str, np.ndarray]

# A module's own names, which follow the module's name and a dot.
_OWN = re.compile(
    r"^(?:(.*?)\.)??((?:in|q|k|v)_proj_(?:weight|bias)|(?:out|q|k|v|o)_proj\.(?:weight|bias)|"
    r"(?:weight|bias)_(?:ih|hh)(?:_l\d+)?|weight|bias|"
    r"weight(?:_[ih]h(?:_l\d+)?)?_(?:g|v|u|orig)|parametrizations\.\w+\.(?:original[01]?|0\._[uv])|"
    r"running_mean|running_var|num_batches_tracked)$"
)


def from_torch(state_dict: Mapping[str, Any], layer: Any, *, state: bool = False) -> Any:
    """Return a layer's parameters, from the `state_dict` of the corresponding PyTorch module.

    Layouts and names are changed where they differ (attention, gates); see `docs/from-torch.md`. A `Sequential` takes
    the modules of a `state_dict` in order, one for each of its layers with parameters or a state; plain functions,
    pools and movements have none in PyTorch either, so the numbers in names may differ. A dictionary of layers takes
    the entries below each name.

    Modules whose names below a prefix are all decimal numbers, as in PyTorch's Sequential and ModuleList, are in the
    order of the numbers, others in the order of the `state_dict`. A safetensors file does not keep that order: its
    names are sorted as text. So if modules have other names, pass a dictionary of layers.

    **Arguments:**

    - `state_dict`: names and whole arrays, the same on every worker: `{name: tensor.numpy() for name, tensor in
      module.state_dict().items()}`, in that order except for numbers.
    - `layer`: a layer, a `Sequential`, a `Remat` or `Precision` of one, or a dictionary of these.
    - `state`: whether to return running statistics, too.

    **Returns:** this worker's blocks of the parameters, like `layer.init`, in the arrays' dtypes (as JAX has them);
    with `state`, the pair of these and the state, like `layer.init_state`.

    **Raises:** `InvalidArgumentError`, on every worker, if a name is missing or superfluous, or an array does not have
    the shape of the parameter; `InvalidTypeError` if `layer` is not a layer, or an entry not an array of numbers.

    >>> import distdl_jax as dj, numpy as np
    >>> P = dj.Partition().grid([1, 1])
    >>> network = dj.nn.Sequential(jax.nn.relu, dj.nn.DistributedLinear(P, P, P, 3, 2))
    >>> params = from_torch({"1.weight": np.ones((2, 3)), "1.bias": np.zeros(2)}, network)
    >>> params[1]["weight"].shape
    (2, 3)
    """
    state = checked_boolean("state", state)
    if not isinstance(state_dict, Mapping) or not all(isinstance(name, str) for name in state_dict):
        raise InvalidTypeError(
            f"`state_dict` (={state_dict!r}) must be a dictionary of arrays by name, as a PyTorch module's."
        )
    params, states = _params_and_state(state_dict, layer, "")
    return (params, states) if state else params


def _params_and_state(state_dict: Mapping[str, Any], layer: Any, prefix: str) -> tuple[Any, Any]:
    """Return both, from the entries below `prefix`, which has been removed from their names."""
    if isinstance(layer, Mapping):
        below = {name: _below(state_dict, name) for name in layer}
        left = [name for name in state_dict if not any(name.startswith(f"{each}.") for each in layer)]
        _check_none_left([prefix + name for name in left])
        pairs = {name: _params_and_state(below[name], each, f"{prefix}{name}.") for name, each in layer.items()}
        params, states = ({name: pair[k] for name, pair in pairs.items()} for k in (0, 1))
        return params, states
    modules = _modules(state_dict, prefix)
    params, states = _taken(layer, modules)
    _check_none_left([f"{module}.{name}".strip(".") for module, arrays in modules.left for name in arrays])
    return params, states


def _below(state_dict: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {full.removeprefix(f"{name}."): x for full, x in state_dict.items() if full.startswith(f"{name}.")}


def _check_none_left(names: list[str]) -> None:
    if names:
        raise InvalidArgumentError(f"`state_dict` holds {names[0]!r}, for which `layer` has no place.")


@dataclass
class _Modules:
    """The remaining modules, with their names; and the place of the next one, as the end of a sentence."""

    left: list[tuple[str, Arrays]]
    where: str

    def take(self, layer: Layer, names: Sequence[str]) -> tuple[str, Arrays]:
        """Return the next module, for a layer with parameters of these names."""
        if not self.left:
            raise InvalidArgumentError(
                f"`state_dict` must hold {names[0]!r} of a module{self.where}, for {layer!r}, but does not."
            )
        module, arrays = self.left.pop(0)
        self.where = f" after {module!r}" if module else " after that without a name"
        return module, arrays


def _modules(state_dict: Mapping[str, Any], prefix: str) -> _Modules:
    """Return the modules of a `state_dict` in order, with `prefix` before their names."""
    found: dict[str, Arrays] = {}
    for name, x in state_dict.items():
        match = _OWN.match(name)
        if match is None:
            raise InvalidArgumentError(
                f"`state_dict` holds {prefix + name!r}, which is not a parameter of any layer here."
            )
        found.setdefault(match[1] or "", {})[match[2]] = _array(prefix + name, x)
    ordered = _in_order([tuple(module.split(".")) if module else () for module in found])
    named = [((prefix + module).strip("."), found[module]) for module in map(".".join, ordered)]
    return _Modules(named, f" at {prefix.strip('.')!r}, or below it" if prefix else "")


def _array(name: str, x: Any) -> np.ndarray:
    try:
        array = np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor of a dtype unknown to numpy, or with a gradient
        raise InvalidTypeError(f"`state_dict[{name!r}]` must be an array of numbers: {error}") from None
    if not (jnp.issubdtype(array.dtype, jnp.number) or jnp.issubdtype(array.dtype, jnp.bool_)):
        raise InvalidTypeError(f"`state_dict[{name!r}]` must be an array of numbers, but has the dtype {array.dtype}.")
    return array


def _in_order(modules: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Sort the names of modules, grouped by prefix: by number if all are numbers, otherwise as given.

    >>> _in_order([("a", "0"), ("a", "10"), ("a", "2"), ("1",)])
    [('a', '0'), ('a', '2'), ('a', '10'), ('1',)]
    """
    below: dict[str, list[tuple[str, ...]]] = {}
    for first, *rest in filter(None, modules):
        below.setdefault(first, []).append(tuple(rest))
    names = [*below]
    if all(name.isascii() and name.isdecimal() for name in names):
        names.sort(key=int)
    own = [module for module in modules if not module]
    return own + [(name, *rest) for name in names for rest in _in_order(below[name])]


def _taken(layer: Any, modules: _Modules) -> tuple[Any, Any]:
    """Take the parameters and the state of a layer from the next of the modules."""
    if isinstance(layer, Network):
        pairs = [_taken(part, modules) if isinstance(part, Layer) else ({}, {}) for _, part in layer._parts]
        return layer._pack(params for params, _ in pairs), layer._pack(state for _, state in pairs)
    if isinstance(layer, Wrapper) and not isinstance(layer, WeightNorm | SpectralNorm):
        return _taken(layer.layer, modules)
    if not isinstance(layer, Layer):
        raise InvalidTypeError(f"`layer` (={layer!r}) must be a layer, or a dictionary of layers.")
    of_params, of_state = layer.param_specs(), layer.state_specs() if keeps_state(layer) else {}
    if not jax.tree.leaves((of_params, of_state)):
        return {}, {}
    names = [*of_params, *of_state]
    module, arrays = modules.take(layer, names)
    arrays = _changed(layer, module, arrays)
    _check_none_left([f"{module}.{name}".strip(".") for name in arrays if name not in names])
    cut = {name: _block(layer, module, name, spec, arrays) for name, spec in {**of_params, **of_state}.items()}
    return {name: cut[name] for name in of_params}, {name: cut[name] for name in of_state}


def _block(layer: Any, module: str, name: str, spec: TensorSpec, arrays: Arrays) -> jax.Array:
    """Return this worker's block of an array."""
    whole = f"{module}.{name}".strip(".")
    if name not in arrays:
        raise InvalidArgumentError(f"`state_dict` must hold {whole!r}, for {layer!r}, but does not.")
    x = arrays[name]
    if x.shape != spec.global_shape:
        raise InvalidArgumentError(
            f"`state_dict[{whole!r}]` must be {shape_text(spec.global_shape)}, for {layer!r}, but is "
            f"{shape_text(x.shape)}."
        )
    return device_array(x[:0].reshape(0) if spec.box is None else x[tuple(slice(*side) for side in spec.box)])


def _changed(layer: Any, module: str, arrays: Arrays) -> Arrays:
    """Return a module's arrays under the layer's names, and in its layouts."""
    for kind, changed in _CHANGED.items():
        arrays = changed(layer, module, arrays) if isinstance(layer, kind) else arrays
    return arrays


def _of_attention(layer: DistributedMultiHeadAttention, module: str, arrays: Arrays) -> Arrays:
    """Convert PyTorch's rows of queries, keys and values, head by head, or three matrices; keep all others."""
    e, h = layer.embed_dim, layer.num_heads
    groups, d = layer.num_key_heads or h, e // h
    changed: Arrays = {}
    left = dict(arrays)

    def taken(*names: str) -> np.ndarray | None:
        return next((left.pop(name) for name in names if name in left), None)

    for kind, rest in (("weight", (e,)), ("bias", ())):
        if kind == "bias" and not layer.bias:
            continue
        # PyTorch has one matrix of all rows, or three; Hugging Face has three with names of their own.
        packed = taken(f"in_proj_{kind}")
        if packed is not None:
            parts = dict(zip("qkv", np.split(packed, [h * d, (h + groups) * d]), strict=True))
        else:
            found = {letter: taken(f"{letter}_proj.{kind}", f"{letter}_proj_{kind}") for letter in "qkv"}
            parts = {letter: rows for letter, rows in found.items() if rows is not None}
        if len(parts) == 3:
            heads = {letter: _reshaped(module, rows, (-1, d, *rest)) for letter, rows in parts.items()}
            suffix = "" if kind == "weight" else "_bias"
            # A fused weight holds, for each group, its queries and then its key and value: a cut by groups keeps them
            # together.
            if layer.fused:
                in_groups = [_reshaped(module, rows, (groups, -1, d, *rest)) for rows in heads.values()]
                changed[f"qkv{suffix}"] = np.concatenate(in_groups, 1)
            else:
                names_of = {"q": "query", "k": "key", "v": "value"}
                changed |= {f"{names_of[letter]}{suffix}": rows for letter, rows in heads.items()}
        if (out := taken(f"out_proj.{kind}", f"o_proj.{kind}")) is not None:
            changed["out" if kind == "weight" else "out_bias"] = (
                _reshaped(module, out, (e, h, d)) if kind == "weight" else out
            )
    return left | changed


def _reshaped(module: str, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    try:
        return x.reshape(shape)
    except ValueError:
        raise InvalidArgumentError(
            f"`state_dict` holds an array of {shape_text(x.shape)} for the attention {module!r}, which can't become "
            f"{shape_text(shape)}."
        ) from None


def _of_recurrent(layer: RecurrentCell | OverTime, module: str, arrays: Arrays) -> Arrays:
    """Convert PyTorch's rows of gates, gate by gate, to gates x rows."""
    gates = (layer.kind if isinstance(layer, OverTime) else layer).gates
    return {name: x.reshape(gates, -1, *x.shape[1:]) if len(x) % gates == 0 else x for name, x in arrays.items()}


def _of_pointwise(layer: DistributedPointwise, module: str, arrays: Arrays) -> Arrays:
    """Convert the weight of a convolution with a kernel of 1, n_out x n_in x 1 x ... x 1; keep a linear layer's."""
    weight = arrays.get("weight")
    if weight is None or weight.ndim < 3 or weight.shape[2:] != (1,) * (weight.ndim - 2):
        return arrays
    return arrays | {"weight": weight.reshape(weight.shape[:2])}


def _of_normalized(layer: WeightNorm | SpectralNorm, module: str, arrays: Arrays) -> Arrays:
    """Convert PyTorch's names of a normalised weight, old and new, and the dimensions of lengths and vectors."""
    name, own = layer.name, f"parametrizations.{layer.name}."
    if isinstance(layer, WeightNorm):
        names, vectors = {f"{own}original0": f"{name}_g", f"{own}original1": f"{name}_v"}, [f"{name}_g"]
    else:
        names = {f"{name}_orig": name, f"{own}original": name, f"{own}0._u": f"{name}_u", f"{own}0._v": f"{name}_v"}
        vectors = [f"{name}_u", f"{name}_v"]
    arrays = _changed(layer.layer, module, {names.get(known, known): x for known, x in arrays.items()})
    specs = layer.param_specs() | (layer.state_specs() if keeps_state(layer) else {})
    for vector in vectors:
        shape, x = specs[vector].global_shape, arrays.get(vector)
        if x is not None and x.size == math.prod(shape):
            arrays[vector] = x.reshape(shape)
    return arrays


_CHANGED: dict[type, Callable[[Any, str, Arrays], Arrays]] = {
    DistributedMultiHeadAttention: _of_attention,
    DistributedPointwise: _of_pointwise,
    OverTime: _of_recurrent,
    RecurrentCell: _of_recurrent,
    SpectralNorm: _of_normalized,
    WeightNorm: _of_normalized,
}
