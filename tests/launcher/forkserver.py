"""Programs that need not import what all of them import: copies of a process that has done so, on Linux.

In a command `python(modules, environment)` stands for `python`: this file as a client, which hands its arguments,
environment and open files to a server, this file too, which forks. A copy becomes the program. The client passes
signals on and ends as the program does; where it is killed, so is the program.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import types
from _thread import allocate_lock  # `threading` takes longer to import

PASSED_ON = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
ABOVE = 512  # file numbers that a program's own are below
_servers: dict[frozenset, tuple[str, int]] = {}  # names, and the ends of pipes that they end with
_one_at_a_time = allocate_lock()


def python(modules: tuple[str, ...], environment: dict[str, str], program_alone: tuple[str, ...] = ()) -> list[str]:
    """Return the words for `python`, with `modules` imported: only `-c`, `-m` and files may come behind them.

    The modules look at none of the variables that begin with one of `program_alone`.
    """
    if sys.platform != "linux":
        return [sys.executable]
    import subprocess

    seen = frozenset((name, value) for name, value in environment.items() if not name.startswith(program_alone))
    with _one_at_a_time:  # tests start programs from threads
        if seen not in _servers:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"\0forkserver-{os.getpid()}-{len(_servers)}")
            listener.listen(64)
            end, own_end = os.pipe()
            _servers[seen] = f"forkserver-{os.getpid()}-{len(_servers)}", own_end
            words = [sys.executable, __file__, "serve", str(listener.fileno()), str(end), *modules]
            files = (listener.fileno(), end)
            subprocess.Popen(words, env=dict(seen), pass_fds=files, stdin=subprocess.DEVNULL, start_new_session=True)
            for file in files:
                os.close(file)
            listener.detach()
    return [sys.executable, "-I", "-S", __file__, "run", _servers[seen][0]]


def run(name: str, *arguments: str) -> None:
    """Have the server run the program, and end as it does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until there is somebody to pass them on to
    server = socket.socket(socket.AF_UNIX)
    server.connect(f"\0{name}")
    files = [
        n
        for n in map(int, os.listdir("/proc/self/fd"))
        if n != server.fileno() and os.path.exists(f"/proc/self/fd/{n}")
    ]
    cores = sorted(os.sched_getaffinity(0))
    text = json.dumps([sys.executable, arguments, dict(os.environ), os.getcwd(), cores, files]).encode()
    socket.send_fds(server, [struct.pack("I", len(text))], files)
    server.sendall(text)
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    for number in {0, 1, 2}.intersection(files):
        os.close(number)  # the program's alone: others wait for the end of what is written there
    (status,) = struct.unpack("i", server.recv(4) or struct.pack("i", signal.SIGKILL))
    if os.WIFSIGNALED(status):
        signal.signal(number, signal.SIG_DFL) if (number := os.WTERMSIG(status)) != signal.SIGKILL else None
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def serve(listener: socket.socket, end: int, modules: list[str]) -> list:
    """Return what to run, in a copy of this process for each client; this process itself never returns."""
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listener, end], [], [])
        if end in ready:
            os._exit(0)
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return program_of(client)
        client.close()


def program_of(client: socket.socket) -> list:
    """Return what to run, in a child of this process, which passes signals on to it and tells how it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, files, _, _ = socket.recv_fds(client, 4, ABOVE)
    text = client.recv(*struct.unpack("I", length), socket.MSG_WAITALL)
    pid = os.fork()
    if pid:
        for file in files:
            os.close(file)
        import threading

        def pass_on() -> None:
            with contextlib.suppress(ConnectionError, ProcessLookupError):
                while number := client.recv(1):
                    os.kill(pid, number[0])
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # the client was killed

        threading.Thread(target=pass_on, daemon=True).start()
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(ConnectionError):
            client.sendall(struct.pack("i", status))
        os._exit(0)
    asked = json.loads(text)
    os.setpgid(0, 0)
    copies = [os.dup2(file, ABOVE + place) for place, file in enumerate(files)]
    os.closerange(0, ABOVE)
    for file, number in zip(copies, asked.pop(), strict=True):
        os.dup2(file, number)
        os.close(file)
    os.sched_setaffinity(0, asked.pop())
    os.chdir(asked[-1])
    os.environ.clear()
    os.environ.update(asked[-2])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator does so by itself
    gc.enable()
    return asked


if __name__ == "__main__" and sys.argv[1] == "run":
    run(*sys.argv[2:])
elif __name__ == "__main__":
    del sys.path[0]  # this folder
    executable, arguments, _, folder = serve(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]), sys.argv[4:])
    sys.orig_argv = [executable, *arguments]
    sys.argv = arguments if arguments[0] not in ("-c", "-m") else [arguments[0], *arguments[2:]]
    sys.path.insert(0, {"-c": "", "-m": folder}.get(arguments[0], os.path.dirname(os.path.realpath(arguments[0]))))
    main = types.ModuleType("__main__")
    main.__builtins__, main.__loader__ = __builtins__, None  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    __name__ = "forkserver"  # whoever looks for the main program finds the other one
    # Here, not in a function: an exception leaves the program as it would leave Python's own main program.
    if arguments[0] == "-m":
        import runpy

        runpy._run_module_as_main(arguments[1])
    elif arguments[0] == "-c":
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    else:
        main.__file__ = os.path.abspath(arguments[0])
        with open(arguments[0], "rb") as file:
            code = compile(file.read(), main.__file__, "exec")
        exec(code, main.__dict__)
