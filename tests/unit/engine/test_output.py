from __future__ import annotations

import io
import os
import time

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
