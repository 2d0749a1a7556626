"""What the clients of plain HTTP services share: one lazily made session, and failures in words."""

from __future__ import annotations

import os
import re
import socket
import sys
from typing import Self

import aiohttp

EXCERPT_CHARACTERS = 300

# A peer whose node is cut off or without power says nothing more, and a long poll would wait for it to the end of its
# time. The kernel asks it once a second when it was silent for so many seconds, and gives up after so many questions.
SILENT_SECONDS = 2
QUESTIONS = 3


class SessionHolder:
    """Holds one connection pool, made at first use inside the running loop. ``close`` it."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The session. Proxies of the environment do not count: these are services in the cluster.

        Connections are not limited here: callers bound what they do at once, and every launcher has one long poll.
        """
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, socket_factory=watched_socket)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        return self._session

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def watched_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket whose connection fails within seconds when its peer is gone without a word."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_SECONDS)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, QUESTIONS)
    return made


def failure_in_words(error: BaseException, timeout: aiohttp.ClientTimeout) -> str:
    """Say why a request got no answer."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"its name {error.host} is not known to the cluster's DNS"
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"no connection within {timeout.sock_connect:g} s"
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout.total:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return f"no connection ({os.strerror(number) if number else error.os_error})"
    if isinstance(error, aiohttp.ServerDisconnectedError | ConnectionResetError):
        return "the connection was closed before the answer came"
    return str(error) or type(error).__name__


def excerpt(text: str) -> str:
    """Return what matters of an error's body in one short line: of a traceback its last line, of HTML its title."""
    text = text.strip()
    if not text:
        return "(empty)"
    if text[:200].lower().lstrip().startswith(("<!doctype html", "<html")):
        title = re.search(r"<title>(.*?)</title>", text, re.IGNORECASE | re.DOTALL)
        return f"an HTML page{f' titled {title.group(1).strip()!r}' if title else ''}, not Ray's answer"
    if "Traceback (most recent call last)" in text:
        text = next((line for line in reversed(text.splitlines()) if re.match(r"\w[\w.]*: ", line)), text)
    line = " ".join(text.split())
    return line if len(line) <= EXCERPT_CHARACTERS else f"{line[: EXCERPT_CHARACTERS - 1]}…"
