"""Owned arguments in every spelling that vLLM's own parser accepts; one import of vLLM serves all cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from vllm_ray_engine.diagnosis import root_cause

from .conftest import ROOT

REFUSED = {
    "long": (["--tensor-parallel-size", "4"], "spec.parallelism.tensor"),
    "equals sign": (["--tensor-parallel-size=4"], "spec.parallelism.tensor"),
    "short": (["-tp", "4"], "spec.parallelism.tensor"),
    "short with equals sign": (["-tp=4"], "spec.parallelism.tensor"),
    "underscores": (["--tensor_parallel_size", "4"], "spec.parallelism.tensor"),
    "abbreviation": (["--tensor-par", "4"], "spec.parallelism.tensor"),
    "abbreviation with underscore": (["--tensor_par=4"], "spec.parallelism.tensor"),
    "repeated, the last counts": (["-tp", "2", "-tp", "4"], "spec.parallelism.tensor"),
    "config file": (["--config", "tensor.yaml"], "spec.parallelism.tensor"),
    "pipeline": (["-pp", "2"], "spec.parallelism.pipeline"),
    "port": (["--port", "9000"], "spec.engine.port"),
    "port in a config file": (["--config", "port.yaml"], "spec.engine.port"),
    "host": (["--host", "127.0.0.1"], "spec.engine.port"),
    "served name": (["--served-model-name", "other"], "spec.model.servedName"),
    "served name and an alias": (["--served_model_name", "tiny", "alias"], "spec.model.servedName"),
    "model": (["--model", "other"], "spec.model.uri"),
    "model with equals sign": (["--model=other"], "spec.model.uri"),
    "model in a config file": (["--config", "model.yaml"], "spec.model.uri"),
    "revision": (["--revision", "main"], "spec.model.revision"),
    "executor": (["--distributed-executor-backend", "mp"], "Ray"),
    "data parallel size": (["-dp", "2"], "not supported yet"),
    "data parallel rank": (["--data-parallel-rank", "0"], "not supported yet"),
    "data parallel backend": (["--data-parallel-backend=ray"], "not supported yet"),
    "headless": (["--headless"], "spec.parallelism"),
    "context parallel": (["-pcp", "2"], "not supported yet"),
    "worker class": (["--worker-cls", "my.Worker"], "--worker-extension-cls"),
    "rank": (["-r", "1"], "spec.parallelism"),
    "master": (["--master-addr", "10.0.0.1"], "spec.parallelism"),
    "TLS": (["--ssl-keyfile", "key.pem"], "plain HTTP"),
    "socket": (["--uds", "engine.sock"], "plain HTTP"),
}

ACCEPTED = {
    "nothing": [],
    "other arguments": ["--max-model-len", "256", "--enforce-eager"],
    "owned, with the operator's own value": ["-tp", "2", "--port=8000", "--served-model-name", "tiny"],
    "config file without owned values": ["--config", "other.yaml"],
    "json": ["--compilation-config", '{"mode": 0}', "-cc.backend=eager"],
}

INVALID = {
    "unknown flag": (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    "a word too many": (["word"], "unrecognized arguments: word"),
    "wrong type": (["--max-num-seqs", "many"], "--max-num-seqs"),
}

SCRIPT = """
import json, sys
from vllm_ray_engine import arguments, config, reasons
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser(prog="vllm")
ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
base = json.loads(sys.argv[1])
for case in json.loads(sys.argv[2]):
    try:
        final = arguments.check(parser.parse_args, config.parse(json.dumps(base | {"args": case})))
        answer = {"tensor": final.tensor_parallel_size, "length": final.max_model_len}
    except reasons.EngineFailure as failure:
        answer = failure.cause.as_dict()
    except SystemExit as end:
        answer = {"exit": end.code}
    print("ANSWER", json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], str]]:
    """Return for each case what the check said, and what the parser printed before it."""
    folder = tmp_path_factory.mktemp("arguments")
    (folder / "tensor.yaml").write_text("tensor-parallel-size: 4\n")
    (folder / "port.yaml").write_text("port: 9000\n")
    (folder / "model.yaml").write_text("model: other\n")
    (folder / "other.yaml").write_text("max-model-len: 128\nenforce-eager: true\n")
    cases = {name: args for name, (args, _) in REFUSED.items()} | ACCEPTED
    cases |= {name: args for name, (args, _) in INVALID.items()}
    base = {
        "version": 1, "instanceId": "i", "deployment": "d", "replica": 0, "attempt": 1, "model": "/models/tiny",
        "servedName": "tiny", "port": 8000, "controlPort": 8070, "tensor": 2, "pipeline": 1, "slotResource": "s",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(base), json.dumps(list(cases.values()))],
        env=os.environ | {"PYTHONPATH": str(ROOT / "operator")}, cwd=folder, text=True, timeout=240, check=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    found, printed = [], ""
    for line in done.stdout.splitlines():
        if line.startswith("ANSWER "):
            found.append((json.loads(line.removeprefix("ANSWER ")), printed))
            printed = ""
        else:
            printed += line + "\n"
    assert len(found) == len(cases), done.stdout
    return dict(zip(cases, found, strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_owned_argument_is_refused_with_what_to_use(name: str, answers: dict[str, Any]) -> None:
    answer, printed = answers[name]
    assert answer.get("reason") == "OwnedArgument", (answer, printed)
    assert REFUSED[name][1] in answer["message"]


@pytest.mark.parametrize("name", ACCEPTED)
def test_other_arguments_pass(name: str, answers: dict[str, Any]) -> None:
    answer, printed = answers[name]
    assert answer.get("tensor") == 2, (answer, printed)


@pytest.mark.parametrize("name", INVALID)
def test_what_vllm_refuses_is_a_stated_cause(name: str, answers: dict[str, Any]) -> None:
    answer, printed = answers[name]
    assert answer == {"exit": 2}
    cause = root_cause.find(printed.splitlines())
    assert cause is not None
    assert cause.reason == "InvalidArguments"
    assert INVALID[name][1] in cause.message
