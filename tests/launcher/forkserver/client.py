"""Stands for `python`: has the server run the program with all that this process has, and ends as it does."""

import os
import resource
import signal
import socket
import sys
from contextlib import suppress

sys.path.insert(0, os.path.dirname(__file__))  # an isolated Python leaves that out
import request

PASSED_ON = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until there is a program to pass them on to
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(f"\0{sys.argv[1]}")
        files = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)]
        files.remove(server.fileno())
        request.send(server, sys.argv[2:], files)
        (program,) = request.NUMBER.unpack(request.exactly(server, request.NUMBER.size))
        for number in {0, 1, 2}.intersection(files):
            os.close(number)  # the program's alone: others wait for the end of what is written there

        def pass_on(number: int, _frame: object) -> None:
            with suppress(ProcessLookupError):
                os.kill(program, number)

        for number in PASSED_ON:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        (status,) = request.NUMBER.unpack(request.exactly(server, request.NUMBER.size))
    end_with(os.waitstatus_to_exitcode(status))


def _is_open(number: int) -> bool:
    with suppress(OSError):
        return bool(os.fstat(number))
    return False


def end_with(code: int) -> None:
    """Exit with this status, or by this signal."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL, for one, has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
