from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path

import pytest

from vllm_ray_engine import launch, log
from vllm_ray_engine.launcher import output
from vllm_ray_engine.launcher.output import EngineOutput


class Pipe:
    def __init__(self) -> None:
        read, self.write = os.pipe()
        self.sink = io.BytesIO()
        self.file = os.fdopen(read, "rb")
        self.output = EngineOutput(self.file, self.sink)

    def close(self) -> None:
        os.close(self.write)
        self.output.finish(5)
        self.file.close()


def test_passes_on_everything_and_keeps_lines() -> None:
    pipe = Pipe()
    os.write(pipe.write, b"one\ntw")
    os.write(pipe.write, b"o\nno end")
    pipe.close()
    assert pipe.sink.getvalue() == b"one\ntwo\nno end"
    assert pipe.output.lines() == ["one", "two", "no end"]


def test_memory_is_bounded() -> None:
    pipe = Pipe()
    for _ in range(3):
        os.write(pipe.write, b"\n" * output.MAX_LINES)
    os.write(pipe.write, b"x" * 10 * output.MAX_LINE_BYTES)
    pipe.close()
    lines = pipe.output.lines()
    assert len(lines) == output.MAX_LINES
    assert len(lines[-1]) <= output.MAX_LINE_BYTES


def test_bytes_that_are_not_text() -> None:
    pipe = Pipe()
    os.write(pipe.write, b"\xff\xfe\n")
    pipe.close()
    assert pipe.output.lines() == ["��"]


def test_lines_since() -> None:
    pipe = Pipe()
    os.write(pipe.write, b"one\n")
    pipe.close()
    assert pipe.output.lines(time.monotonic()) == []


def test_nothing_is_passed_on_after_the_finish() -> None:
    """Another process may hold the pipe; the result line is to stay the last."""
    pipe = Pipe()
    pipe.output.finish(0.05)
    os.write(pipe.write, b"late\n")
    pipe.close()
    assert pipe.sink.getvalue() == b""


def test_a_full_disk_does_not_stop_the_reading() -> None:
    read, write = os.pipe()
    with Path("/dev/full").open("wb", buffering=0) as sink, os.fdopen(read, "rb") as pipe:
        engine_output = EngineOutput(pipe, sink)
        os.set_blocking(write, False)
        for number in range(100):
            os.write(write, b"x" * 10000 + b"\n")
            deadline = time.monotonic() + 5
            while len(engine_output.lines()) <= number:
                assert time.monotonic() < deadline, f"the reader stopped after {number} lines"
                time.sleep(0.001)
        os.close(write)
        engine_output.finish(5)


def test_what_we_say_ourselves_may_be_lost_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    with io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True) as full:
        monkeypatch.setattr(sys, "stdout", full)
        log.say("something")
        launch.print_result(None)
        monkeypatch.undo()
