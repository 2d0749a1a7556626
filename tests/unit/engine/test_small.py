"""Versions, health, placement, memory: small pure parts, as tables of named cases."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from vllm_ray_engine import reasons, versions
from vllm_ray_engine.launcher import health, lost_worker, memory
from vllm_ray_engine.launcher.health import Probe, judge
from vllm_ray_engine.reasons import Cause, UnsupportedVersion

from .conftest import configure, free_port

SUPPORTED = ["0.21.0", "0.32.0+cpu", "0.33.0rc1", "1.0", "0.101.2.dev5+gabc"]
UNSUPPORTED = {"absent": None, "old": "0.20.2", "older": "0.9.1", "unreadable": "dev"}


@pytest.mark.parametrize("version", SUPPORTED)
def test_supported_version(version: str) -> None:
    versions.check_version("vllm", version)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_version(name: str) -> None:
    with pytest.raises(UnsupportedVersion, match=r"vllm.* 0\.21 or newer is needed") as caught:
        versions.check_version("vllm", UNSUPPORTED[name])
    assert caught.value.cause.reason == "UnsupportedVersion"


def test_cause_has_a_known_reason() -> None:
    with pytest.raises(ValueError, match="unknown reason"):
        Cause("Mystery", "")
    assert {name for name in vars(reasons) if name.isupper() and name != "ALL"} == {
        "".join("_" + c if c.isupper() and i else c for i, c in enumerate(reason)).upper() for reason in reasons.ALL
    }


JUDGED = {
    "all well": (Probe(200, ("tiny",)), 2, ""),
    "no answer": (Probe(None, error="the engine does not listen"), 2, "the engine does not listen"),
    "dead engine": (Probe(503, error="/health answers 503"), 2, "/health answers 503"),
    "other model": (Probe(200, ("other",)), 2, "/v1/models does not list tiny"),
    "dead worker behind a healthy answer": (Probe(200, ("tiny",)), 1, "1 of 2 workers are alive"),
    "too many workers": (Probe(200, ("tiny",)), 3, "3 of 2 workers are alive"),
}


@pytest.mark.parametrize("name", JUDGED)
def test_judge(name: str) -> None:
    probed, alive, reason = JUDGED[name]
    verdict = judge(configure(), probed, alive)
    assert (verdict.ready, verdict.reason) == (reason == "", reason)
    assert (verdict.workers_alive, verdict.workers_expected) == (alive, 2)


SLOW = Probe(None, error="the engine did not answer within 10 s", silent=True)
WELL = Probe(200, ("tiny",))
STEADY: dict[str, tuple[list[tuple[Probe, int]], list[bool]]] = {
    "one slow answer": ([(WELL, 2), (SLOW, 2), (WELL, 2)], [True, True, True]),
    "three in a row": ([(WELL, 2), (SLOW, 2), (SLOW, 2), (SLOW, 2)], [True, True, True, False]),
    "not in a row": ([(WELL, 2), *[(SLOW, 2), (SLOW, 2), (WELL, 2)] * 2], [True] * 7),
    "an answer that says dead": ([(WELL, 2), (Probe(503, error="/health answers 503"), 2)], [True, False]),
    "nobody listens": ([(WELL, 2), (Probe(None, error="the engine does not listen"), 2)], [True, False]),
    "a slow answer and a dead worker": ([(WELL, 2), (SLOW, 1)], [True, False]),
    "a slow answer before the first good one": ([(SLOW, 2), (WELL, 2)], [False, True]),
    "a slow answer after a bad one": ([(Probe(503, error="dead"), 2), (SLOW, 2)], [False, False]),
}


@pytest.mark.parametrize("name", STEADY)
def test_patience(name: str) -> None:
    probes, ready = STEADY[name]
    patience, verdict, verdicts = health.Patience(), health.Health(False, "", (), 2, 0), []
    for now, (probed, alive) in enumerate(probes):
        seen = judge(configure(), probed, alive)
        verdict = patience.judge(verdict, probed, seen, float(now))
        verdicts.append(verdict.ready)
    assert verdicts == ready


def test_silence_is_measured_from_the_last_answer() -> None:
    patience, well = health.Patience(), judge(configure(), WELL, 2)
    patience.judge(well, SLOW, well, 5.0)
    assert patience.silent_seconds(500.0) == 0, "it has never answered: that is the start-up time-out's business"
    patience.judge(well, WELL, well, 10.0)
    patience.judge(well, SLOW, well, 20.0)
    assert patience.silent_seconds(25.0) == 15


def test_a_closed_port_is_no_answer() -> None:
    patience, well = health.Patience(), judge(configure(), WELL, 2)
    patience.judge(well, WELL, well, 10.0)
    patience.judge(well, Probe(None, error="the engine does not listen"), well, 20.0)
    assert patience.silent_seconds(25.0) == 15


def test_an_engine_is_dead_until_it_answers_otherwise() -> None:
    patience, well = health.Patience(), judge(configure(), WELL, 2)
    dead = []
    for probed in (WELL, Probe(503, error="/health answers 503"), Probe(None, error="refused"), SLOW, WELL):
        patience.judge(well, probed, well, 0.0)
        dead.append(patience.dead)
    assert dead == [False, True, True, True, False]


ANSWERS: dict[str, tuple[dict[str, tuple[int, bytes]], Probe]] = {
    "healthy": ({"/health": (200, b""), "/v1/models": (200, b'{"data": [{"id": "tiny"}]}')}, Probe(200, ("tiny",))),
    "dead": ({"/health": (503, b"")}, Probe(503, error="/health answers 503")),
    "models refused": (
        {"/health": (200, b""), "/v1/models": (401, b"")},
        Probe(200, error="/v1/models answers 401"),
    ),
    "models are no JSON": (
        {"/health": (200, b""), "/v1/models": (200, b"<html>")},
        Probe(200, error="/v1/models answers something that is not a list of models"),
    ),
    "models are a list": (
        {"/health": (200, b""), "/v1/models": (200, b"[1]")},
        Probe(200, error="/v1/models answers something that is not a list of models"),
    ),
}


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[int]:
    answers: dict[str, tuple[int, bytes]] = request.param

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, body = answers[self.path]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("engine", "expected"), [pytest.param(*case, id=name) for name, case in ANSWERS.items()], indirect=["engine"]
)
def test_probe(engine: int, expected: Probe) -> None:
    assert health.probe(configure(port=engine), "key") == expected


def test_probe_of_a_hung_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PROBE_TIMEOUT_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        probed = health.probe(configure(port=listener.getsockname()[1]), "key")
    assert probed == Probe(None, error="the engine did not answer within 0.05 s", silent=True)


def test_probe_of_nothing() -> None:
    assert health.probe(configure(port=free_port()), "key") == Probe(None, error="the engine does not listen")


METRICS = {
    "idle": (
        b'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0",model_name="a b"} 0.0\n'
        b'vllm:num_requests_waiting{engine="0",model_name="a b"} 0.0\n',
        0,
    ),
    "several engines": (
        b'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 1.0\n'
        b'vllm:num_requests_waiting{engine="1"} 4.0\nvllm:num_requests_waiting_by_reason{engine="1"} 4.0\n',
        7,
    ),
    "no statistics": (b"python_gc_objects_collected_total 1.0\n", None),
    "nonsense": (b"vllm:num_requests_running many\n", None),
}


@pytest.mark.parametrize(
    ("engine", "expected"),
    [pytest.param({"/metrics": (200, body)}, expected, id=name) for name, (body, expected) in METRICS.items()]
    + [pytest.param({"/metrics": (404, b"vllm:num_requests_running 1\n")}, None, id="refused")],
    indirect=["engine"],
)
def test_requests_in_flight(engine: int, expected: int | None) -> None:
    assert health.requests_in_flight(configure(port=engine)) == expected


def test_requests_in_flight_of_nothing() -> None:
    assert health.requests_in_flight(configure(port=free_port())) is None


COUNTERS = {
    "control groups 2": ("low 0\noom 3\noom_kill 2\noom_group_kill 1\n", 2),
    "control groups 1": ("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n", 5),
    "nothing": ("", 0),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_oom_kills(name: str, tmp_path: Path) -> None:
    text, expected = COUNTERS[name]
    (tmp_path / "events").write_text(text)
    assert memory.oom_kills((tmp_path / "absent", tmp_path / "events")) == expected


NODES = ("pod-a (10.0.0.1)", "pod-b (10.0.0.2)")
SAID = "without saying why: look for an out-of-memory kill or a lost node"
LOST = {
    # reason and line of the cause, more lines: reason and message then
    "one": (
        ("WorkerDied", "RayWorkerProc rank=[1] died unexpectedly", []),
        ("WorkerDied", f"the worker of rank 1 on pod-b (10.0.0.2) died {SAID}"),
    ),
    "both": (
        ("WorkerDied", "RayWorkerProc rank=[0, 1] died unexpectedly", []),
        ("WorkerDied", f"the worker of rank 0 on pod-a (10.0.0.1), rank 1 on pod-b (10.0.0.2) died {SAID}"),
    ),
    "told by another line": (
        ("WorkerDied", "ActorDiedError", ["a line", "ERROR RayWorkerProc rank=[0] died unexpectedly, shutting down"]),
        ("WorkerDied", f"the worker of rank 0 on pod-a (10.0.0.1) died {SAID}"),
    ),
    "a node": (
        ("RayConnectionLost", "Raylet is terminated", ["RayWorkerProc rank=[1] died unexpectedly"]),
        (
            "WorkerDied",
            "the worker of rank 1 on pod-b (10.0.0.2) died with its Ray node: look at that pod and its node",
        ),
    ),
    "the head": (
        ("RayConnectionLost", "failed to connect to GCS", ["RayWorkerProc rank=[0, 1] died unexpectedly"]),
        ("RayConnectionLost", "as it was"),
    ),
    "a rank that is not known": (("WorkerDied", "RayWorkerProc rank=[7] died", []), ("WorkerDied", "as it was")),
    "no rank": (("WorkerDied", "ActorDiedError", []), ("WorkerDied", "as it was")),
    "another reason": (("EngineExited", "RayWorkerProc rank=[1] died", []), ("EngineExited", "as it was")),
}


def test_dead_node_is_named() -> None:
    lost = Cause("RayConnectionLost", "as it was", "")
    told = lost_worker.name_nodes(lost, ["RayWorkerProc rank=[0, 1] died"], NODES, (NODES[1],))
    assert told.reason == "WorkerDied"
    assert told.message == f"the worker of rank 1 on {NODES[1]} died with its Ray node: look at that pod and its node"
    several_ranks = lost_worker.name_nodes(lost, [], (), (NODES[1],))
    assert several_ranks.message == f"workers on {NODES[1]} died with its Ray node: look at that pod and its node"
    other = Cause("ModelInvalid", "as it was", "")
    assert lost_worker.name_nodes(other, [], NODES, (NODES[1],)) == other


@pytest.mark.parametrize("name", LOST)
def test_lost_worker_is_placed(name: str) -> None:
    (reason, line, lines), expected = LOST[name]
    cause = lost_worker.name_nodes(Cause(reason, "as it was", line), lines, NODES)
    assert (cause.reason, cause.message) == expected
