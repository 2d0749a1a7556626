"""A stand-in for Ray."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any


class FakeRay(ModuleType):
    """A Ray that, as the real one, opens a new job when a handle is killed while it is down."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.job: str | None = None
        self.inits: list[dict[str, Any]] = []
        self.killed: list[str] = []
        self.removed: list[str] = []
        self.group_state = "CREATED"
        self.bundle_nodes: dict[str, dict[int, str]] = {}
        self.runtime: Any = SimpleNamespace(
            get_job_id=lambda: self.job, get_node_id=lambda: "node", gcs_address="10.0.0.1:6379"
        )
        self.util = SimpleNamespace(
            get_placement_group=self._get_placement_group,
            placement_group_table=lambda group: {
                "state": self.group_state,
                "bundles_to_node_id": self.bundle_nodes.get(group, {}),
            },
            remove_placement_group=self._remove_placement_group,
        )

    def _get_placement_group(self, name: str) -> str:
        if self.group_state == "not made yet":
            raise ValueError("Failed to look up actor")
        return f"group {name}"

    def is_initialized(self) -> bool:
        return self.job is not None

    def init(self, **options: Any) -> None:
        self.inits.append(options)
        self.job = f"0{len(self.inits)}000000"

    def get_runtime_context(self) -> Any:
        return self.runtime

    def kill(self, handle: str) -> None:
        if self.job is None:
            self.init()
        if handle == "unkillable":
            raise ValueError("no such actor")
        self.killed.append(handle)

    def _remove_placement_group(self, group: str) -> None:
        if self.job is None:
            self.init()
        self.removed.append(group)
