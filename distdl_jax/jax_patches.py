"""Methods and rules of JAX that are replaced, from the first partition on, by equivalent ones without one mistake.

As in `jax_compat.py`, there is one function for each, whose docstring tells its purpose, the private names, and what
would replace it; `tests/compat/test_compat_*.py` run each of them. `dj.close()` puts JAX's own back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.interpreters import ad
from jax.interpreters import partial_eval as pe

from distdl_jax.errors import InvalidTypeError

_undo: list[Callable[[], None]] = []  # restores JAX's own parts
_patching = threading.Lock()  # workers of dj.simulate are threads


def install_jax_patches() -> None:
    """Replace methods and rules of JAX by equivalent ones without one mistake. Private: as the functions below."""
    with _patching:
        if _undo:
            return
        try:
            hand_tokens_back()
            give_tokens_to_compiled_functions()
            count_constants_among_residuals()
            let_loops_move_data()
        except BaseException:  # in an unknown release: all or nothing, also when it is tried again
            remove_jax_patches()
            raise


def remove_jax_patches() -> None:
    """Restore JAX's own parts. Private: as for `install_jax_patches`."""
    while _undo:
        _undo.pop()()


def _replace(put: Callable[[Any, Any], None], name: Any, own: Any, replacement: Any) -> None:
    _undo.append(partial(put, name, own))
    put(name, replacement)


def hand_tokens_back() -> None:
    """Have a program with ordered effects use the previous one's token unchanged.

    JAX puts it on the device again, which costs 55 us of Python. Private: a token's `_buf`, and
    `jax._src.dispatch.RuntimeTokenSet.get_token_input`. A faster `jax.device_put` would replace it.
    """
    from jax._src import core, dispatch

    own = dispatch.RuntimeTokenSet.get_token_input

    def get_token_input(self: Any, effect: Any, devices: Any) -> Any:
        token = self.current_tokens.get(effect)
        if len(devices) == 1 and isinstance(token, core.Token) and token._buf.devices() == {devices[0]}:
            with suppress(Exception):  # JAX's own way handles failed programs
                token.block_until_ready()
                return token
        return own(self, effect, devices)

    _replace(partial(setattr, dispatch.RuntimeTokenSet), "get_token_input", own, get_token_input)


def give_tokens_to_compiled_functions() -> None:
    """Have the result of `jax.jit(fun).lower(...).compile()` run more than once if it has ordered effects.

    From its second call on JAX omits the token, and the program refuses to run. Private: `create_cpp_call`, which may
    return None, and `unsafe_call` of `jax._src.interpreters.pxla.MeshExecutable`. A correct JAX would replace it.
    """
    from jax._src.interpreters.pxla import MeshExecutable

    without_tokens = MeshExecutable.create_cpp_call

    def create_cpp_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self.unsafe_call, "ordered_effects", None):
            return None
        return without_tokens(self, *args, **kwargs)

    _replace(partial(setattr, MeshExecutable), "create_cpp_call", without_tokens, create_cpp_call)


def count_constants_among_residuals() -> None:
    """Have a `jax.custom_vjp`'s backward function get its residuals, not other arrays.

    JAX identifies a residual that is an argument of the function by its position. When it splits a program into known
    and unknown parts (for instance in a second derivative through a scan), it prepends the function's constants to the
    arguments, without counting them, and likewise `checkify` the errors found before: the backward function gets these,
    and if shapes agree, gradients are silently wrong. Private: the `recipe` of what
    `jax._src.interpreters.partial_eval.JaxprTrace.process_custom_vjp_call` returns; `jax._src.checkify.error_checks`,
    and `Error`. A release of JAX without those mistakes (0.12.0 has them) would replace it.
    """
    from jax._src.checkify import Error, error_checks
    from jax._src.custom_derivatives import custom_vjp_call_p
    from jax._src.interpreters.partial_eval import JaxprTrace

    split, check = JaxprTrace.process_custom_vjp_call, error_checks[custom_vjp_call_p]

    # The last result of `out_trees` is the residuals' positions, here shifted by the prepended arguments.
    def behind(number: int, out_trees: Callable[[], Any]) -> Callable[[], Any]:
        def counted() -> Any:
            *trees, places = out_trees()
            return *trees, [None if place is None else place + number for place in places]

        return counted

    def process_custom_vjp_call(self: Any, *args: Any, out_trees: Callable[[], Any], **options: Any) -> Any:
        results = split(self, *args, out_trees=out_trees, **options)
        for result in results:  # those of one equation share its parameters
            params = getattr(getattr(result, "recipe", None), "params", {})
            if params.get("out_trees") is out_trees:  # if JAX counts constants itself, it is another function
                params["out_trees"] = behind(params["num_consts"], out_trees)
        return results

    def checked(*args: Any, out_trees: Callable[[], Any], **options: Any) -> Any:
        errors = len(jax.tree.leaves([arg for arg in args if isinstance(arg, Error)]))
        return check(*args, out_trees=behind(errors, out_trees), **options)

    _replace(partial(setattr, JaxprTrace), "process_custom_vjp_call", split, process_custom_vjp_call)
    _replace(error_checks.__setitem__, custom_vjp_call_p, check, checked)


def let_loops_move_data() -> None:
    """Have JAX transpose and checkpoint a `lax.while_loop` that moves data, if no derivative depends on it.

    JAX has no adjoint of a while loop, and needs none there: it drops the loop of the tangents. But it does not drop,
    and rejects, a loop whose operations have an effect, as messages do; and `jax.checkpoint` fails at an effect with a
    result in a loop. Private: two rules in the registries of `jax.interpreters`. JAX's own would replace them.
    """
    transposes, checkpoints = ad.primitive_transposes, pe.partial_eval_jaxpr_custom_rules
    refuse, without_effects = transposes[lax.while_p], checkpoints[lax.while_p]

    def transposed(cotangents: Sequence[Any], *args: Any, **params: Any) -> Any:
        if all(type(cotangent) is ad.Zero for cotangent in cotangents):
            return [ad.Zero(arg.aval) if ad.is_undefined_primal(arg) else None for arg in args]
        return refuse(cotangents, *args, **params)

    def checkpointed(saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any) -> Any:
        if not eqn.effects:
            return without_effects(saveable, unknown, instantiated, eqn)
        if any(unknown):
            raise InvalidTypeError(
                "In jax.checkpoint, a lax.while_loop that moves data must not be differentiated: apply "
                "jax.lax.stop_gradient to its inputs, or move the loop outside of jax.checkpoint."
            )
        # Like JAX's rule for single operations with effects: it runs once, and its results are saved.
        return eqn, None, [False] * len(eqn.outvars), [False] * len(eqn.outvars), []

    _replace(transposes.__setitem__, lax.while_p, refuse, transposed)
    _replace(checkpoints.__setitem__, lax.while_p, without_effects, checkpointed)
