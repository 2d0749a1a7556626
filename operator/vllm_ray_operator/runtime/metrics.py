"""What Prometheus is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder

from vllm_ray_operator.api.status import VLLMDeploymentStatus
from vllm_ray_operator.clients.bundle import Key

PREFIX = "vllm_ray_operator"
Result = Literal["ok", "problem", "error"]

disable_created_metrics()  # type: ignore[no-untyped-call]  # second series of counters, which nobody asks for


class Metrics:
    """The operator's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._passes = Counter(
            f"{PREFIX}_reconciles",
            "Passes over a deployment: ok, with a problem the user was told of, or ended by an error.",
            ["result"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            f"{PREFIX}_reconcile_seconds",
            "How long a pass took.",
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
            registry=self.registry,
        )
        self._wanted = self._per_deployment("replicas", "Replicas that exist, ready or not.")
        self._ready = self._per_deployment("replicas_ready", "Replicas that are ready.")
        self._attempts = Counter(f"{PREFIX}_attempts", "Engine starts that were decided.", registry=self.registry)
        self._fences = Counter(
            f"{PREFIX}_fences", "Attempts that were proven gone, by the proof.", ["how"], registry=self.registry
        )

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read when it is asked for."""
        Gauge(f"{PREFIX}_{name}", text, registry=self.registry).set_function(read)

    def count_pass(self, result: Result, seconds: float) -> None:
        """Count a pass."""
        self._passes.labels(result).inc()
        self._seconds.observe(seconds)

    def count_changes(self, before: VLLMDeploymentStatus, after: VLLMDeploymentStatus) -> None:
        """Count what a status that was just written decided."""
        self._attempts.inc(max(0, after.last_attempt - before.last_attempt))
        known = {replica.index: replica.last_fence for replica in before.replicas}
        for replica in after.replicas:
            fence = replica.last_fence
            if fence is not None and fence != known.get(replica.index):
                self._fences.labels(fence.how).inc()

    def show(self, key: Key, status: VLLMDeploymentStatus) -> None:
        """Show how many replicas a deployment has."""
        self._wanted.labels(key.namespace, key.name).set(status.current_replicas)
        self._ready.labels(key.namespace, key.name).set(status.ready_replicas)

    def forget(self, key: Key) -> None:
        """Drop the series of a deployment that is gone."""
        for gauge in (self._wanted, self._ready):
            gauge.remove(key.namespace, key.name)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return all of it in the format that an Accept header asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _per_deployment(self, name: str, text: str) -> Gauge:
        return Gauge(f"{PREFIX}_deployment_{name}", text, ["namespace", "name"], registry=self.registry)
