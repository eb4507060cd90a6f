"""Imports modules once, then forks a copy of itself for each client; the copy becomes the client's program.

Programs end with their clients, and all of them with the process that has started the server.
"""

import builtins
import fcntl
import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import sys
import types
from contextlib import suppress
from pathlib import Path

import request

ABOVE = 512  # file numbers that a program's own are below


class Server:
    """Forks, and tells clients how their programs have ended."""

    def __init__(self, listener: socket.socket, costs: int, parent: int) -> None:
        self.listener, self.costs = listener, costs
        self.clients: dict[int, socket.socket] = {}  # by the pid of the program
        self.seconds = sum(os.times()[:2])
        self._write_costs()
        self.waiting = selectors.PollSelector()  # without a file of its own
        self.waiting.register(parent, selectors.EVENT_READ, self.end)
        self.waiting.register(listener, selectors.EVENT_READ, self.fork)

    def next_program(self) -> dict:
        """Return what to run, in a copy; the server itself never returns."""
        while True:
            for key, _ in self.waiting.select():
                asked = key.data() if callable(key.data) else self.hear(*key.data)
                if asked:
                    return asked

    def fork(self) -> dict | None:
        client, _ = self.listener.accept()
        try:
            asked, files = request.receive(client)
        except EOFError:
            client.close()
            return None
        pid = os.fork()
        if pid == 0:
            for connection in (client, self.listener, *self.clients.values()):
                connection.detach()  # closed with all others of the server
            take_over(asked, files)
            return asked
        for file in files:
            os.close(file)
        self.clients[pid] = client
        ends = os.pidfd_open(pid)
        self.waiting.register(ends, selectors.EVENT_READ, (pid, ends, True))
        self.waiting.register(client, selectors.EVENT_READ, (pid, ends, False))
        with suppress(OSError):
            client.sendall(request.NUMBER.pack(pid))
        return None

    def hear(self, pid: int, ends: int, has_ended: bool) -> None:
        if pid not in self.clients:
            return  # both at once
        client = self.clients[pid]
        if not has_ended:  # the client was killed, and so is its program
            self.waiting.unregister(client)
            os.kill(pid, signal.SIGKILL)
            return
        _, status, used = os.wait4(pid, 0)
        self.seconds += used.ru_utime + used.ru_stime
        self._write_costs()
        with suppress(OSError):
            client.sendall(request.NUMBER.pack(status))
        self.waiting.unregister(ends)
        with suppress(KeyError):
            self.waiting.unregister(client)
        os.close(ends)
        self.clients.pop(pid).close()

    def end(self) -> None:
        for pid in self.clients:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    def _write_costs(self) -> None:
        os.pwrite(self.costs, request.TOTAL.pack(self.seconds), 0)


def take_over(asked: dict, files: list[int]) -> None:
    """Take over the client's files, folder and environment."""
    os.setpgid(0, 0)
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, ABOVE) for file in files]
    os.closerange(0, ABOVE)
    for file, number in zip(copies, asked["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    os.umask(asked["umask"])
    os.sched_setaffinity(0, asked["cores"])
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator does so by itself
    gc.enable()


def main_module(asked: dict) -> types.ModuleType:
    """Return an empty `__main__`, with the arguments and the path that Python gives a program."""
    arguments = asked["arguments"]
    sys.orig_argv = [asked["executable"], *arguments]
    sys.argv = arguments if arguments[0] not in ("-c", "-m") else [arguments[0], *arguments[2:]]
    first = {"-c": "", "-m": asked["folder"]}.get(arguments[0], str(Path(arguments[0]).resolve().parent))
    sys.path.insert(0, first)
    main = types.ModuleType("__main__")
    main.__builtins__ = builtins
    main.__loader__ = None
    sys.modules["__main__"] = main
    return main


def code_of(asked: dict, main: types.ModuleType) -> types.CodeType:
    arguments = asked["arguments"]
    if arguments[0] == "-c":
        return compile(arguments[1], "<string>", "exec")
    main.__file__ = os.path.abspath(arguments[0])
    return compile(Path(arguments[0]).read_bytes(), main.__file__, "exec")


gc.disable()
sys.path.pop(0)  # this folder
listening, written, starter = map(int, sys.argv[1:4])
for name in sys.argv[4:]:
    importlib.import_module(name)
gc.collect()
gc.freeze()
asked = Server(socket.socket(fileno=listening), written, starter).next_program()
main = main_module(asked)
__name__ = "forkserver"  # whoever looks for the main program finds the other one
# Here, not in a function: an exception leaves the program as it would leave Python's own main program.
if asked["arguments"][0] == "-m":
    runpy._run_module_as_main(asked["arguments"][1])
else:
    exec(code_of(asked, main), main.__dict__)
