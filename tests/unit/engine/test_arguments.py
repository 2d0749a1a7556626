"""The check of owned arguments against a small parser; the engine tests do the same with vLLM's."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

import pytest

from vllm_ray_engine import arguments
from vllm_ray_engine.reasons import OWNED_ARGUMENT, EngineFailure

from .conftest import configure


def parse(line: list[str]) -> Namespace:
    parser = ArgumentParser()
    serve = parser.add_subparsers().add_parser("serve")
    serve.add_argument("model_tag")
    serve.add_argument("--model", default="some/default")
    serve.add_argument("--host")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    serve.add_argument("--pipeline-parallel-size", type=int, default=1)
    serve.add_argument("--data-parallel-size", "-dp", type=int, default=1)
    serve.add_argument("--data-parallel-size-local", type=int)
    serve.add_argument("--data-parallel-backend", default="mp")
    serve.add_argument("--data-parallel-rank", type=int)
    serve.add_argument("--data-parallel-address")
    serve.add_argument("--data-parallel-rpc-port", type=int)
    serve.add_argument("--shutdown-timeout", type=int, default=0)
    serve.add_argument("--distributed-executor-backend")
    serve.add_argument("--served-model-name", nargs="+")
    serve.add_argument("--revision")
    serve.add_argument("--max-model-len", type=int)
    serve.add_argument("--middleware", action="append", default=[])
    serve.add_argument("--ssl-ciphers", action="append", default=[])
    return parser.parse_args(line)


def test_command_line_holds_the_users_arguments_verbatim_at_the_end() -> None:
    config = configure(revision="v2", args=["--a b", "$(c)"])
    line = arguments.command_line(config)
    assert line[:2] == ["serve", "org/model"]
    assert line[-2:] == ["--a b", "$(c)"]
    assert "--revision=v2" in line
    assert not any(argument.startswith("--revision") for argument in arguments.command_line(configure()))


def test_values_that_begin_with_a_dash_stay_values() -> None:
    assert arguments.check(parse, configure(servedName="-odd")).served_model_name == ["-odd"]


REFUSED = {
    "tensor": (["-tp", "4"], "--tensor-parallel-size (here 4)", "spec.parallelism.tensor"),
    "abbreviated": (["--pipe", "3"], "--pipeline-parallel-size (here 3)", "spec.parallelism.pipeline"),
    "a family": (["--data-parallel-size-local", "0"], "--data-parallel-size-local (here 0)", "not supported yet"),
    "appended": (["--ssl-ciphers", "a"], "--ssl-ciphers (here ['a'])", "plain HTTP"),
    "model": (["--model=x"], "--model (here '--model=x')", "spec.model.uri"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_owned_argument(name: str) -> None:
    args, flag, instead = REFUSED[name]
    with pytest.raises(EngineFailure) as caught:
        arguments.check(parse, configure(args=args))
    assert caught.value.cause.reason == OWNED_ARGUMENT
    assert flag in caught.value.cause.message
    assert instead in caught.value.cause.message


EXTERNAL = {"data": 2, "dataMode": "External", "dataRank": 1, "dataAddress": "10.0.0.1", "dataRpcPort": 9100}


def test_ranks_that_vllm_makes() -> None:
    final = arguments.check(parse, configure(data=2, args=["-dp", "2"]))
    assert (final.data_parallel_size, final.data_parallel_size_local, final.data_parallel_backend) == (2, 1, "ray")
    assert final.data_parallel_rank is None


def test_rank_that_is_launched_apart() -> None:
    final = arguments.check(parse, configure(**EXTERNAL))
    assert (final.data_parallel_size, final.data_parallel_rank) == (2, 1)
    assert (final.data_parallel_address, final.data_parallel_rpc_port) == ("10.0.0.1", 9100)
    assert (final.data_parallel_size_local, final.data_parallel_backend) == (None, "mp")


@pytest.mark.parametrize(
    "changes", [{"data": 2, "args": ["-dp", "3"]}, EXTERNAL | {"args": ["--data-parallel-backend=ray"]}]
)
def test_owned_argument_of_ranks(changes: dict[str, Any]) -> None:
    with pytest.raises(EngineFailure) as caught:
        arguments.check(parse, configure(**changes))
    assert caught.value.cause.reason == OWNED_ARGUMENT


def test_time_to_finish_requests_is_the_users_to_change() -> None:
    assert arguments.check(parse, configure(stopGraceSeconds=20)).shutdown_timeout == 17
    assert arguments.check(parse, configure(stopGraceSeconds=2)).shutdown_timeout == 1
    assert arguments.check(parse, configure(args=["--shutdown-timeout=0"])).shutdown_timeout == 0


def test_middleware_is_the_users() -> None:
    assert arguments.check(parse, configure(args=["--middleware=a.B", "--middleware=c.d"])).middleware == ["a.B", "c.d"]


def test_value_that_the_parser_takes_from_elsewhere() -> None:
    """As vLLM's `--config` does: it stands before the line's own arguments, which then win without a word."""

    def with_file(line: list[str]) -> Namespace:
        if "--config" not in line:
            return parse(line)
        index = line.index("--config")
        return parse([*line[:2], "--tensor-parallel-size=4", *line[2:index], *line[index + 2 :]])

    with pytest.raises(EngineFailure, match=r"spec\.parallelism\.tensor"):
        arguments.check(with_file, configure(args=["--config", "f.yaml"]))


def test_owned_argument_with_the_operators_value_is_harmless() -> None:
    final = arguments.check(parse, configure(args=["-tp", "2", "--served-model-name", "tiny", "--max-model-len", "9"]))
    assert (final.tensor_parallel_size, final.max_model_len) == (2, 9)
