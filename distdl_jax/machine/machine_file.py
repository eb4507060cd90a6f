"""Machine files: TOML with a unit for each number and a source for each table."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, NoReturn

from distdl_jax.errors import InvalidArgumentError
from distdl_jax.machine import file_lines, quantities
from distdl_jax.machine.collectives import KINDS, is_ascending
from distdl_jax.machine.tables import LEVELS, SOURCES, TABLES, Level, Table

VERSION = 1
"""Of the form of machine files; a file of another one is refused."""

HEADINGS = ("name", "about", "mpi", "measured_on")
"""Texts at the top of a file."""


@dataclass(frozen=True)
class _Reader:
    """Reads the entries of one file; every refusal names the file and the line."""

    file: str
    text: str

    def refuse(self, path: file_lines.Path, sentence: str) -> NoReturn:
        where = f"{self.file}, line {file_lines.line_of(self.text, path)}"
        raise InvalidArgumentError(f"{where}: {sentence}")

    def table(self, of: type, values: Any, path: file_lines.Path) -> Any:
        """Return the table, or row, of class `of`."""
        name = _name(path)
        if not isinstance(values, Mapping):
            self.refuse(path, f"`{name}` (={values!r}) must be a table.")
        known = {each.name: each for each in fields(of)}
        self.no_others(values, tuple(known), path)
        found = {}
        for key, each in known.items():
            if key in values:
                found[key] = self.entry(each, values[key], (*path, key))
            elif each.default is MISSING:
                self.refuse(path, f"`{name}` has no `{key}`, which is missing.")
        return of(**found)

    def no_others(self, values: Mapping[str, Any], known: tuple[str, ...], path: file_lines.Path) -> None:
        """Refuse a key that is none of the known ones."""
        for key in values:
            if key not in known:
                where = f"`{_name(path)}`" if path else "a machine file"
                self.refuse((*path, key), f"{where} has no entry `{key}`; entries are {', '.join(known)}.")

    def entry(self, each: Field[Any], value: Any, path: file_lines.Path) -> Any:
        """Return the value of one entry."""
        given = f"`{_name(path)}` (={value!r})"
        if (row := each.metadata.get("rows")) is not None:
            if not isinstance(value, list):
                self.refuse(path, f"{given} must be a list of tables.")
            return tuple(self.table(row, one, (*path, place)) for place, one in enumerate(value))
        match each.metadata.get("quantity"), value:
            case "count", int() if value > 0 and not isinstance(value, bool):
                return value
            case "count", _:
                self.refuse(path, f"{given} must be a whole number, 1 or more.")
            case "counts", list() if value and all(type(n) is int and n > 0 for n in value):
                return tuple(value)
            case "counts", _:
                self.refuse(path, f"{given} must be a list of whole numbers, each 1 or more.")
            case "text", str():
                return value
            case "text", _:
                self.refuse(path, f"{given} must be a text.")
            case None, _:
                return self.origin(each.name, value, path)
            case quantity, _:
                try:
                    return quantities.parse(value, str(quantity))
                except ValueError as error:
                    self.refuse(path, f"{given} {error}.")

    def origin(self, name: str, value: Any, path: file_lines.Path) -> Any:
        """Return the source of a table's numbers, or the names of those that are guesses."""
        given = f"`{_name(path)}` (={value!r})"
        if name == "guesses":
            if not isinstance(value, list) or not all(isinstance(key, str) for key in value):
                self.refuse(path, f"{given} must be a list of names of entries.")
            return tuple(value)
        if not isinstance(value, str) or not value.startswith(SOURCES):
            self.refuse(path, f"{given} must be a text that begins with one of {', '.join(SOURCES)}.")
        return value


def _name(path: file_lines.Path) -> str:
    return ".".join(map(str, path))


def read(text: str, file: str) -> dict[str, Any]:
    """Return the fields of the `Machine` that a file describes.

    **Raises:** `InvalidArgumentError` with file and line where something is missing, unknown, or in another unit.
    """
    reader = _Reader(file, text)
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgumentError(f"{file} is no TOML: {error}.") from None
    if (version := values.pop("version", None)) != VERSION:
        reader.refuse(("version",), f"`version` (={version!r}) must be {VERSION}; measure the machine anew.")
    reader.no_others(values, (*HEADINGS, "levels", *TABLES), ())
    for key in (*HEADINGS, "levels", *TABLES):
        if key not in values:
            reader.refuse((), f"a machine file has an entry `{key}`, which is missing.")
        if key in HEADINGS and not isinstance(values[key], str):
            reader.refuse((key,), f"`{key}` (={values[key]!r}) must be a text.")
    found = {key: values[key] for key in HEADINGS}
    found |= {key: reader.table(of, values[key], (key,)) for key, of in TABLES.items()}
    found["levels"] = _levels(reader, values["levels"])
    for key, table in [*found.items(), *((f"levels.{name}", level) for name, level in found["levels"].items())]:
        if isinstance(table, Table):
            _check_table(reader, key, table)
    return found


def _levels(reader: _Reader, values: Any) -> dict[str, Level]:
    if not isinstance(values, dict):
        reader.refuse(("levels",), f"`levels` (={values!r}) must be a table.")
    reader.no_others(values, LEVELS, ("levels",))
    if "host" not in values:
        reader.refuse(("levels",), "`levels` has no `host`, which is missing.")
    found = {name: reader.table(Level, values[name], ("levels", name)) for name in LEVELS if name in values}
    for name, level in found.items():
        sizes = [segment.up_to for segment in level.segments]
        if not sizes or sizes[-1] != float("inf") or not is_ascending(sizes):
            path: file_lines.Path = ("levels", name, "segments")
            reader.refuse(path, f"`{_name(path)}` must have ascending sizes `up_to`, and the last one none.")
    return found


def _check_table(reader: _Reader, name: str, table: Table) -> None:
    path = tuple(name.split(".", 1))
    known = {each.name: each for each in fields(table) if each.name not in ("source", "guesses")}
    if unknown := [guess for guess in table.guesses if guess not in known]:
        reader.refuse((*path, "guesses"), f"`{name}.guesses` names {unknown[0]!r}, which is no entry of `{name}`.")
    for place, point in enumerate(getattr(table, "points", ())):
        if name == "collectives" and point.kind not in KINDS:
            here: file_lines.Path = (*path, "points", place)
            reader.refuse(here, f"`kind` (={point.kind!r}) must be one of {', '.join(KINDS)}.")
    for key in sorted(known):
        if (value := getattr(table, key)) == 0 and known[key].default != 0 and key != "noise":
            reader.refuse((*path, key), f"`{name}.{key}` (={value!r}) must be above 0.")


def written(machine: Any) -> str:
    """Return the text of a `Machine`'s file."""
    lines = [f"version = {VERSION}"]
    lines += [f"{key} = {_text(getattr(machine, key))}" for key in HEADINGS]
    for name in TABLES:
        lines += ["", f"[{name}]", *_entries(getattr(machine, name))]
    for name, level in machine.levels.items():
        lines += ["", f'[levels."{name}"]', *_entries(level)]
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    return f'"{escaped}"'


def _entries(table: Any) -> list[str]:
    lines = []
    for each in fields(table):
        value = getattr(table, each.name)
        if each.default is not MISSING and value == each.default:
            continue
        if "rows" in each.metadata:
            lines += [f"{each.name} = [", *(f"  {{ {', '.join(_entries(row))} }}," for row in value), "]"]
        else:
            lines.append(f"{each.name} = {_value(each, value)}")
    return lines


def _value(each: Field[Any], value: Any) -> str:
    match each.metadata.get("quantity"), value:
        case ((None | "text"), str()):
            return _text(value)
        case ((None | "counts"), _):
            return f"[{', '.join(_text(one) if isinstance(one, str) else str(one) for one in value)}]"
        case "count", _:
            return str(value)
        case quantity, _:
            return _text(quantities.write(value, str(quantity)))
