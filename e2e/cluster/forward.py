"""Forwards a port of the machine's loopback to a port inside a network namespace.

Run as a script of its own (it imports nothing of the package): the listening socket is opened first and
stays in the machine's namespace; then the process moves, so that its connections are made inside.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import socket
from contextlib import suppress
from pathlib import Path

CLONE_NEWNET = 0x40000000
CHUNK = 1 << 16


def move_to(net: Path) -> None:
    """Move this process into a network namespace; OSError when that fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    with net.open() as target:
        if libc.setns(target.fileno(), CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"setns: {os.strerror(number)}")


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end, then pass the end on."""
    with suppress(ConnectionError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    with suppress(OSError):
        writer.write_eof()


async def serve(listener: socket.socket, target: tuple[str, int]) -> None:
    """Forward every connection, for ever."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection(*target)
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))
        finally:
            inner_writer.close()
            writer.close()

    server = await asyncio.start_server(connected, sock=listener)
    async with server:
        await server.serve_forever()


def main() -> None:
    """Read the arguments and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="port on the machine's 127.0.0.1")
    parser.add_argument("--net", type=Path, required=True, help="file of the network namespace")
    parser.add_argument("--target-port", type=int, required=True, help="port on the namespace's 127.0.0.1")
    arguments = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", arguments.port))
    move_to(arguments.net)
    asyncio.run(serve(listener, ("127.0.0.1", arguments.target_port)))


if __name__ == "__main__":
    main()
