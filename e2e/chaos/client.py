"""A client that sends one completion after another and tells of each; ends when it is killed.

Run as a script of its own in a node's network (it imports nothing of the package): python3 client.py URL MODEL. Each
request is a connection of its own, as of clients that come and go. One JSON object a line: when it began (Unix time),
how long it took in seconds, and the error, if any.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request

TIMEOUT = 10.0  # seconds
PAUSE = 0.3  # seconds between requests


def main() -> None:
    """Send requests for ever."""
    url, model = sys.argv[1:]
    body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 4, "temperature": 0}).encode()
    while True:
        began = time.time()
        error = ""
        try:
            request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})  # noqa: S310
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:  # noqa: S310
                json.load(answer)["choices"][0]
        except Exception as failure:
            error = repr(failure)
        print(json.dumps({"at": began, "took": time.time() - began, "error": error}), flush=True)
        time.sleep(PAUSE)


if __name__ == "__main__":
    main()
