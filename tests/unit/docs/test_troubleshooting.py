"""docs/troubleshooting.md has every reason that the code gives, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_ray_engine import reasons
from vllm_ray_operator.act.execute import RESOURCES
from vllm_ray_operator.clients.problems import of_write
from vllm_ray_operator.clients.protocols import Invalid
from vllm_ray_operator.observe import words

ROOT = Path(__file__).resolve().parents[3]
OPERATOR = ROOT / "operator" / "vllm_ray_operator"

# How a reason that conditions, failures and events can show stands in the code.
WRITTEN = (
    r'\bProblem\(\s*"([A-Z]\w+)"',
    r'\bEmit\("\w+", "([A-Z]\w+)"',
    r'\bVerdict\("\w+", "([A-Z]\w+)"',
    r'\breason, message = "([A-Z]\w+)"',
    r'\breason="([A-Z]\w+)"',
    r'reason(?:"\))? or "([A-Z]\w+)"',
    r'\bUnresolvable\(\s*"([A-Z]\w+)"',
    r'reason == "([A-Z]\w+)"',
    r'return "([A-Z]\w+)", ',
)
# The phases that become a reason.
PHASES = {"NotReady", "Stopping", "Fencing"}
# Words of an explanation, not reasons of ours.
EXAMPLES = {"Evicted"}


def given() -> set[str]:
    text = "\n".join(path.read_text() for path in OPERATOR.rglob("*.py"))
    found = {reason for pattern in WRITTEN for reason in re.findall(pattern, text)}
    refused = {of_write(Invalid("x"), kind, "y").reason for kind in RESOURCES}
    return found | refused | PHASES | set(words.CONFIG_REASONS) | reasons.ALL


def documented() -> set[str]:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    return {reason for row in rows for reason in re.findall(r"`([A-Z]\w+)`", row)} - EXAMPLES


def test_every_reason_has_its_remedy() -> None:
    assert sorted(given() - documented()) == []


def test_no_other_reason_is_promised() -> None:
    assert sorted(documented() - given()) == []


def test_the_search_finds_what_it_is_to_find() -> None:
    """Else the others would be satisfied by nothing."""
    one_of_each = {"KubeRayMissing", "ReplicaReady", "AllReplicasReady", "HeadLost", "InvalidObject", "PodFailed"}
    assert one_of_each | {"SchedulingGated", "NodeNotReady", "EngineExited", "ServiceRefused"} <= given()
