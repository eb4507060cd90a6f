"""Public names have whole docstrings: what they do, each argument, results and errors, and an example that runs."""

import inspect
import re
from typing import Any

import pytest
from test_public_names import public

# Users don't make these: the docstring lists their attributes. `nn.Layer` is a contract.
NOT_MADE_BY_USERS = {"data.Batches", "nn.Layer", "solvers.Info"}
# These take whatever they get.
NEVER_RAISE = {"ShapeDtype"}


PUBLIC = public()


def lacks(name: str, value: Any) -> list[str]:
    """Return what the docstring of a public name lacks."""
    doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    if not doc:
        return ["a docstring of its own"]
    if inspect.isclass(value) and issubclass(value, Exception):
        return []
    parameters = {} if name in NOT_MADE_BY_USERS else inspect.signature(value).parameters
    named = [parameter for parameter in parameters if not re.search(rf"`\**{parameter}\b", doc)]
    missing = [f"the argument `{parameter}`" for parameter in named]
    sections = {"Arguments": bool(parameters), "Raises": bool(parameters) and name not in NEVER_RAISE}
    if inspect.isfunction(value):
        sections["Returns"] = inspect.signature(value).return_annotation not in (None, "None")
    missing += [
        f"**{section}:**"
        for section, wanted in sections.items()
        if wanted and not re.search(rf"\*\*{section}[:,]", doc)
    ]
    return missing + ["an example"] * (">>> " not in doc)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_has_a_whole_docstring(name: str) -> None:
    assert lacks(name, PUBLIC[name]) == []
