"""All private parts of jax that the library uses: nothing else imports `jax._src`. Those of mpi4jax are in
`transports/mpi/compat.py`.

There is one function for each; its docstring tells its purpose, which private names it needs, and what would replace
them. `tests/compat/test_compat_*.py` run each of them, and fail with that docstring if a new version breaks it. Private
names are imported only on demand. Patches of JAX are in the second part.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache, lru_cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import jax
from jax import lax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad
from jax.interpreters import partial_eval as pe

from distdl_jax.errors import InvalidTypeError

_F = TypeVar("_F", bound=Callable[..., Any])


def source_frames(traceback: Any) -> Iterator[Any]:
    """Yield the frames of the origin of an equation in a traced program, the innermost first, without jax's frames.

    Each has a `file_name`, a `function_name` and a `start_line`. Private: `jax._src.source_info_util.user_frames`.
    `jax.extend.source_info_util.summarize` would replace it, if it gave frames instead of text.
    """
    from jax._src.source_info_util import user_frames

    return user_frames(traceback)


def hiding_frames(fun: _F) -> _F:
    """Return `fun`; its exceptions come without this library's frames, like a jitted function's without jax's.

    `jax_traceback_filtering` determines how, or whether they are shown. Private: `jax._src.traceback_util.api_boundary`
    and `register_exclusion`. Public ones would replace them; without them all frames are shown.
    """
    with suppress(ImportError, AttributeError):
        from jax._src import traceback_util

        _exclude_own_frames(traceback_util)
        fun = traceback_util.api_boundary(fun)
    return fun


@cache
def _exclude_own_frames(traceback_util: Any) -> None:
    traceback_util.register_exclusion(str(Path(__file__).parent))


def bound_again(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Return the results of a traced program's equation for `args`, as if its line of the user's program ran again.

    Private: `get_bind_params` of a primitive, and `at_line_of`. A `jax.extend` for interpreters would replace it.
    """
    given = eqn.primitive.get_bind_params(eqn.params)
    functions, params = given if isinstance(given, tuple) else ((), given)
    with at_line_of(eqn):
        results = eqn.primitive.bind(*functions, *args, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def without_dead_equations(closed: Any) -> Any:
    """Return a traced program without the equations that contribute to no result: their messages would be sent.

    Private: `jax._src.interpreters.partial_eval.dce_jaxpr`. A `jax.extend` for interpreters would replace it.
    """
    from jax._src.interpreters.partial_eval import dce_jaxpr

    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return closed.replace(jaxpr=jaxpr)


@contextmanager
def at_line_of(eqn: Any) -> Iterator[None]:
    """Trace inside with the source line, the scopes and the settings of a previously traced equation.

    Private: `jax._src.source_info_util.user_context` and `current_name_stack`, and an equation's `ctx`. A
    `jax.extend` for interpreters would replace it.
    """
    from jax._src.source_info_util import current_name_stack, user_context

    names = current_name_stack() + eqn.source_info.name_stack
    with user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        yield


def linearize_at_once(primitive: Primitive, tangent: Callable[..., Any]) -> None:
    """Have `jax.grad` differentiate a linear operation by `tangent`, which stores nothing of its arguments.

    JAX would trace the rule for `jax.jvp` each time and look for residuals: a tenth of the time to trace a network.
    `tangent` gives the result's tangent for the arguments' and the operation's parameters; `ad.Zero` stands for none.
    Private: `jax._src.interpreters.ad.primitive_linearizations`, and the result of a rule in it; with unknown releases
    JAX's own way remains. A public rule would replace it.
    """
    if not (0, 10) <= jax.__version_info__[:2] <= (0, 12):
        return
    from jax._src.interpreters import ad as private

    # A rule returns a result, whether it has a tangent, the residuals (twice, from jax 0.12 on), and a function.
    kept: Any = ([], None) if jax.__version_info__ >= (0, 12) else ([],)

    def linearized(is_vjp: bool, nonzero: Sequence[bool], *primals: Any, **params: Any) -> tuple[Any, ...]:
        y = primitive.bind(*primals, **params)
        avals = [jax.typeof(primal).to_tangent_aval() for primal in primals]
        varies = [there and aval.dtype != jax.dtypes.float0 for there, aval in zip(nonzero, avals, strict=True)]
        of_y = jax.typeof(y).to_tangent_aval()
        if not any(varies) or of_y.dtype == jax.dtypes.float0:
            return y, False, *kept, lambda *_: ad.Zero(of_y)

        def of_tangents(*args: Any) -> Any:
            tangents = zip(args[-len(avals) :], avals, varies, strict=True)
            return tangent(*(dx if there else ad.Zero(aval) for dx, aval, there in tangents), **params)

        return y, True, *kept, of_tangents

    private.primitive_linearizations[primitive] = linearized


def add_dependency(context: Any, x: Any, token: Any) -> Any:
    """Return, in a lowering for CPUs, the value `x`, which even in the compiled program is read only after `token`.

    Private: `jaxlib.mlir.dialects.mhlo.AddDependencyOp`; without it, and for `jax.export` (`for_export`), `x`
    unchanged: XLA may read it earlier, which is slower, but still correct. An operation of StableHLO would replace it.
    """
    with suppress(ImportError):
        from jaxlib.mlir.dialects.mhlo import AddDependencyOp

        if not context.module_context.lowering_parameters.for_export:
            return AddDependencyOp(x, token).result
    return x


def dispatched_by_this_thread() -> Callable[[], list[Any]]:
    """Return a function for other threads: the buffers, done or not, that show the progress of this thread's programs.

    Private: the attributes that `jax._src.dispatch.runtime_tokens` has in each thread, one for each ordered effect, and
    a token's `_buf`. A `jax.effects_barrier` that asks instead of waiting would replace it.
    """
    from jax._src.dispatch import runtime_tokens

    of_this_thread = vars(runtime_tokens)
    return lambda: [token._buf for token in list(of_this_thread["current_tokens"].values())]


def settings_of_this_thread() -> Callable[[], AbstractContextManager[None]]:
    """Return a context for other threads, with this thread's settings of JAX: inside `jax.enable_x64`, for instance.

    These are all of JAX's context managers for settings, and `jax.make_user_context`s; not meshes, which name devices.
    Private: `jax._src.config.config_states`, their `get_local`, and `config_ext.unset`; `UserConfig`, and
    `trace_context`, which grows with each of these. A copy of a thread's settings, like Python's
    `contextvars.copy_context`, would replace it.
    """
    from jax._src.config import config_ext, config_states, trace_context

    local = {
        state: state.get_local() for name, state in config_states.items() if name != "jax_thread_guard"
    }  # a thread's own
    given = [(state, value) for state, value in local.items() if value is not config_ext.unset]
    users = [(context, context.value) for context in _user_contexts(len(trace_context()))]
    given += [(context, value) for context, value in users if value is not context.get_global()]

    @contextmanager
    def settings() -> Iterator[None]:
        with ExitStack() as stack:
            for setting, value in given:
                stack.enter_context(setting(value))
            yield

    return settings


@lru_cache(maxsize=1)
def _user_contexts(number: int) -> list[Any]:
    from jax._src.config import UserConfig

    return [each for each in gc.get_referrers(UserConfig) if type(each) is UserConfig]  # there is no list of them


def wait_for_program(effect: Any) -> None:
    """Wait for this thread's last program with this ordered effect, and raise what it raised.

    Private: `jax._src.dispatch.runtime_tokens`. Used together with `set_last_program`.
    """
    from jax._src.dispatch import runtime_tokens

    if (token := runtime_tokens.current_tokens.get(effect)) is not None:
        token.block_until_ready()


def set_last_program(effect: Any, done: jax.Array) -> None:
    """Have a program count as this thread's last with this ordered effect; `done` is without elements, and its result.

    Private: `jax._src.dispatch.runtime_tokens`, and a `Token`. Ordered effects in JAX's C++ would replace it.
    """
    from jax._src import core, dispatch

    dispatch.runtime_tokens.current_tokens[effect] = core.Token(done)


def is_transformed() -> bool:
    """Return whether this thread traces, differentiates or maps: then its calls are part of something else.

    Private: `jax._src.core.trace_state_clean`. A public name for it would replace it.
    """
    from jax._src.core import trace_state_clean

    return not trace_state_clean()


def is_staged() -> bool:
    """Return whether this thread traces a program, of `jax.jit` or a loop: then its calls are not repeated later.

    Private: `jax._src.core.trace_ctx`, a trace's `parent_trace`, and `DynamicJaxprTrace`. A public name would do.
    """
    from jax._src.core import trace_ctx
    from jax._src.interpreters.partial_eval import DynamicJaxprTrace

    trace: Any = trace_ctx.trace
    while trace is not None and not isinstance(trace, DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def activity(innermost: FrameType) -> str | None:
    """Return "executing" or "compiling" if the thread with this innermost frame does that to a program; otherwise None.

    Private: the files and functions of jax that call XLA. Events of `jax.monitoring` at both starts would replace it.
    """
    file = innermost.f_code.co_filename
    if file.endswith("jax/_src/interpreters/pxla.py") and innermost.f_code.co_name == "__call__":
        return "executing"
    return "compiling" if file.endswith("jax/_src/compiler.py") else None


def name_and_params(eqn: Any) -> tuple[str, dict[str, Any]]:
    """Return the name and the parameters of an equation's operation.

    With the flags `jax_custom_vjp3` and `jax_remat3` functions with their own derivatives, and checkpoints, are objects
    in one operation: they get the names that they have without. Private: its parameter `_prim`, the names of two
    classes, and their `params`. A `jax.extend` for interpreters would replace it.
    """
    if (held := eqn.params.get("_prim")) is None:
        return eqn.primitive.name, eqn.params
    name = type(held).__name__
    return {"CustomVJPTraced": "custom_vjp_call", "RematTraced": "remat2"}.get(name, name), held.params


def expansion(eqn: Any) -> Any:
    """Return the program into which JAX expands an equation's operation before XLA sees it; None for a primitive.

    Private: the parameter `_prim`, and `to_lojax` of the primitive. A `jax.extend` for interpreters would replace it.
    """
    if "_prim" not in eqn.params:
        return None
    return jax.make_jaxpr(partial(eqn.primitive.to_lojax, **eqn.params))(*(var.aval for var in eqn.invars))


def constant_arguments(eqn: Any) -> int:
    """Return how many first arguments of a function with its own derivative are constants, not differentiated.

    Private: its parameter `num_consts`, 0 if it is missing; of an object that an operation holds, `in_avals`: its first
    two are trees of constants. A `jax.extend` for interpreters would replace it.
    """
    held = eqn.params.get("_prim")
    return eqn.params.get("num_consts", 0) if held is None else len(jax.tree.leaves(held.in_avals[:2]))


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Return how many constants a `scan` of a traced program has, and how many values it carries: its first arguments.

    Private: its parameters, with jax 0.12 `ft_in`, a tree. A `jax.extend` for interpreters would replace it.
    """
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    constants, carried, _ = eqn.params["ft_in"].unpack()
    return len(constants), len(carried)


def mapped_sizes(x: Any) -> tuple[int, ...]:
    """Return the sizes of the `jax.vmap` transformations around `x`, the innermost first.

    Private: `jax._src.interpreters.batching.BatchTracer`, its `val` and `batch_dim`, and `primal` of others.
    A rule of `custom_vmap` that is called each time, whatever jitted function it is in, would replace it.
    """
    from jax._src.interpreters.batching import BatchTracer

    sizes = []
    while isinstance(x, Tracer):
        if isinstance(x, BatchTracer) and isinstance(x.batch_dim, int):
            sizes.append(x.val.shape[x.batch_dim])
        x = x.val if isinstance(x, BatchTracer) else getattr(x, "primal", None)
    return tuple(sizes)


def found_not_finite() -> tuple[str, str] | None:
    """Return the program in whose result JAX has found "nan" or "inf", while it locates the place in its function.

    Private: `jax._src.api_util.InternalFloatingPointError`. `jax_debug_nans` that raises at once would replace it.
    """
    error = sys.exc_info()[1]
    while error is not None:
        if type(error).__name__ == "InternalFloatingPointError":
            program, what = error.args
            return str(program), str(what)
        error = error.__context__
    return None


def check_for_nans_again() -> None:
    """Have `jax_debug_nans` check this thread's results, which it stops doing once JAX has lowered a `custom_vmap`.

    Private: `jax._src.api._post_hook_state`, `jax._src.config`. JAX's own `jaxpr_as_fun` would have to put it back.
    """
    from jax._src import api, config

    unset = config.config_ext.unset
    if config.debug_nans.get_local() is unset and config.debug_infs.get_local() is unset:
        api._post_hook_state.set_local(unset)


def ordered_effect(name: str) -> Any:
    """Return a new effect, whose operations run in program order, including in loops and under `jax.checkpoint`.

    Private: `jax._src.effects`: `Effect`, and the sets of accepted types. A public registry would replace it.
    """
    from jax._src import effects

    kind = type("OrderedEffect", (effects.Effect,), {"__str__": lambda self: name})
    for accepted in ("ordered", "lowerable", "control_flow_allowed", "custom_derivatives_allowed", "remat_allowed"):
        getattr(effects, f"{accepted}_effects").add_type(kind)
    return kind()


# Patches of JAX.
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
