"""A slice of the kill campaign (`make kill-campaign` runs all of it): one process killed, all of its attempt gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .conftest import Attempts
from .ownership import WORKER_NODE, Campaign, PodCluster

CELLS = {
    # phase, victim: what the job says; each attempt is also the next one of the cell before.
    ("spawning", "launcher"): "EngineExited: the launcher process was killed by SIGKILL",
    ("loading", "engine core"): "WorkerDied: the engine core process ",
    ("serving", "API server"): "EngineExited: the API server process was killed by SIGKILL",
    # Which rank is there is not certain on one machine: a driver may join the raylet of either node.
    ("serving", "raylet of a worker's node"): "WorkerDied: the worker of rank ",
}


@pytest.fixture(scope="module")
def campaign() -> Iterator[Campaign]:
    cluster = PodCluster()
    try:
        cluster.start()
        yield Campaign(Attempts(cluster))
    finally:
        cluster.stop()


@pytest.mark.parametrize(("phase", "victim"), CELLS, ids=[f"{victim}, {phase}" for phase, victim in CELLS])
def test_killed(phase: str, victim: str, campaign: Campaign) -> None:
    cell = campaign.kill(phase, victim)
    print(f"MEASURED {victim} killed when {phase}: all gone after {cell.gone} s")
    assert cell.fault == ""
    assert cell.outcome.startswith(CELLS[phase, victim]), cell.outcome
    if "raylet" in victim:
        assert f"({WORKER_NODE}) died with its Ray node" in cell.outcome
