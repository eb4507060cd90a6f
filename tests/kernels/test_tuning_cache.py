"""The file of measurements: whatever is in its place, it is read; whoever writes it, it is whole."""

import json
import threading
from pathlib import Path

import pytest

from distdl_jax.kernels.cpu.timing import Measurement
from distdl_jax.kernels.cpu.tuning_cache import VERSION, add, default_path, read

ONE = {"a convolution": {"plain": Measurement(0.5, 10), "other": Measurement(0.25, 0)}}
TWO = {"another one": {"plain": Measurement(1.5, 0)}}
NEWER = {"a convolution": {"plain": Measurement(0.75, 10)}}


def test_what_was_added_is_read(tmp_path):
    path = tmp_path / "new" / "folder" / "kept.json"
    assert read(path, "this") == {}
    assert add(path, "this", ONE) and add(path, "that", NEWER) and add(path, "this", TWO)
    assert read(path, "this") == ONE | TWO
    assert read(path, "that") == NEWER
    assert add(path, "this", NEWER)
    assert read(path, "this") == NEWER | TWO
    assert [file.name for file in path.parent.iterdir()] == ["kept.json"]


def content(machine):
    return json.dumps({"version": VERSION, "machines": machine})


GOOD = {"plain": [0.5, 10]}
WRONG = {
    "nothing": b"",
    "cut off": content({"this": {"a convolution": GOOD}})[:40].encode(),
    "no text": b"\xff\xfe\x00",
    "another kind": b"[1, 2]",
    "a deep one": b"[" * 100_000,
    "another version": json.dumps({"version": VERSION + 1, "machines": {"this": {"x": GOOD}}}).encode(),
    "no machines": content(7).encode(),
    "a machine that is none": content({"this": [1]}).encode(),
    "algorithms that are none": content(
        {"this": {"a convolution": 3, "b": {"plain": [1], "other": ["1", 2]}}}
    ).encode(),
    "impossible times": content(
        {"this": {"a": {"plain": [-1.0, 0], "other": [float("nan"), 0], "x": [1e999, 0]}}}
    ).encode(),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_such_file_counts_as_empty_and_is_replaced(tmp_path, name):
    path = tmp_path / "kept.json"
    path.write_bytes(WRONG[name])
    assert read(path, "this") == {}
    assert add(path, "this", ONE)
    assert read(path, "this")["a convolution"] == ONE["a convolution"]


def test_of_a_file_that_is_partly_right_the_right_part_is_read(tmp_path):
    path = tmp_path / "kept.json"
    path.write_text(content({"this": {"good": GOOD, "bad": {"plain": "soon"}, "mixed": {**GOOD, "other": None}}}))
    expected = {"plain": Measurement(0.5, 10)}
    assert read(path, "this") == {"good": expected, "mixed": expected}


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("in the folder's place")
    assert not add(tmp_path / "file" / "kept.json", "this", ONE)
    assert read(tmp_path / "file" / "kept.json", "this") == {}
    (tmp_path / "folder").mkdir()
    assert not add(tmp_path / "folder", "this", ONE)
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["file", "folder"]  # and nothing is left behind


def test_many_writers_and_readers(tmp_path):
    """Each reader finds a whole file; what a writer adds after all others have ended is there."""
    path = tmp_path / "kept.json"
    assert add(path, "this", ONE)
    found, writes = [], 20

    def write(writer):
        for place in range(writes):
            assert add(path, "this", {f"{writer} {place}": {"plain": Measurement(1.0, place)}})

    def watch():
        while any(writer.is_alive() for writer in writers):
            found.append(read(path, "this"))

    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    watcher = threading.Thread(target=watch)
    for thread in (*writers, watcher):
        thread.start()
    for thread in (*writers, watcher):
        thread.join()
    assert found and all(kept["a convolution"] == ONE["a convolution"] for kept in found)
    assert add(path, "this", TWO)
    assert read(path, "this").keys() >= {"a convolution", "another one"}
    assert [file.name for file in tmp_path.iterdir()] == ["kept.json"]


def test_the_users_cache(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_path() == Path("/somewhere/distdl_jax/tuning.json")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_path() == Path("/home/me/.cache/distdl_jax/tuning.json")
