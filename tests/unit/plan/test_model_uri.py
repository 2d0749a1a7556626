from __future__ import annotations

import pytest

from vllm_ray_operator.plan.model_uri import ModelSource, parse

CASES = {
    "hf://Qwen/Qwen3-32B": ModelSource("Qwen/Qwen3-32B", "Qwen/Qwen3-32B"),
    "Qwen/Qwen3-32B": ModelSource("Qwen/Qwen3-32B", "Qwen/Qwen3-32B"),
    "gpt2": ModelSource("gpt2", "gpt2"),
    "file:///models/tiny": ModelSource("/models/tiny", "tiny"),
    "file:///models/tiny/": ModelSource("/models/tiny/", "tiny"),
    "pvc://weights/llama/8b": ModelSource("/models/weights/llama/8b", "8b", "weights"),
    "pvc://weights/llama/": ModelSource("/models/weights/llama", "llama", "weights"),
    "pvc://weights": ModelSource("/models/weights", "weights", "weights"),
    "s3://bucket/path/model": ModelSource("s3://bucket/path/model", "model"),
    "s3://bucket/path/model/": ModelSource("s3://bucket/path/model/", "model"),
}


@pytest.mark.parametrize("uri", CASES)
def test_parse(uri: str) -> None:
    assert parse(uri) == CASES[uri]


def test_a_claim_is_mounted_where_the_argument_points() -> None:
    source = parse("pvc://weights/llama")
    assert source.argument.startswith(source.mount_path + "/")
