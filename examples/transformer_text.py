"""The text that the Python distribution carries: its language reference by topic, and its licence."""

import inspect
import os
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Text(NamedTuple):
    """Characters as numbers, and what the numbers stand for."""

    characters: np.ndarray
    alphabet: str

    def batch(self, step: int, n: int, length: int) -> np.ndarray:
        """n pieces of length + 1 characters from anywhere, the same ones for a step on every worker."""
        starts = np.random.default_rng(step).integers(0, len(self.characters) - length, n)
        return self.characters[starts[:, None] + np.arange(length + 1)]

    def encoded(self, text: str) -> np.ndarray:
        return np.array([self.alphabet.index(character) for character in text], np.int32)

    def decoded(self, characters: np.ndarray) -> str:
        return "".join(self.alphabet[number] for number in characters)


def documentation() -> Text:
    """Return the text of `help()` on the language (docstrings where that is not installed), and the licence."""
    try:
        from pydoc_data.topics import topics

        parts = [topics[name] for name in sorted(topics)]
    except ImportError:
        import builtins

        modules = (builtins, inspect, os, sysconfig)
        parts = [inspect.getdoc(its) or "" for module in modules for _, its in sorted(vars(module).items())]
    folder = Path(sysconfig.get_path("stdlib"))
    found = [path for path in (folder / "LICENSE.txt", folder.parent / "LICENSE.txt") if path.exists()]
    parts += [path.read_text() for path in found[:1]]
    text = "\n".join(parts)
    alphabet = "".join(sorted(set(text)))
    numbers = {character: number for number, character in enumerate(alphabet)}
    return Text(np.array([numbers[character] for character in text], np.int32), alphabet)
