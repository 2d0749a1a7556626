"""What the doctor sees: files, folders, addresses, ports, processes, and names in source."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from vllm_ray_engine import plugin
from vllm_ray_engine.diagnosis import facts, model_files, sources
from vllm_ray_engine.diagnosis.facts import Wanted

from .conftest import free_port


def safetensors(path: Path, *, missing: int = 0, size: int = 64) -> None:
    header = json.dumps({"__metadata__": {}, "w": {"dtype": "F32", "shape": [16], "data_offsets": [0, size]}}).encode()
    path.write_bytes((len(header).to_bytes(8, "little") + header + b"\0" * size)[: -missing or None])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    safetensors(tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_whole_model(model: Path) -> None:
    whole = model_files.look(model)
    assert whole == model_files.ModelFiles(True, True, True, True, True)


def test_single_file(model: Path) -> None:
    assert model_files.look(model / "model.safetensors").weights


def test_no_model(model: Path) -> None:
    assert not model_files.look(model / "none").exists


def test_empty_folder(tmp_path: Path) -> None:
    empty = model_files.look(tmp_path)
    assert (empty.exists, empty.readable, empty.config, empty.weights, empty.tokenizer) == (True, True, *[False] * 3)


def test_missing_shard(model: Path) -> None:
    weights = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    assert model_files.look(model).damaged == ("model-2.safetensors is missing",)


INDEX = {"weight_map": {"a": "model.safetensors"}}


def test_file_outside_of_the_index_is_doubtful_only(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps(INDEX))
    (model / "consolidated.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    safetensors(model / "part.safetensors", missing=1)
    seen = model_files.look(model)
    assert (seen.damaged, seen.readable) == ((), True)
    assert [problem.split()[0] for problem in seen.doubtful] == ["consolidated.safetensors", "part.safetensors"]
    safetensors(model / "model.safetensors", missing=1)
    assert [problem.split()[0] for problem in model_files.look(model).damaged] == ["model.safetensors"]


def test_closed_file_that_vllm_does_not_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "training_args.bin").write_text("")
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path).name != "training_args.bin")
    seen = model_files.look(model)
    assert (seen.readable, seen.damaged, seen.doubtful) == (True, (), ("training_args.bin may not be read",))


def test_index_that_vllm_does_not_read(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    (model / "model.safetensors.index.json").write_text(json.dumps(INDEX))
    assert model_files.look(model) == model_files.ModelFiles(True, True, True, True, True)


def test_index_that_names_nothing(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text("version https://git-lfs.github.com/spec/v1")
    assert model_files.look(model).damaged == ("model.safetensors.index.json names no weights",)


def test_hidden_files_are_not_weights(model: Path) -> None:
    (model / "._model.safetensors").write_bytes(b"Mac OS X")
    assert model_files.look(model).damaged == ()


def test_weights_in_mistrals_own_format_too(model: Path) -> None:
    assert not model_files.look(model).two_formats
    safetensors(model / "consolidated-00001-of-00002.safetensors")
    assert model_files.look(model).two_formats


def test_weights_one_folder_below(model: Path) -> None:
    (model / "transformer").mkdir()
    (model / "model.safetensors").rename(model / "transformer" / "model.safetensors")
    assert model_files.look(model).weights


def test_config_that_is_no_json(model: Path) -> None:
    (model / "config.json").write_text("{")
    assert model_files.look(model).damaged == ("config.json is no JSON",)


DAMAGES = {
    "cut off in the tensors": (lambda path: safetensors(path, missing=1), "is cut off"),
    "cut off in the header": (lambda path: safetensors(path, missing=80), "is cut off"),
    "cut off at once": (lambda path: path.write_bytes(b"\x08"), "is"),
    "empty": (lambda path: path.write_bytes(b""), "is"),
    "Git LFS pointer": (lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "something else": (lambda path: path.write_bytes(b"PK\x03\x04" + b"\xff" * 100), "is no safetensors file"),
    "header that is no header": (lambda path: path.write_bytes(b"\x02" + b"\0" * 7 + b"[]"), "is no safetensors file"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_weights(name: str, model: Path) -> None:
    damage, words = DAMAGES[name]
    damage(model / "model.safetensors")
    (problem,) = model_files.look(model).damaged
    assert problem.startswith("model.safetensors ")
    assert words in problem


def test_closed_file(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for os.access: to root every file is open."""
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path).name != "config.json")
    closed = model_files.look(model)
    assert (closed.readable, closed.damaged) == (False, ("config.json may not be read",))


def test_addresses() -> None:
    assert facts._own("127.0.0.1") is True
    assert facts._own("203.0.113.7") is False
    assert facts._own("somewhere") is None
    assert facts._own("") is None


def test_ports() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken, free = other.getsockname()[1], free_port()
        assert facts.gather(Wanted(host="127.0.0.1", ports={taken: "a", free: "b"})).ports_taken == (taken,)


def test_folders_follow_the_environment(tmp_path: Path) -> None:
    plain = facts.folders({"HOME": "/home/ray"})
    assert plain["HF_HOME"] == "/home/ray/.cache/huggingface/hub"
    assert plain["VLLM_CACHE_ROOT"] == "/home/ray/.cache/vllm"
    moved = facts.folders({"HOME": "/home/ray", "XDG_CACHE_HOME": "/c", "HF_HUB_CACHE": "/hub", "TMPDIR": "/t"})
    assert (moved["HF_HOME"], moved["VLLM_CACHE_ROOT"], moved["TMPDIR"]) == ("/hub", "/c/vllm", "/t")
    assert moved["TORCHINDUCTOR_CACHE_DIR"].startswith("/t/torchinductor_")
    seen = facts._folder(str(tmp_path / "not" / "made" / "yet"))
    assert seen.writable
    assert seen.free > 0


HUB_CACHES: list[tuple[dict[str, str], str]] = [
    # As huggingface_hub.constants has it.
    ({}, "/home/ray/.cache/huggingface/hub"),
    ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/huggingface/hub"),
    ({"XDG_CACHE_HOME": "/xdg", "HF_HOME": "/home"}, "/home/hub"),
    ({"HF_HOME": "~/hf"}, "/home/ray/hf/hub"),
    ({"HF_HOME": "/home", "HUGGINGFACE_HUB_CACHE": "/older"}, "/older"),
    ({"HF_HOME": "/home", "HUGGINGFACE_HUB_CACHE": "/older", "HF_HUB_CACHE": "/hub"}, "/hub"),
    ({"VOLUME": "/v", "HF_HUB_CACHE": "$VOLUME/${VOLUME}/$NONE"}, "/v//v/$NONE"),
]


@pytest.mark.parametrize(("environment", "expected"), HUB_CACHES)
def test_cache_of_the_hub_is_where_its_library_has_it(environment: dict[str, str], expected: str) -> None:
    assert facts.folders({"HOME": "/home/ray"} | environment)["HF_HOME"] == expected


def test_model_behind_a_closed_folder(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "stat", refuse)
    assert model_files.look(model) == model_files.ModelFiles(exists=True)


def test_folder_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not facts._folder(str(tmp_path / "file" / "cache")).writable


def test_cache_of_the_hub(tmp_path: Path) -> None:
    environment = {"HF_HUB_CACHE": str(tmp_path)}
    assert not facts.gather(Wanted("org/model"), environment).cached
    (tmp_path / "models--org--model").mkdir()
    assert facts.gather(Wanted("org/model"), environment).cached


def test_environment_is_reduced_and_holds_no_secret() -> None:
    kept = facts.relevant({"HF_TOKEN": "hf_secret", "VLLM_API_KEY": "k", "NCCL_DEBUG": "INFO", "AWS_KEY": "x"})
    assert list(kept) == ["HF_TOKEN", "NCCL_DEBUG", "VLLM_API_KEY"]
    assert "hf_secret" not in str(kept)
    assert kept["HF_TOKEN"] == facts.relevant({"HF_TOKEN": "hf_secret"})["HF_TOKEN"] != kept["VLLM_API_KEY"]


def test_environment_of_the_job() -> None:
    job = json.dumps({"runtime_env": {"env_vars": {"VLLM_X": "1"}}, "metadata": {}})
    assert facts.gather(Wanted(), {"RAY_JOB_CONFIG_JSON_ENV_VAR": job}).job_environment == {"VLLM_X"}
    assert facts.gather(Wanted(), {"RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": null}'}).job_environment == set()
    assert facts.gather(Wanted(), {}).job_environment == set()


def test_environment_of_the_raylet(tmp_path: Path) -> None:
    assert facts._node_environment(tmp_path) is None
    for pid, name, environ in (("7", "python3", "VLLM_X=1"), ("8", "raylet", "VLLM_X=2\0PATH=/bin\0HOME=/r\0")):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "comm").write_text(f"{name}\n")
        (tmp_path / pid / "environ").write_text(environ)
    assert facts._node_environment(tmp_path) == {"VLLM_X": "2", "HOME": "/r"}


def test_named_compiler_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mycc", "gcc"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts._compiler({}) == str(tmp_path / "gcc")
    assert facts._compiler({"CXX": "mycc -O2"}) == str(tmp_path / "mycc")
    (tmp_path / "gcc").unlink()
    assert facts._compiler({}) is None


SOURCE = {
    "__init__.py": "from pack.inner import imported, Renamed as Other\nif True:\n    conditional = 1\n",
    "inner.py": (
        "from __future__ import annotations\nimport json\nfrom .base import Base, Unreadable\n"
        "def imported(): ...\nclass Renamed:\n    def method(self): ...\n    value: int = 1\n"
        "class Heir(Base):\n    async def own(self): ...\nclass Stranger(Unreadable): ...\n"
        "try:\n    import nothing\nexcept ImportError:\n    fallback = None\n"
    ),
    "base.py": "from elsewhere import Unreadable\nclass Base:\n    @staticmethod\n    def inherited(): ...\n",
    "lazy.py": "def __getattr__(name): ...\n",
    "star.py": "from pack.inner import *\n",
    "broken.py": "def",
    "compiled.cpython-311-x86_64-linux-gnu.so": "",
}
PLACES = {
    "pack:imported": "", "pack:conditional": "", "pack:Other.method": "", "pack:Other.value": "", "pack:inner": "",
    "pack.inner:json": "", "pack.inner:Heir.own": "", "pack.inner:Heir.inherited": "", "pack.inner:fallback": "",
    "pack.inner:Stranger.anything": "", "pack.star:anything": "", "pack.compiled:anything": "",
    "pack.lazy:anything": "",
    "pack.inner:imported.attribute": "pack.inner has no imported.attribute",
    "pack:absent": "pack has no absent", "pack:Other.absent": "pack has no Other.absent",
    "pack.inner:Heir.absent": "pack.inner has no Heir.absent", "pack.none:x": "there is no module pack.none",
    "nopack.none:x": "there is no module nopack.none", "pack.broken:x": "there is no module pack.broken",
}  # fmt: skip


@pytest.mark.parametrize("where", PLACES)
def test_names_in_source(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pack").mkdir()
    for name, text in SOURCE.items():
        (tmp_path / "pack" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    sources._path.cache_clear()
    assert sources.lacks([where]) == {where: PLACES[where]}
    assert "pack" not in sys.modules, "nothing is imported"


def test_places_of_the_plugin_are_well_formed() -> None:
    places = plugin.places((0, 32))
    assert "vllm.config.vllm:VllmConfig.__post_init__" in places
    assert all(where.count(":") == 1 for where in places)


def test_gathering_is_quick_and_imports_neither() -> None:
    seen = facts.gather(Wanted(model="/models/none"))
    assert seen.model is not None
    assert not seen.model.exists
    assert {"vllm", "ray", "torch"} & set(sys.modules) == set()
