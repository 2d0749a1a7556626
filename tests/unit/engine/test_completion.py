"""An engine that answers health checks and completes nothing is found; one that is busy, idle or slow is left alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import pytest

from vllm_ray_engine.config import EngineConfig
from vllm_ray_engine.launcher.completion import UNPROVEN, Completions, Engine, Vitals, parse_vitals
from vllm_ray_engine.tally import Work

from .conftest import configure

PERIOD, TIMEOUT = 30.0, 60.0
LOOK = PERIOD / 3


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeEngine(Engine):
    """What it says can be changed between steps. A completion that fails takes all of its time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.asked: list[float] = []
        self.fails = ""
        self.seen: Vitals | None = Vitals(("0",), 0)
        self.todo: Work | None = Work(0, 0.0)
        self.paused = False
        self.moves_when_asked = False

    def complete(self) -> str:
        self.asked.append(self.clock.now)
        self.clock.now += TIMEOUT if self.fails else 0.1
        if self.moves_when_asked:
            self.step()
        return self.fails

    def vitals(self) -> Vitals | None:
        return self.seen

    def work(self) -> Work | None:
        return self.todo

    def is_paused(self) -> bool:
        return self.paused

    def step(self) -> None:
        """Some progress."""
        self.seen = Vitals((str(self.clock.now),), 1)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(clock: Clock) -> FakeEngine:
    return FakeEngine(clock)


@pytest.fixture
def completions(clock: Clock, engine: FakeEngine) -> Completions:
    """Of an engine that has completed its first request."""
    made = Completions(configured(), engine)
    made.step(clock)
    made.step(clock)
    engine.asked.clear()
    return made


def configured(**changes: Any) -> EngineConfig:
    probe = {"probePeriodSeconds": PERIOD, "probeTimeoutSeconds": TIMEOUT, "probeFailureThreshold": 2}
    return configure(**probe | changes)


def watch(completions: Completions, engine: FakeEngine, seconds: float) -> None:
    """Take steps for so long, as the thread does; what the engine says stays as it is."""
    end = engine.clock.now + seconds
    while engine.clock.now < end and not completions.stalled:
        engine.clock.now += LOOK
        completions.step(engine.clock)


def test_ready_only_after_a_first_completion(clock: Clock, engine: FakeEngine) -> None:
    completions = Completions(configured(), engine)
    assert completions.error == UNPROVEN
    engine.fails = "a completion of one token is answered with 500"
    for _ in range(5):
        completions.step(clock)
    assert completions.error == f"{UNPROVEN}: {engine.fails}"
    assert not completions.stalled, "that is the start-up time-out's business"
    engine.fails = ""
    completions.step(clock)
    assert completions.error == ""


def test_without_a_probe_nothing_is_asked(engine: FakeEngine) -> None:
    completions = Completions(configured(probePeriodSeconds=None), engine)
    assert completions.error == ""
    completions.run(lambda: True, Event())
    assert engine.asked == []


def test_an_idle_engine_is_left_alone(completions: Completions, engine: FakeEngine) -> None:
    watch(completions, engine, 3600)
    assert engine.asked == []


def test_a_busy_engine_proves_itself(completions: Completions, engine: FakeEngine) -> None:
    engine.todo = Work(8, 1.0)
    for _ in range(360):
        engine.clock.now += LOOK
        engine.step()
        completions.step(engine.clock)
    assert engine.asked == []


def test_a_wedged_engine_is_found_and_given_up(completions: Completions, engine: FakeEngine) -> None:
    wedged = engine.clock.now
    engine.todo, engine.fails = Work(1, wedged), "a completion of one token was not answered within 60 s"
    while not completions.error:
        watch(completions, engine, LOOK)
    assert engine.clock.now - wedged <= PERIOD + LOOK + TIMEOUT, "out of traffic"
    assert completions.error == f"{engine.fails}, and nothing has moved for {engine.clock.now - wedged:.0f} s"
    assert not completions.stalled
    watch(completions, engine, 600)
    assert completions.stalled
    assert engine.clock.now - wedged <= PERIOD + 2 * (LOOK + TIMEOUT)
    assert len(engine.asked) == 2


def test_clients_that_give_up_do_not_make_a_wedged_engine_idle(completions: Completions, engine: FakeEngine) -> None:
    engine.fails = "no answer"
    for _ in range(100):
        engine.clock.now += LOOK
        engine.todo = Work(0, engine.clock.now)  # each came and went between two looks
        completions.step(engine.clock)
        if completions.stalled:
            break
    assert completions.stalled
    assert len(engine.asked) == 2


def test_once_it_failed_it_is_not_well_because_nobody_asks_any_more(
    completions: Completions, engine: FakeEngine
) -> None:
    engine.todo, engine.fails = Work(1, 1.0), "no answer"
    while not completions.error:
        watch(completions, engine, LOOK)
    engine.todo = Work(0, 1.0)
    watch(completions, engine, LOOK)
    assert completions.stalled


def test_a_slow_client_is_no_wedge(completions: Completions, engine: FakeEngine) -> None:
    engine.todo = Work(1, 1.0)
    watch(completions, engine, 300)
    assert 5 <= len(engine.asked) <= 10
    assert (completions.error, completions.stalled) == ("", False)


@pytest.mark.parametrize("how", ["asleep", "paused"])
def test_one_that_rests_on_purpose_is_not_asked(completions: Completions, engine: FakeEngine, how: str) -> None:
    engine.todo, engine.fails = Work(3, 1.0), "no answer"
    engine.seen, engine.paused = Vitals(("0",), 3, resting=how == "asleep"), how == "paused"
    watch(completions, engine, 3600)
    assert (engine.asked, completions.error) == ([], "")


def test_what_moves_while_it_is_asked_is_busy(completions: Completions, engine: FakeEngine) -> None:
    engine.todo, engine.fails, engine.moves_when_asked = Work(3, 1.0), "no answer", True
    watch(completions, engine, 600)
    assert len(engine.asked) > 2
    assert (completions.error, completions.stalled) == ("", False)


def test_it_comes_back(completions: Completions, engine: FakeEngine) -> None:
    engine.todo, engine.fails = Work(1, 1.0), "no answer"
    while not completions.error:
        watch(completions, engine, LOOK)
    engine.fails = ""
    watch(completions, engine, LOOK)
    assert completions.error == ""
    engine.fails, asked = "no answer", len(engine.asked)
    watch(completions, engine, PERIOD - LOOK)
    assert len(engine.asked) == asked, "its time counts from anew"


def test_without_metrics_its_silence_is_no_sign(completions: Completions, engine: FakeEngine) -> None:
    engine.seen, engine.todo, engine.fails = None, Work(3, 1.0), "no answer"
    watch(completions, engine, 3600)
    assert (engine.asked, completions.error) == ([], "")


@pytest.mark.parametrize(("in_flight", "found"), [(0, False), (1, True)])
def test_without_a_count_the_engines_own_goes(
    completions: Completions, engine: FakeEngine, in_flight: int, found: bool
) -> None:
    engine.todo, engine.fails, engine.seen = None, "no answer", Vitals(("0",), in_flight)
    watch(completions, engine, 600)
    assert completions.stalled is found


METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_running{engine="1",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 4.0
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="weights_offloaded"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 12.0
vllm:prompt_tokens_created{engine="0",model_name="tiny"} 1.7960096527e+09
vllm:generation_tokens_total{engine="0",model_name="tiny"} 34.0
"""
OTHERS = {
    "a token": ("generation_tokens_total{engine=\"0\",model_name=\"tiny\"} 34.0", "generation_tokens_total{} 35.0"),
    "a prompt": ("prompt_tokens_total{engine=\"0\",model_name=\"tiny\"} 12.0", "prompt_tokens_total{} 13.0"),
    "a piece of a long prompt": ("0.25", "0.26"),
    "a request": ('"1",model_name="tiny"} 1.0', '"1",model_name="tiny"} 2.0'),
}  # fmt: skip


def test_vitals() -> None:
    seen = parse_vitals(METRICS)
    assert seen is not None
    assert (seen.in_flight, seen.resting, len(seen.signs)) == (7, False, 5)
    assert parse_vitals("\n".join(reversed(METRICS.splitlines()))) == seen, "their order says nothing"
    asleep = parse_vitals(METRICS.replace('"awake"} 1.0', '"awake"} 0.0'))
    assert asleep is not None
    assert asleep.resting
    assert parse_vitals("python_gc_objects_collected_total 1.0\n") is None


@pytest.mark.parametrize("name", OTHERS)
def test_progress_changes_the_signs(name: str) -> None:
    before, after = parse_vitals(METRICS), parse_vitals(METRICS.replace(*OTHERS[name]))
    assert before is not None
    assert after is not None
    assert before.signs != after.signs


class Http(ThreadingHTTPServer):
    """Answers every request as told, None with silence, and keeps the last one."""

    answer: tuple[int, bytes] | None = (200, b"{}")
    asked: tuple[str, str, str | None, Any] = ("", "", None, None)


class Handler(BaseHTTPRequestHandler):
    server: Http

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.server.asked = (self.command, self.path, self.headers["Authorization"], body and json.loads(body))
        if self.server.answer is None:
            time.sleep(2)
            return
        status, answer = self.server.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def http() -> Iterator[Http]:
    server = Http(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def asked_of(http: Http, seconds: float = 30) -> Engine:
    return Engine(configured(port=http.server_address[1], probeTimeoutSeconds=seconds), "the-key")


@pytest.mark.parametrize("status", [200, 400, 404, 429, 500, 501, 503])
def test_answers_to_a_completion(http: Http, status: int) -> None:
    http.answer = (status, b"{}")
    error = "a completion of one token is answered with 500" if status == 500 else ""
    assert asked_of(http).complete() == error
    assert http.asked[:3] == ("POST", "/v1/completions", "Bearer the-key")
    assert (http.asked[3]["model"], http.asked[3]["max_tokens"]) == ("tiny", 1)


def test_a_completion_without_an_answer(http: Http) -> None:
    http.answer = None
    assert asked_of(http, 0.5).complete() == "a completion of one token was not answered within 0.5 s"
    assert asked_of(http, 0.5).vitals() is None
    assert not asked_of(http, 0.5).is_paused()


def test_an_engine_without_dev_mode_cannot_be_paused(http: Http) -> None:
    assert not asked_of(http).is_paused()
    http.answer = (200, b'{"is_paused": true}')
    assert asked_of(http).is_paused()
    http.answer = (404, b"Not Found")
    assert not asked_of(http).is_paused()


def test_an_engine_that_does_not_listen() -> None:
    assert "broke off" in Engine(configured(port=1), "").complete()
