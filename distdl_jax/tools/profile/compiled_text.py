"""A parser of compiled programs: the scopes of each instruction, and its communication."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import jax

from distdl_jax.watchdog.programs.ir import Operation

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_SCOPES = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_INNER = re.compile(r"(?:body|condition|to_apply|(?:true|false)_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TARGET = re.compile(r'custom_call_target="mpi_(\w+?)_ffi"')
_OPERANDS = re.compile(r"operand_layout_constraints=\{(.*?)\}, custom_call_has_side_effect")
_NUMBER = re.compile(r"(\w+) = (-?\d+) : i64")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")

_HOLD_OTHERS = ("while", "conditional", "call")


@dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program.

    - `computation`: the name of its computation; `inner`: those that it runs, instruction by instruction.
    - `scopes`: JAX's name scopes around it, with the primitive's name at the end.
    - `message`: for an mpi4jax operation, the numbers with which it was compiled, otherwise None; `kind`: its MPI name;
      `sent`, `received`: the bytes of its first operand and of its first result.
    """

    computation: str
    inner: tuple[str, ...] = ()
    scopes: str = ""
    kind: str = ""
    message: Mapping[str, int] | None = field(default=None, hash=False)
    sent: int = 0
    received: int = 0


def read_instructions(text: str) -> dict[str, Instruction]:
    """Return all instructions of a program, by name."""
    found, computation = {}, ""
    for line in text.splitlines():
        if (matched := _INSTRUCTION.match(line)) is not None:
            name, result, opcode, rest = matched.groups()
            scopes = named[1] if (named := _SCOPES.search(rest)) else ""
            inner = []
            if opcode in _HOLD_OTHERS:
                inner = _INNER.findall(rest)
                inner += [branch for names in _BRANCHES.findall(rest) for branch in re.findall(r"[\w.\-]+", names)]
            found[name] = Instruction(computation, tuple(inner), scopes)
            if opcode == "custom-call" and (target := _TARGET.search(rest)) is not None:
                operands = _OPERANDS.search(rest)
                numbers = {key: int(number) for key, number in _NUMBER.findall(rest)}
                sent, received = _bytes(operands[1] if operands else ""), _bytes(result)
                found[name] = Instruction(computation, (), scopes, target[1], numbers, sent, received)
        elif (header := _COMPUTATION.match(line)) is not None:
            computation = header[1]
    return found


def containers(instructions: Mapping[str, Instruction], seen: set[str]) -> set[str]:
    """Return the instructions whose time is that of other `seen` instructions: loops, branches and calls."""
    computations = {instructions[name].computation for name in seen if name in instructions}
    return {name for name in seen if name in instructions and computations.intersection(instructions[name].inner)}


def operation(instruction: Instruction, teams: Mapping[int, tuple[int, ...]], nobody: int) -> Operation | None:
    """Return the communication of an mpi4jax instruction; None if its team or its partners aren't known.

    - `teams`: the workers of each communicator, by its handle. `nobody`: the rank that stands for no worker.
    """
    numbers = instruction.message
    team = None if numbers is None else teams.get(numbers.get("comm", 0))
    if numbers is None or team is None:
        return None
    partners = [numbers.get(name, nobody) for name in ("dest", "source")]
    if any(rank != nobody and not 0 <= rank < len(team) for rank in partners):
        return None
    dest, source = (None if rank == nobody else team[rank] for rank in partners)
    return Operation(instruction.kind, team, dest, source, count=instruction.sent, dtype="bytes", itemsize=1)


def _bytes(shapes: str) -> int:
    """Return the bytes of the first array in a list of shapes."""
    first = _ARRAY.search(shapes)
    if first is None:
        return 0
    dtype, extents = first.groups()
    bits = int(re.findall(r"\d+", dtype)[0]) if dtype != "pred" else 8
    return math.prod(map(int, filter(None, extents.split(",")))) * max(bits // 8, 1)


def compiled_programs(names: set[str]) -> Iterator[dict[str, Instruction]]:
    """Yield the instructions of the compiled programs with these names in JAX, the newest first.

    `live_executables` is not documented; `jax.stages.Compiled.as_text` gives the same for one jitted function.
    """
    for executable in jax.devices()[0].client.live_executables():
        for module in executable.hlo_modules():
            if module.name in names:
                yield read_instructions(module.to_string())
