"""The tiny model's files are what the libraries read: checked here by the formats' own rules, without the libraries."""

import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from e2e.images.spec import REPOSITORY

SCRIPT = REPOSITORY / "images/engine-cpu/tiny_model.py"


def write(folder: Path) -> Path:
    subprocess.run([sys.executable, "-I", str(SCRIPT), str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "some" / "tiny")


def read_json(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def read_safetensors(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    del header["__metadata__"]
    return header, content[8 + length :]


def test_the_same_bytes_every_time(model: Path, tmp_path: Path) -> None:
    again = write(tmp_path / "again")
    files = sorted(path.name for path in model.iterdir())
    assert files == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for name in files:
        assert (again / name).read_bytes() == (model / name).read_bytes(), name


def test_the_tensors_fill_the_file_without_gaps(model: Path) -> None:
    header, data = read_safetensors(model / "model.safetensors")
    end = 0
    for name, tensor in header.items():
        assert tensor["data_offsets"][0] == end, name
        end = tensor["data_offsets"][1]
        assert end - tensor["data_offsets"][0] == 4 * math.prod(tensor["shape"]), name
    assert end == len(data)


def test_the_tensors_are_those_that_the_configuration_describes(model: Path) -> None:
    config = read_json(model / "config.json")
    header, _ = read_safetensors(model / "model.safetensors")
    hidden, inner = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    assert header["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], hidden]
    assert header["lm_head.weight"]["shape"] == [config["vocab_size"], hidden]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for projection in "qkv":
            assert header[f"{prefix}.self_attn.{projection}_proj.weight"]["shape"] == [inner, hidden]
        assert header[f"{prefix}.self_attn.o_proj.weight"]["shape"] == [hidden, inner]
        assert header[f"{prefix}.mlp.down_proj.weight"]["shape"] == [hidden, config["intermediate_size"]]
    assert len(header) == 3 + 9 * config["num_hidden_layers"]


def test_every_byte_is_a_token_and_ids_are_dense(model: Path) -> None:
    vocabulary = read_json(model / "tokenizer.json")["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    assert len(vocabulary) == read_json(model / "config.json")["vocab_size"]
    single = [token for token in vocabulary if len(token) == 1]
    assert len(single) == 256
    assert all(token.isprintable() for token in single if token != "\u00ad")


def test_only_words_can_come_out(model: Path) -> None:
    vocabulary = read_json(model / "tokenizer.json")["model"]["vocab"]
    header, data = read_safetensors(model / "model.safetensors")
    start, _ = header["lm_head.weight"]["data_offsets"]
    row = 4 * read_json(model / "config.json")["hidden_size"]
    for token, index in vocabulary.items():
        silent = not any(data[start + index * row : start + (index + 1) * row])
        assert silent == (not token.startswith("Ġ") or token == "Ġ"), token


def test_a_chat_template_is_there(model: Path) -> None:
    assert "add_generation_prompt" in read_json(model / "tokenizer_config.json")["chat_template"]
