"""Programs that need not import what all of them import: copies of a process that has done so.

In a command `python(modules, environment)` stands for `python`: a small client, which hands its arguments, its
environment and its open files to a server, which forks. The copy becomes the program; the client waits, passes signals
on, and ends as the program does. Where there is no Linux, it is Python itself.
"""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.forkserver.request import TOTAL

HERE = Path(__file__).parent


class ForkServer:
    """A process that has imported `modules`. It ends with this one, and its programs with it."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = f"forkserver-{os.getpid()}-{secrets.token_hex(4)}"
        self._costs = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as this object is
        end, self._end = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{self.name}")
            listener.listen(64)
            files = [listener.fileno(), self._costs.fileno(), end]
            self._process = subprocess.Popen(
                [sys.executable, HERE / "server.py", *map(str, files), *modules],
                env=dict(environment),
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        os.close(end)

    def python(self) -> list[str]:
        """Return the words for `python` in a command: only `-c`, `-m` and files may come behind it."""
        return [sys.executable, "-I", "-S", str(HERE / "client.py"), self.name]

    def seconds(self) -> float:
        """Return the processor seconds of the server and of its programs that have ended."""
        written = os.pread(self._costs.fileno(), TOTAL.size, 0)
        return TOTAL.unpack(written)[0] if written else 0.0

    def end(self) -> None:
        """End the server, and its programs."""
        os.close(self._end)
        self._process.wait()


_servers: dict[frozenset[tuple[str, str]], ForkServer] = {}
_starting = threading.Lock()


def python(modules: Sequence[str], environment: Mapping[str, str], program_alone: Sequence[str] = ()) -> list[str]:
    """Return the words for `python`, with `modules` imported, in a command that runs in this environment.

    The modules look at none of the variables that begin with one of `program_alone`.
    """
    if sys.platform != "linux":
        return [sys.executable]
    seen = frozenset((name, value) for name, value in environment.items() if not name.startswith(tuple(program_alone)))
    with _starting:
        if seen not in _servers:
            _servers[seen] = ForkServer(modules, dict(seen))
        return _servers[seen].python()


def seconds() -> float:
    """Return the processor seconds of all servers of this process, and of their programs that have ended."""
    return sum(server.seconds() for server in _servers.values())
