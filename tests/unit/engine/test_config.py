from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_ray_engine.config import ENVIRONMENT_VARIABLE, ConfigError, from_environment, parse

from .conftest import DATA, configure


def test_reads_every_field() -> None:
    config = configure(revision="v2", args=["--max-model-len", "256"], pipeline=3, stopGraceSeconds=2.5)
    assert config.instance_id == DATA["instanceId"]
    assert config.revision == "v2"
    assert config.args == ("--max-model-len", "256")
    assert config.world_size == 6
    assert config.stop_grace_seconds == 2.5


def test_data_parallel_ranks() -> None:
    external = {"dataMode": "External", "dataRank": 1, "dataAddress": "10.0.0.1", "dataRpcPort": 9100}
    base = DATA["instanceId"]
    for config, ranks, workers, ids, engine_id in [
        (configure(pipeline=2), (0,), 4, [base], base),
        (configure(data=3), (0, 1, 2), 6, [f"{base}_dp0", f"{base}_dp1", f"{base}_dp2"], base),
        (configure(data=3, **external), (1,), 2, [f"{base}_dp1"], f"{base}_dp1"),
    ]:
        assert (config.ranks, config.workers, config.engine_id) == (ranks, workers, engine_id)
        assert [config.rank_id(rank) for rank in config.ranks] == ids


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "text for a number": ({"port": "8000"}, "port must be an integer from 1 to 65535"),
    "truth value for a number": ({"tensor": True}, "tensor must be an integer"),
    "zero tensor": ({"tensor": 0}, "tensor must be an integer from 1"),
    "negative pipeline": ({"pipeline": -1}, "pipeline must be an integer from 1"),
    "port too high": ({"controlPort": 65536}, "controlPort must be an integer"),
    "the same port twice": ({"controlPort": 8000}, "controlPort must differ from port"),
    "args as one text": ({"args": "--max-model-len 256"}, "args must be a list of strings"),
    "args with a number": ({"args": ["--max-model-len", 256]}, "args must be a list of strings"),
    "empty model": ({"model": ""}, "model must be a string that is not empty"),
    "no instance id": ({"instanceId": None}, "instanceId must be a string"),
    "infinite grace": ({"stopGraceSeconds": float("inf")}, "stopGraceSeconds must be a positive number"),
    "not a number": ({"stopGraceSeconds": float("nan")}, "stopGraceSeconds must be a positive number"),
    "zero timeout": ({"startupTimeoutSeconds": 0}, "startupTimeoutSeconds must be a positive number"),
    "a word for a truth value": ({"standby": "false"}, "standby must be true or false"),
    "zero data": ({"data": 0}, "data must be an integer from 1"),
    "unknown mode": ({"dataMode": "Hybrid"}, "dataMode must be Internal or External"),
    "rank without External": ({"data": 2, "dataRank": 0}, "dataRank, dataAddress and dataRpcPort need dataMode"),
    "External alone": ({"data": 2, "dataMode": "External"}, "dataMode External needs"),
    "External rank too high": (
        {"data": 2, "dataMode": "External", "dataRank": 2, "dataAddress": "a", "dataRpcPort": 1},
        "dataMode External needs",
    ),
    "unknown field": ({"tensorParallel": 2}, "unknown field tensorParallel"),
    "other version": ({"version": 2}, "version must be 1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_wrong_values_are_refused_with_the_field(name: str) -> None:
    change, message = CHANGES[name]
    with pytest.raises(ConfigError, match=message):
        configure(**change)


@pytest.mark.parametrize("field", ["instanceId", "model", "servedName", "port", "tensor", "slotResource"])
def test_missing_fields_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} is missing"):
        parse(json.dumps({name: value for name, value in DATA.items() if name != field}))


@pytest.mark.parametrize(("text", "message"), [("", "not JSON"), ("{", "not JSON"), ("[]", "must be a JSON object")])
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_environment({ENVIRONMENT_VARIABLE: text})


def test_absent_configuration_is_said() -> None:
    with pytest.raises(ConfigError, match="VLLM_RAY_ENGINE_CONFIG is not set"):
        from_environment({})
