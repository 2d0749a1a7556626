"""One fault after another: settle, watch, break, wait for the healing, tell."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict

from e2e import environment
from e2e.chaos import outcome
from e2e.chaos.faults import Fault, Hits
from e2e.chaos.outcome import Outcome, Request, Seen, Traffic
from e2e.chaos.scene import NAME, Scene, engine_cores
from e2e.chaos.watching import Watching
from e2e.install import NAMESPACE, RELEASE
from e2e.kube import CommandError
from e2e.serving import describe
from e2e.waiting import say, wait_for

QUIET_SECONDS = 5.0  # before a fault, so that clients are seen to be served, and after the healing
SERVED_SECONDS = 180.0
HEAL_SECONDS = 900.0
POLL_SECONDS = 2.0
LOOK_SECONDS = 0.3
RECORDS = environment.ROOT / ".chaos"  # what was seen, a file for each fault, to ask why


def run(fault: Fault, scene: Scene) -> Outcome:
    """Do one fault to the scene and return what came of it."""
    say(f"{fault.name}: {fault.what}")
    watching = Watching(scene)
    watching.start()
    try:
        wait_for("both clients to be served", lambda: _served(watching), seconds=SERVED_SECONDS)
        _pause(QUIET_SECONDS)
        uid = scene.uid(scene.pod)
        hit, began = engine_cores(uid), time.time()
        try:
            return _broken(fault, scene, watching, _Gone(uid, hit, began), began)
        finally:
            _record(fault, scene, watching, began)
    finally:
        watching.stop()


def _broken(fault: Fault, scene: Scene, watching: Watching, gone: _Gone, began: float) -> Outcome:
    victim, notes = scene.victim["attempt"], list[str]()
    before = _latest(watching)
    _attempt(fault.inject, scene, notes)
    say(f"{fault.name}: done after {time.time() - began:.1f} s")

    def healed() -> bool:
        now = _asked(scene)
        if now is None or not now.ready:
            return False
        changed = outcome.replaced(before.attempts, now.attempts)
        return {Hits.NOBODY: True, Hits.ONE: scene.victim["index"] in changed, Hits.ALL: len(changed) > 1}[fault.hits]

    mended = None
    if fault.mend is not None:
        if fault.heals_broken:
            _wait_healed(healed, watching, fault.hold)
        else:
            _pause(began + fault.hold - time.time())
        if not fault.heals_broken and gone.seconds is None and fault.hits is Hits.ONE:
            notes.append("the engine that was hit still ran until then")
        mended = time.time() - began
        _attempt(fault.mend, scene, notes)
        say(f"{fault.name}: undone after {mended:.1f} s")
    if not _wait_healed(healed, watching, HEAL_SECONDS):
        notes.append(f"last seen: {describe({'status': _latest(watching).status})}")
    _pause(QUIET_SECONDS)
    ended = time.time()
    gone.stop()
    seen, known = list(watching.seen), set(before.failures)
    endpoint = victim["endpoint"]
    return Outcome(
        fault=fault.name,
        out=outcome.out_of_traffic(watching.traffic, f"{endpoint['address']}:{endpoint['port']}", began),
        named=outcome.named(seen, known, began),
        mended=mended,
        ready=outcome.ready_again(seen, began),
        replaced=outcome.replaced(before.attempts, _latest(watching).attempts),
        engine_gone=gone.seconds,
        service=outcome.tally(watching.service, began, ended),
        other=None if fault.hits is Hits.ALL else outcome.tally(watching.other, began, ended),
        load=os.getloadavg()[0],
        reused=outcome.reused(seen),
        notes=tuple(notes),
    )


def _record(fault: Fault, scene: Scene, watching: Watching, began: float) -> None:
    """Keep all that was seen, with times in seconds after the fault, and what the operator logged."""
    found: dict[str, Sequence[Seen | Traffic | Request]] = {
        "status": watching.seen, "slice": watching.traffic, "service": watching.service, "other": watching.other
    }  # fmt: skip
    rows = [{"what": what, **asdict(row), "at": row.at - began} for what, seen in found.items() for row in list(seen)]
    RECORDS.mkdir(exist_ok=True)
    lines = (json.dumps(row, default=sorted) + "\n" for row in sorted(rows, key=lambda row: row["at"]))
    (RECORDS / f"{fault.name}.jsonl").write_text("".join(lines))
    with suppress(CommandError):
        log = scene.kube.kubectl("logs", "-n", NAMESPACE, f"deploy/{RELEASE}", "--tail=2000")
        (RECORDS / f"{fault.name}.log").write_text(log)


class _Gone:
    """Looks on the machine itself for the end of the engine cores that were hit."""

    def __init__(self, uid: str, pids: set[int], began: float) -> None:
        self.seconds: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(uid, pids, began), daemon=True)
        self._thread.start()

    def _look(self, uid: str, pids: set[int], began: float) -> None:
        stopped = False
        while True:
            if not pids & engine_cores(uid):
                self.seconds = time.time() - began
                return
            if stopped:
                return
            stopped = self._stopped.wait(LOOK_SECONDS)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def _attempt(act: Callable[[Scene], None], scene: Scene, notes: list[str]) -> None:
    """Carry out a part; what does not work is told, and what came of the rest is measured all the same."""
    try:
        act(scene)
    except (CommandError, TimeoutError) as error:
        notes.append(f"{act.__name__}: {error}"[:300])


def _wait_healed(healed: Callable[[], bool], watching: Watching, seconds: float) -> bool:
    def describe_latest() -> str:
        return describe({"status": _latest(watching).status})

    try:
        wait_for("the healing", healed, seconds=seconds, describe=describe_latest, poll=POLL_SECONDS)
    except TimeoutError:
        return False
    return True


def _served(watching: Watching) -> bool:
    clients = (watching.service, watching.other)
    return bool(watching.seen) and all(any(not r.error for r in requests) for requests in clients)


def _asked(scene: Scene) -> Seen | None:
    """Return what the API server says now; None while it does not answer. A watch may be the last to know."""
    try:
        return Seen.of(time.time(), scene.kube.get("vd", NAME))
    except CommandError:
        return None


def _latest(watching: Watching) -> Seen:
    return watching.seen[-1]


def _pause(seconds: float) -> None:
    time.sleep(max(seconds, 0.0))
