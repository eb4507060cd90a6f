"""The wrapper of every layer call: argument checks, and tracebacks without the library's frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

import jax

from distdl_jax.errors import InvalidTypeError
from distdl_jax.jax_compat import hiding_frames
from distdl_jax.tracing.marks import refuse_forward_mode, tied_to_params
from distdl_jax.transports.agreement import is_array, structure_text

Call = TypeVar("Call", bound=Callable[..., Any])


def layer_call(call: Call) -> Call:
    """Decorate a layer's `__call__`: accept x alone if there are no parameters.

    It raises if parameters are missing, or come after x. Tracebacks of its errors omit frames of the library.
    """

    @wraps(call)
    def completed(self: Any, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and not {"params", "x"} & options.keys():
            nothing = self.param_specs()  # a tree without leaves, so the parameters have none either
            if jax.tree.leaves(nothing):
                raise InvalidTypeError(
                    f"{type(self).__name__} has parameters: call it with them and the input, `layer(params, x)`; "
                    "`layer.init(key)` makes them."
                )
            args = (nothing, *args)
        if len(args) > 1 and is_array(args[0]) and isinstance(args[1], Mapping | tuple):
            raise InvalidTypeError(
                f"`params` is {structure_text(args[0])}, and `x` is {structure_text(args[1])}: call "
                f"{type(self).__name__} with the parameters first, `layer(params, x)`."
            )
        try:
            y = call(self, *args, **options)
        except TypeError as error:
            refuse_forward_mode(error)
            raise
        return tied_to_params(y, args[0] if args else options.get("params"))

    return cast(Call, hiding_frames(completed))
