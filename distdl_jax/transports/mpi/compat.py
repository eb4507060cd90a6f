"""Every private part of mpi4jax that the library uses: nothing else imports `mpi4jax._src`.

As in `distdl_jax/jax_compat.py`, each function says what for, and what would replace it; mpi4jax is imported where one
is called.
"""

from __future__ import annotations

import warnings
from functools import cache
from types import ModuleType
from typing import Any

import jax
from jax.extend.core import Primitive

from distdl_jax.watchdog.launch.packages import FIRST_JAX_NOT_TRIED

WARNING_OF_A_NEW_JAX = r"\s*The latest supported JAX version with this release of mpi4jax"
"""How mpi4jax begins to warn of a jax that it does not know."""


@cache
def import_mpi4jax() -> ModuleType:
    """mpi4jax, without its warning of a jax that is newer than it knows, if the library was tested with that jax.

    Private: the beginning of the warning. A release of mpi4jax that knows jax 0.12 would replace it.
    """
    with warnings.catch_warnings():
        if jax.__version_info__ < FIRST_JAX_NOT_TRIED:
            warnings.filterwarnings("ignore", WARNING_OF_A_NEW_JAX)
        import mpi4jax

    return mpi4jax


@cache
def mpi_effect() -> Any:
    """Return the effect that orders the operations of mpi4jax; `jax.checkpoint` accepts it from then on.

    Private: `mpi4jax._src.utils.ordered_effect`, and `jax._src.effects.remat_allowed_effects`. A public name for the
    one, and a public registry of effects, would replace it.
    """
    import_mpi4jax()
    from jax._src.effects import remat_allowed_effects
    from mpi4jax._src.utils import ordered_effect

    remat_allowed_effects.add_type(type(ordered_effect))
    return ordered_effect


@cache
def mpi_bcast() -> Primitive:
    """Return the primitive of `mpi4jax.bcast`, which returns the root's input there and drops the operation's own
    result.

    Private: `mpi4jax._src.collective_ops.bcast.mpi_bcast_p`, its parameters `root` and `comm`, and its result, which
    is empty on the root. `mpi4jax.bcast` would replace it, if what it returns depended on the operation.
    """
    import_mpi4jax()
    from mpi4jax._src.collective_ops.bcast import mpi_bcast_p

    return mpi_bcast_p


@cache
def mpi_reduce() -> Primitive:
    """Return the primitive of `mpi4jax.reduce`, which returns the input on all but the root and drops the result there.

    Private: `mpi4jax._src.collective_ops.reduce.mpi_reduce_p`, its parameters `op`, `root` and `comm`, and its result,
    which is empty on all but the root. `mpi4jax.reduce` would replace it, if what it returns depended on the operation.
    """
    import_mpi4jax()
    from mpi4jax._src.collective_ops.reduce import mpi_reduce_p

    return mpi_reduce_p


def comm_handle(comm: Any) -> int:
    """Return the number by which compiled programs name a communicator.

    Private: `mpi4jax._src.utils.to_mpi_handle`. A name for it in mpi4jax's public part would replace it.
    """
    import_mpi4jax()
    from mpi4jax._src.utils import to_mpi_handle

    return int(to_mpi_handle(comm))


def as_parameter(mpi_object: Any) -> Any:
    """Return a communicator or an operation of mpi4py in the form that `mpi_bcast` and `mpi_reduce` take.

    Private: `mpi4jax._src.utils.wrap_as_hashable`. It goes where those primitives go.
    """
    import_mpi4jax()
    from mpi4jax._src.utils import wrap_as_hashable

    return wrap_as_hashable(mpi_object)


def mpi_operation(eqn: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the parameters of an equation that is an operation of mpi4jax; None for any other.

    Private: that mpi4jax's primitives are called `sendrecv_mpi` and so on, that their parameters are called `comm`,
    `dest`, `source`, `sendtag`, `recvtag`, `tag`, `root` and `op`, and that mpi4py's objects are `wrapped` in them. A
    public list of the primitives and their parameters would replace it.
    """
    name, ending = eqn.primitive.name, "_mpi"
    if not name.endswith(ending):
        return None
    return name.removesuffix(ending), {key: getattr(value, "wrapped", value) for key, value in eqn.params.items()}
