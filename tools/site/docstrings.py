"""How griffe reads the package: examples as code blocks, signatures and names as they are at run time."""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe

RECORD = Path(__file__).parents[2] / "tests" / "docs" / "public_names.json"
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1(?!>>> *$)\S.*|\n\1 +\S.*)*", re.MULTILINE)


def public_names() -> dict[str, str]:
    """Return the signature of each public name, methods left out, as tests/docs records them."""
    recorded: dict[str, str] = json.loads(RECORD.read_text())["signatures"]
    return {name: signature for name, signature in recorded.items() if name.rpartition(".")[0] not in recorded}


def with_code_blocks(docstring: str) -> str:
    """Return a docstring in whose Markdown the examples for doctest are code blocks; one that has these as it is."""
    if "```pycon" in docstring:
        return docstring
    return EXAMPLE.sub(lambda found: "{1}```pycon\n{0}\n{1}```".format(*found.group(0, 1)), docstring)


def parameters(signature: str) -> list[str]:
    """Return the names of the parameters of a recorded signature."""
    flat = re.sub(r"=(?:[^,()\[\]]|\([^()]*\)|\[[^\[\]]*\])*", "", signature)
    return [name.strip(" *") for name in flat.strip("()").split(",") if name.strip(" */")]


class RunTime(griffe.Extension):
    """Correct what can't be seen in the source alone."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Make code blocks of a docstring's examples."""
        if obj.docstring:
            obj.docstring.value = with_code_blocks(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Put in what a program makes: docstrings, functions from functions, fewer parameters than a base class has."""
        for name, signature in public_names().items():
            value = defined(pkg, name)
            if doc := inspect.getdoc(at_run_time(name)):
                value.docstring = griffe.Docstring(with_code_blocks(doc), parent=value)
            if value.is_attribute and isinstance(value.value, griffe.ExprCall):
                made = griffe.inspect(value.parent.path).members[value.name]
                made.parent = value.parent
                value.parent.members[value.name] = made
                public = pkg[name.rpartition(".")[0]]
                if public.members[value.name].is_alias:  # of the value as it was
                    public.members[value.name] = griffe.Alias(value.name, made, parent=public)
            if value.is_class:
                for extra in {each.name for each in value.parameters} - {"self", *parameters(signature)}:
                    del value.parameters[extra]  # a field of a base class that is a constant here
                for each in value.parameters:
                    if str(each.annotation).startswith("InitVar["):
                        each.annotation = each.annotation.slice


def at_run_time(name: str) -> Any:
    """Return a public name of the imported library."""
    module, _, last = f"distdl_jax.{name}".rpartition(".")
    return getattr(import_module(module), last)


def defined(package: griffe.Module, name: str) -> Any:
    """Return a public name where it is defined, also where a module has its name, or it is a second name."""
    module, _, last = name.rpartition(".")
    where = package[module] if module else package
    while True:
        if path := where.imports.get(last):
            module, _, last = path.rpartition(".")
            where = package.modules_collection[module]
        elif isinstance(second := getattr(where.members[last], "value", None), griffe.ExprName):
            last = second.name
        else:
            return where.members[last]
