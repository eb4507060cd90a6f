"""What a client asks a server for, and what it hears: a length, JSON, and files; then the copy's pid and its status."""

import json
import os
import socket
import struct
import sys

NUMBER = struct.Struct("i")
TOTAL = struct.Struct("d")  # processor seconds
MOST_FILES = 64


def send(server: socket.socket, arguments: list[str], files: list[int]) -> None:
    """Send all that this process has: the copy gets its files under the same numbers."""
    asked = {
        "executable": sys.executable,
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": _umask(),
        "cores": sorted(os.sched_getaffinity(0)),
        "files": files,
    }
    text = json.dumps(asked).encode()
    socket.send_fds(server, [NUMBER.pack(len(text))], files)
    server.sendall(text)


def receive(client: socket.socket) -> tuple[dict, list[int]]:
    """Return what was sent, and the files by their numbers here; raise `EOFError` where the client has gone."""
    length, files, _, _ = socket.recv_fds(client, NUMBER.size, MOST_FILES)
    try:
        if not length:
            raise EOFError
        return json.loads(exactly(client, *NUMBER.unpack(length))), files
    except EOFError:
        for file in files:
            os.close(file)
        raise


def exactly(connection: socket.socket, count: int) -> bytes:
    """Return so many bytes; raise `EOFError` where the other side has gone before."""
    read = b""
    while len(read) < count:
        more = connection.recv(count - len(read))
        if not more:
            raise EOFError
        read += more
    return read


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
