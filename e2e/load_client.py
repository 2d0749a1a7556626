"""Clients that send completions at a steady rate and tell of each request; they end when they are killed.

Run as a script of its own in a node's network or in a pod (it imports nothing of the package):
python3 load_client.py URL MODEL COUNT PERIOD. COUNT clients of each of four kinds: a connection for each request or
one that is kept as long as the server keeps it, an answer in one piece or a stream. Each sends a request every PERIOD
seconds, whatever the answers take up to then. One JSON object a line: the kind, when the request began (Unix time),
how long it took until its answer began and ended, in seconds, whether the server ended a connection that the client
would have kept, and the error, if any.
"""

from __future__ import annotations

import http.client
import json
import select
import sys
import threading
import time
from itertools import product
from urllib.parse import urlsplit

TIMEOUT = 60.0  # seconds
TOKENS = {False: 8, True: 32}  # of an answer in one piece, of a stream


def main() -> None:
    """Send requests for ever."""
    url, model, count, period = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    kinds = list(product((False, True), (False, True))) * count
    threads = [
        threading.Thread(target=client, args=(url, model, keeps, streams, period, period * number / len(kinds)))
        for number, (keeps, streams) in enumerate(kinds)
    ]
    for thread in threads:
        thread.start()


def client(url: str, model: str, keeps: bool, streams: bool, period: float, offset: float) -> None:
    """Send one request after another; clients begin one after another, so that the rate is even."""
    split = urlsplit(f"{url}/completions")
    connection = http.client.HTTPConnection(split.hostname or "", split.port, timeout=TIMEOUT)
    body = {"model": model, "prompt": "Hello", "max_tokens": TOKENS[streams], "ignore_eos": True, "temperature": 0}
    text = json.dumps({**body, "stream": streams}).encode()
    kind = f"{'kept' if keeps else 'fresh'}, {'stream' if streams else 'plain'}"
    due = time.time() + offset
    while True:
        time.sleep(max(0.0, due - time.time()))
        began, answered, moved, error = time.time(), None, False, ""
        try:
            if connection.sock is not None and is_closed(connection):
                connection.close()
            connection.request("POST", split.path, text, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                moved = keeps and response.will_close
                check(response.status, first := response.readline())
                answered = time.time() - began
                check_end(first + response.read(), streams)
        except Exception as failure:
            error = repr(failure)
            connection.close()
        took = time.time() - began
        if not keeps:
            connection.close()
        told = {"kind": kind, "at": began, "first": answered, "took": took, "moved": moved, "error": error}
        print(json.dumps(told) + "\n", end="", flush=True)  # one write, or lines of several threads get mixed up
        due = max(due + period, time.time())


def is_closed(connection: http.client.HTTPConnection) -> bool:
    """Whether the server has closed an idle connection: pools look before they use one again (as urllib3 does)."""
    return bool(select.select([connection.sock], [], [], 0)[0])


def check(status: int, first: bytes) -> None:
    """Raise if an answer is a refusal."""
    if status != 200:
        raise ValueError(f"{status}: {first[:200]!r}")


def check_end(answer: bytes, streams: bool) -> None:
    """Raise if an answer is not whole."""
    if streams:
        lines = [line for line in answer.decode().split("\n") if line.startswith("data: ")]
        if lines[-1:] != ["data: [DONE]"] or '"finish_reason":"length"' not in lines[-2]:
            raise ValueError(f"a stream that was cut off: {lines[-2:]!r}")
    elif json.loads(answer)["choices"][0]["finish_reason"] != "length":
        raise ValueError(f"an answer that is not whole: {answer[-200:]!r}")


if __name__ == "__main__":
    main()
