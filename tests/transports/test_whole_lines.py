"""Lines of workers are whole, however they are written, in threads and under MPI."""

import io
import re
import sys
import threading

import pytest
from jobs import run, run_alone

import distdl_jax as dj
from distdl_jax.transports.threads.whole_lines import WholeLines, whole_lines

pytestmark = pytest.mark.limit(300)

LINE = re.compile(r"row \d \d+ \(1, 1, 4, 4\) a b c end")
PIECES = """
import sys
import distdl_jax as dj

P = dj.Partition()
P.allgather_data(0)
for i in range(300):
    print("row", P.rank, i, (1, 1, 4, 4), *"abc", "end")
    print("row", P.rank, i, (1, 1, 4, 4), *"abc", "end", file=sys.stderr)
    if not sys.argv[1:]:
        continue
    for piece in ("row ", str(P.rank), f" {i} ", "(1, 1, 4, 4)", " a b c", " end\\n"):
        print(piece, end="", flush=True)
    for piece in ("row ", str(P.rank), f" {i} ", "(1, 1, 4, 4)", " a b c", " end\\n"):
        sys.stdout.buffer.write(piece.encode())
"""


@pytest.mark.parametrize("way", ["MPI", "simulate"])
def test_lines_in_pieces_are_not_torn(way, tmp_path):
    path = tmp_path / "pieces.py"
    path.write_text(PIECES)
    if way == "MPI":
        # Unbuffered, every piece would be written alone.
        status, output = run(4, "-m", "distdl_jax", path, settings={"PYTHONUNBUFFERED": "1"}, anew=True)
    else:
        status, output = run_alone("-m", "distdl_jax", "--simulate", 4, path, "more")
    assert status == 0, output
    lines = output.splitlines()
    assert len(lines) == 300 * 4 * (2 if way == "MPI" else 4)
    assert not [line for line in lines if not LINE.fullmatch(line)]


def test_workers_and_their_threads_write_whole_lines(capsys):
    """Each waits in the middle of its line for the others to be there, too."""
    meeting = threading.Barrier(6, timeout=60)

    def write(name):
        for _ in range(3):
            print(name, end=" ", flush=True)
            meeting.wait()
            print("is whole")

    def program():
        rank = dj.Partition().rank
        thread = threading.Thread(target=write, args=(f"thread of {rank}",))
        thread.start()
        write(f"worker {rank}")
        thread.join()

    before = sys.stdout, sys.stderr, sys.stdin
    dj.simulate(3, program)
    assert (sys.stdout, sys.stderr, sys.stdin) == before
    names = [*(f"worker {i}" for i in range(3)), *(f"thread of {i}" for i in range(3))]
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(3 * [f"{name} is whole" for name in names])


def in_another_thread(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()


def test_what_remains_comes_at_the_end():
    stream = io.StringIO()
    lines = WholeLines(stream)
    lines.write("one\ntwo")
    in_another_thread(lines.write, "three\nfour")
    lines.flush()
    assert stream.getvalue() == "one\nthree\n"
    lines.end()
    assert stream.getvalue() == "one\nthree\ntwo\nfour"
    lines.write(" and")
    assert stream.getvalue().endswith("four\n and")  # another thread's line is open


def test_bars_are_drawn_when_they_are_flushed():
    """And what others write begins a line of its own; a bar is drawn over another one."""
    stream = io.StringIO()
    lines = WholeLines(stream)
    lines.write("\r 10%")
    assert stream.getvalue() == ""
    lines.flush()
    in_another_thread(lines.write, "other\n")
    lines.write("\r 20%")
    lines.flush()
    in_another_thread(lambda: (lines.write("\r 5%"), lines.flush()))
    lines.write("\r 30%\n")
    lines.write("step 1\r")
    assert stream.getvalue() == "\r 10%\nother\n\r 20%\r 5%\r 30%\nstep 1\r"


def test_a_prompt_is_shown_before_the_answer_is_read(monkeypatch):
    out = io.StringIO()
    asked = []

    class Answers(io.StringIO):
        def readline(self, *_):
            asked.append(out.getvalue())
            return "4\n"

    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stdin", Answers())
    with whole_lines():
        print("How many", end="", flush=True)
        assert input("? ") == "4"
    assert asked == ["How many? "]


def test_binary_output_and_wrong_types():
    raw = io.BytesIO()
    lines = WholeLines(io.TextIOWrapper(raw, encoding="utf-8"))
    lines.write("text ")
    lines.buffer.write(b"and ")
    lines.buffer.write(memoryview(b"bytes\nrest"))
    lines.flush()
    assert raw.getvalue() == b"text and bytes\n"
    lines.end()
    lines.flush()
    assert raw.getvalue() == b"text and bytes\nrest"
    with pytest.raises(TypeError):
        lines.write(b"bytes")
    assert lines.encoding == "utf-8" and not lines.isatty()
