"""All private parts of mpi4jax that the library uses: nothing else imports `mpi4jax._src`.

As in `distdl_jax/jax_compat.py`, each function tells its purpose, and what would replace it; mpi4jax is imported when
one is called.
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
"""The beginning of mpi4jax's warning about an unknown jax."""


@cache
def import_mpi4jax() -> ModuleType:
    """mpi4jax, without its warning about a newer jax, if the library was tested with that jax.

    Private: the beginning of the warning. Replaced by: a release of mpi4jax that knows jax 0.12.
    """
    with warnings.catch_warnings():
        if jax.__version_info__ < FIRST_JAX_NOT_TRIED:
            warnings.filterwarnings("ignore", WARNING_OF_A_NEW_JAX)
        import mpi4jax

    return mpi4jax


@cache
def mpi_effect() -> Any:
    """Return the effect that orders the operations of mpi4jax; `jax.checkpoint` accepts it from then on.

    Private: `mpi4jax._src.utils.ordered_effect`, and `jax._src.effects.remat_allowed_effects`. Replaced by: a public
    name for the former, and a public registry of effects.
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

    Private: `mpi4jax._src.collective_ops.bcast.mpi_bcast_p`, its parameters `root` and `comm`, and its result, which is
    empty on the root. Replaced by: `mpi4jax.bcast`, if its result depended on the operation.
    """
    import_mpi4jax()
    from mpi4jax._src.collective_ops.bcast import mpi_bcast_p

    return mpi_bcast_p


@cache
def mpi_reduce() -> Primitive:
    """Return the primitive of `mpi4jax.reduce`, which returns the input on all but the root and drops the result there.

    Private: `mpi4jax._src.collective_ops.reduce.mpi_reduce_p`, its parameters `op`, `root` and `comm`, and its result,
    which is empty on all but the root. Replaced by: `mpi4jax.reduce`, if its result depended on the operation.
    """
    import_mpi4jax()
    from mpi4jax._src.collective_ops.reduce import mpi_reduce_p

    return mpi_reduce_p


def comm_handle(comm: Any) -> int:
    """Return the number that identifies a communicator in compiled programs.

    Private: `mpi4jax._src.utils.to_mpi_handle`. Replaced by: a public name in mpi4jax.
    """
    import_mpi4jax()
    from mpi4jax._src.utils import to_mpi_handle

    return int(to_mpi_handle(comm))


def as_parameter(mpi_object: Any) -> Any:
    """Return a communicator or an operation of mpi4py in the form that `mpi_bcast` and `mpi_reduce` take.

    Private: `mpi4jax._src.utils.wrap_as_hashable`. Replaced together with those primitives.
    """
    import_mpi4jax()
    from mpi4jax._src.utils import wrap_as_hashable

    return wrap_as_hashable(mpi_object)


def mpi_operation(eqn: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the parameters of an equation that is an mpi4jax operation; None for any other.

    Private: that mpi4jax's primitives are called `sendrecv_mpi` and so on, that their parameters are called `comm`,
    `dest`, `source`, `sendtag`, `recvtag`, `tag`, `root` and `op`, and that mpi4py's objects are `wrapped` in them.
    Replaced by: a public list of the primitives and their parameters.
    """
    name, ending = eqn.primitive.name, "_mpi"
    if not name.endswith(ending):
        return None
    return name.removesuffix(ending), {key: getattr(value, "wrapped", value) for key, value in eqn.params.items()}
