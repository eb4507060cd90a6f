"""A name of the version before raises a sentence that says what to write instead."""

import re
import subprocess
import sys

import pytest

import distdl_jax as dj
from distdl_jax import nn


def test_a_removed_function_says_what_to_write() -> None:
    for name, sentence in dj._REMOVED.items():
        with pytest.raises(AttributeError, match=re.escape(f"dj.{name} has been removed: {sentence}.")):
            getattr(dj, name)
        assert name not in dj.__all__
    with pytest.raises(AttributeError, match="has no attribute 'advice'"):
        dj.advice  # noqa: B018


def test_a_removed_description_names_its_layer() -> None:
    for name, layer in nn._REMOVED.items():
        assert isinstance(getattr(nn, layer), type)
        with pytest.raises(AttributeError, match=f"nn.{name} has been removed.*: write nn.{layer}, "):
            getattr(nn, name)
    with pytest.raises(AttributeError, match="has no attribute 'conv5d'"):
        nn.conv5d  # noqa: B018


def test_a_removed_command_says_what_to_do() -> None:
    for name, words in (("advise", "choose-a-partition.md"), ("machine", "latency='2 us'")):
        command = [sys.executable, "-m", "distdl_jax", name, "network.py"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 2 and f"{name} has been removed: " in ended.stderr and words in ended.stderr


def test_a_removed_method_says_what_to_write() -> None:
    P = dj.planning_world(2).grid([2, 1])
    layer, spec = nn.Repartition(P, P), dj.TensorSpec((2, 3), P)
    for value, words in ((P, "dj.draw(P)"), (spec, "dj.draw(spec)"), (layer, "dj.draw(layer, x_spec)")):
        with pytest.raises(AttributeError, match=re.escape(f".draw has been removed: write {words}.")):
            value.draw()  # type: ignore[union-attr]
        assert not hasattr(value, "draw")
