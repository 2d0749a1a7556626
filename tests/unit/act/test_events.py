"""Events on a VLLMDeployment."""

from __future__ import annotations

import re

import pytest

from vllm_ray_operator.act import events
from vllm_ray_operator.api.spec import Model, VLLMDeploymentSpec
from vllm_ray_operator.api.status import VLLMDeploymentStatus
from vllm_ray_operator.plan.actions import Emit
from vllm_ray_operator.plan.world import Deployment

NOW = 1_800_000_000.25


def deployment(name: str = "chat", uid: str = "1a2b3c4d-0000") -> Deployment:
    spec = VLLMDeploymentSpec(model=Model(uri="file:///m"))
    return Deployment("default", name, uid, 1, "7", spec, {}, VLLMDeploymentStatus())


EMIT = Emit("Warning", "OutOfMemory", "too little memory")


def test_an_event() -> None:
    event = events.event(deployment(), EMIT, NOW)
    assert event["eventTime"] == "2027-01-15T08:00:00.250000Z"
    assert (event["type"], event["reason"], event["note"]) == ("Warning", "OutOfMemory", "too little memory")
    assert event["regarding"] == {
        "apiVersion": "vllm-ray.dev/v1alpha1",
        "kind": "VLLMDeployment",
        "namespace": "default",
        "name": "chat",
        "uid": "1a2b3c4d-0000",
    }
    assert re.fullmatch(r"chat\.[0-9a-f]{16}", event["metadata"]["name"])


def name_of(emit: Emit = EMIT, of: Deployment | None = None, now: float = NOW) -> str:
    return str(events.event(of or deployment(), emit, now)["metadata"]["name"])


def test_the_same_event_has_the_same_name_at_any_time() -> None:
    assert name_of(now=NOW + 100) == name_of()


@pytest.mark.parametrize(
    "other",
    [
        name_of(Emit("Normal", "OutOfMemory", "too little memory")),
        name_of(Emit("Warning", "PortInUse", "too little memory")),
        name_of(Emit("Warning", "OutOfMemory", "attempt 8: too little memory")),
        name_of(of=deployment(uid="9f9f9f9f-0000")),
    ],
    ids=["type", "reason", "message", "a later deployment of the same name"],
)
def test_another_event_has_another_name(other: str) -> None:
    assert other != name_of()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("short", "short"),
        ("x" * 1024, "x" * 1024),
        ("x" * 1025, "x" * 1021 + "…"),
        ("ä" * 600, "ä" * 510 + "…"),
        ("🦙" * 256, "🦙" * 256),
        ("🦙" * 257, "🦙" * 255 + "…"),
    ],
    ids=["short", "just fits", "one too many", "two bytes each", "four bytes each", "four bytes each, too many"],
)
def test_the_note_is_cut_in_bytes_between_characters(text: str, expected: str) -> None:
    note = events.event(deployment(), Emit("Normal", "X", text), NOW)["note"]
    assert note == expected
    assert len(note.encode()) <= 1024


def test_a_long_name_still_makes_a_valid_one() -> None:
    assert len(name_of(of=deployment(name="x" * 253))) <= 253
