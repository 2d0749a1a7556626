"""What is seen while a fault lasts: the status, the endpoints, the requests of clients. All with the Unix time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from e2e.chaos.outcome import Request, Seen, Traffic
from e2e.chaos.scene import CLUSTER, HOME, NAME, Scene
from e2e.serving import served_name
from e2e.streams import Streams

CLIENT = Path(__file__).with_name("client.py")


class Watching:
    """Keeps what two watches of the API server and two clients tell, from ``start`` to ``stop``."""

    def __init__(self, scene: Scene) -> None:
        """One client goes through the Service, one straight to the replica that is not hit."""
        self.seen: list[Seen] = []
        self.traffic: list[Traffic] = []
        self.service: list[Request] = []
        self.other: list[Request] = []
        self._scene = scene
        self._streams = Streams(CLUSTER)

    def start(self) -> None:
        """Begin to watch."""
        deployment = self._scene.deployment
        endpoint = self._scene.other["attempt"]["endpoint"]
        direct = f"http://{endpoint['address']}:{endpoint['port']}/v1"
        slices = ("endpointslices", "-l", f"kubernetes.io/service-name={NAME}")
        self._streams.watch(("vd", NAME), lambda event: self.seen.append(Seen.of(time.time(), event["object"])))
        self._streams.watch(slices, lambda event: self.traffic.append(Traffic.of(time.time(), event)))
        self._ask(deployment["status"]["endpoint"], self.service)
        self._ask(direct, self.other)

    def stop(self) -> None:
        """End watches and clients."""
        self._streams.stop()

    def _ask(self, url: str, requests: list[Request]) -> None:
        def take(told: dict[str, Any]) -> None:
            requests.append(Request(told["at"], told["took"], told["error"]))

        self._streams.on_node(HOME, ["python3", str(CLIENT), url, served_name(self._scene.deployment)], take)
