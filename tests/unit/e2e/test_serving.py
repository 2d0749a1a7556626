"""What the helpers read out of a status."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.serving import ray_cluster


def deployment(**phases: str) -> dict[str, Any]:
    """Return a deployment whose replicas each have a RayCluster; phases by r0=..., in the order given."""
    replicas = [
        {"index": int(name[1:]), "phase": phase, "attempt": {"rayCluster": f"chat-{name}"}}
        for name, phase in phases.items()
    ]
    return {"metadata": {"name": "chat"}, "status": {"replicas": replicas}}


def test_the_first_that_serves_tells_where_a_head_is() -> None:
    assert ray_cluster(deployment(r0="Starting", r1="Ready", r3="Ready")) == "chat-r1"
    assert ray_cluster(deployment(r0="Ready", r3="Ready"), 3) == "chat-r3"


@pytest.mark.parametrize("index", [None, 0, 7])
def test_where_none_serves_it_is_said(index: int | None) -> None:
    with pytest.raises(LookupError, match="does not serve"):
        ray_cluster(deployment(r0="Starting"), index)
