"""Machine files are read as they were written, and refused with the line of what is wrong."""

from importlib.resources import files

import pytest

import distdl_jax as dj

TEXT = (files("distdl_jax.machine") / "files" / "infiniband-hdr.toml").read_text()


@pytest.mark.parametrize("name", dj.machine.names())
def test_shipped_files_are_saved_and_loaded_alike(name, tmp_path):
    machine = dj.machine.load(name)
    machine.save(tmp_path / "machine.toml")
    assert dj.machine.load(tmp_path / "machine.toml") == machine
    assert machine.name == name


REFUSED = {
    "other version": ("version = 1", "version = 2", "`version` (=2) must be 1"),
    "no version": ("version = 1", "", "`version` (=None) must be 1"),
    "wrong unit": ('memory = "256 GB"', 'memory = "256 us"', "`host.memory` (='256 us') must be a number of bytes"),
    "no unit": ('"280 GB/s"', "280", "`host.memory_bandwidth` (=280) must be a number of bytes per second"),
    "two points": ('"280 GB/s"', '"2.8.0 GB/s"', "must begin with one number"),
    "in a row": ('"5.1 GB/s"', '"5.1 GBs"', "`levels.network.segments.1.bandwidth` (='5.1 GBs') must be"),
    "zero": ('memory = "256 GB"', 'memory = "0 GB"', "`host.memory` (=0.0) must be above 0"),
    "missing": ('kernel = "1 us"\n', "", "`calls` has no `kernel`, which is missing"),
    "missing table": ('[quality]\nsource = "guess"\nnoise = "3 %"', "", "has an entry `quality`, which is missing"),
    "unknown": ("alone =", "together =", "`host` has no entry `together`"),
    "unknown at the top": ("mpi =", "mip =", "a machine file has no entry `mip`"),
    "no source": ('source = "guess: as on the workstation"\n', "", "`calls` has no `source`"),
    "a rumour": ('"guess: as on the workstation"', '"rumour"', "must be a text that begins with one of measured"),
    "guess of nothing": ('guesses = ["workers_per_cache"', 'guesses = ["caches"', "names 'caches', which is no entry"),
    "no count": ("workers = 32", "workers = 0", "`host.workers` (=0) must be a whole number, 1 or more"),
    "far level": ("[levels.network]", "[levels.moon]", "`levels` has no entry `moon`"),
    "descending": (
        'up_to = "16 KiB" },\n  { latency = "6.2',
        'up_to = "1 B" },\n  { latency = "6.2',
        "ascending sizes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_are_refused_with_a_line(case, tmp_path):
    old, new, sentence = REFUSED[case]
    assert TEXT.count(old) == 1
    path = tmp_path / "wrong.toml"
    path.write_text(TEXT.replace(old, new))
    with pytest.raises(dj.InvalidArgumentError) as refused:
        dj.machine.load(path)
    assert sentence in str(refused.value)
    assert f"{path}, line " in str(refused.value)


def test_the_line_is_that_of_the_entry(tmp_path):
    path = tmp_path / "wrong.toml"
    for wrong in ('"5.1 GB/s"', 'memory = "256 GB"', 'noise = "3 %"'):
        text = TEXT.replace(wrong, wrong[:-1] + 'x"')
        lines = zip(TEXT.split("\n"), text.split("\n"), strict=True)
        line = next(number for number, (a, b) in enumerate(lines, 1) if a != b)
        path.write_text(text)
        with pytest.raises(dj.InvalidArgumentError, match=f"line {line}:"):
            dj.machine.load(path)


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(dj.InvalidArgumentError, match="perlmutter-cpu"):
        dj.machine.load(tmp_path / "none.toml")
    with pytest.raises(dj.InvalidTypeError, match="must be a path"):
        dj.machine.load(3)
    (tmp_path / "broken.toml").write_text("version = ")
    with pytest.raises(dj.InvalidArgumentError, match="is no TOML"):
        dj.machine.load(tmp_path / "broken.toml")


def test_guesses_are_named():
    guesses = dj.machine.load("omni-path").guesses
    assert "levels.network.segments" in guesses
    assert "host.memory" not in guesses
