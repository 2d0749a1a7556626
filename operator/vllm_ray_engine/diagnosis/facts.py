"""What the doctor looks at on one node: gathered once, without importing vLLM or Ray, and judged elsewhere."""

from __future__ import annotations

import errno
import getpass
import hashlib
import ipaddress
import json
import os
import platform
import re
import shutil
import socket
import string
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_ray_engine import plugin, versions
from vllm_ray_engine.diagnosis import model_files, sources
from vllm_ray_engine.diagnosis.model_files import ModelFiles
from vllm_ray_engine.reasons import UnsupportedVersion

COPIED = ("VLLM_", "HF_", "HUGGING_FACE_", "NCCL_", "UCX_", "GLOO_", "TORCH", "FLASH_ATTENTION_", "LMCACHE_", "TRITON_")
"""Prefixes of the variables that decide how an engine behaves and that vLLM hands from the driver to its workers."""
_NEEDED = (
    "CC", "CXX", "HOME", "TMPDIR", "USER", "XDG_CACHE_HOME", "CUDA_HOME", "OMP_NUM_THREADS", "PYTHONHASHSEED",
    "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE",
)  # fmt: skip
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL")

COMPILERS = ("c++", "g++", "clang++", "gcc", "clang", "cc")


@dataclass(frozen=True)
class Wanted:
    """What is to run here. model: path or name, None when it is not known. ports: what listens there, by port."""

    model: str | None = None
    args: tuple[str, ...] = ()
    host: str = ""
    ports: Mapping[int, str] = field(default_factory=dict)
    local_workers: int = 1

    def flag(self, name: str) -> str | None:
        """Return the value of a flag in the arguments, '' for one without a value, None when it is not given."""
        for index, argument in reversed(list(enumerate(self.args))):  # the last one counts
            given, _, value = argument.partition("=")
            if given.replace("_", "-") == name:
                following = self.args[index + 1 : index + 2]
                return value or next((text for text in following if not text.startswith("-")), "")
        return None


@dataclass(frozen=True)
class Folder:
    """A folder that something is written to. free: bytes. executable: whether code may be loaded from it."""

    path: str
    writable: bool
    free: int
    executable: bool


@dataclass(frozen=True)
class Facts:
    """One node, and this process on it.

    environment: of this process; node_environment: of the raylet on this node, which Ray's workers inherit, None when
    there is none to be seen; both hold only what matters to an engine, secrets as hashes. job_environment: names that
    the Ray job sets, in all its processes on all nodes. own_address: whether VLLM_HOST_IP is an address of this pod,
    None when it is not set or no address. shared_memory: free bytes in /dev/shm, None when it is not there. model: None
    for a model that is not a path. cached: whether a model by name is in the hub's cache. patch_points: what the plugin
    changes in this vLLM, by place, with what is wrong with it; None when vLLM is missing or too old.
    """

    wanted: Wanted
    environment: Mapping[str, str]
    node_environment: Mapping[str, str] | None
    job_environment: frozenset[str]
    python: str
    versions: Mapping[str, str | None]
    plugin_found: bool
    patch_points: Mapping[str, str] | None
    own_address: bool | None
    shared_memory: int | None
    ports_taken: tuple[int, ...]
    model: ModelFiles | None
    cached: bool
    folders: Mapping[str, Folder]
    compiler: str | None
    has_gpu: bool


def gather(wanted: Wanted, environment: Mapping[str, str] = os.environ) -> Facts:
    """Look at this node. Takes milliseconds, plus one read for each file of the model's weights."""
    local = wanted.model is not None and Path(wanted.model).is_absolute()
    return Facts(
        wanted=wanted,
        environment=relevant(environment),
        node_environment=_node_environment(),
        job_environment=_job_environment(environment.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "")),
        python=platform.python_version(),
        versions={package: versions.installed(package) for package in versions.MINIMUM},
        plugin_found=versions.plugin_found(),
        patch_points=_patch_points(),
        own_address=_own(environment.get("VLLM_HOST_IP", "")),
        shared_memory=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,  # noqa: S108
        ports_taken=tuple(port for port in wanted.ports if address_in_use(wanted.host, port)),
        model=model_files.look(Path(wanted.model)) if local and wanted.model is not None else None,
        cached=wanted.model is not None and not local and _is_cached(wanted.model, environment),
        folders={name: _folder(path) for name, path in folders(environment).items()},
        compiler=_compiler(environment),
        has_gpu=bool(list(Path("/dev").glob("nvidia[0-9]*"))) or Path("/dev/kfd").exists(),
    )


def _patch_points() -> dict[str, str] | None:
    try:
        vllm = versions.release("vllm")
    except UnsupportedVersion:
        return None
    return sources.lacks(plugin.places(vllm))


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what matters to an engine, with hashes for secrets: they can be compared, and end up nowhere."""
    names = [name for name in environment if name.startswith(COPIED) or name in _NEEDED]
    return {name: _hash(environment[name]) if _SECRET.search(name) else environment[name] for name in sorted(names)}


def _hash(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:12]


def folders(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the folders that an engine writes to, by the variable that names each."""
    home = environment.get("HOME") or str(Path.home())
    cache = environment.get("XDG_CACHE_HOME") or f"{home}/.cache"
    return {
        "TMPDIR": environment.get("TMPDIR") or tempfile.gettempdir(),
        "HF_HOME": _hub_cache(environment, home),
        "VLLM_CACHE_ROOT": environment.get("VLLM_CACHE_ROOT") or f"{cache}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": environment.get("TORCHINDUCTOR_CACHE_DIR")
        or f"{environment.get('TMPDIR') or '/tmp'}/torchinductor_{_user()}",  # noqa: S108
        "TRITON_CACHE_DIR": environment.get("TRITON_CACHE_DIR") or f"{home}/.triton/cache",
    }


def _hub_cache(environment: Mapping[str, str], home: str) -> str:
    """Return where huggingface_hub keeps models, as its constants.py finds it."""

    def expanded(path: str) -> str:
        path = home + path[1:] if path == "~" or path.startswith("~/") else path
        return string.Template(path).safe_substitute(environment)

    cache = environment.get("XDG_CACHE_HOME", f"{home}/.cache")
    hub = expanded(environment.get("HF_HOME", str(Path(cache, "huggingface"))))
    older = environment.get("HUGGINGFACE_HUB_CACHE", str(Path(hub, "hub")))
    return expanded(environment.get("HF_HUB_CACHE", older))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _folder(path: str) -> Folder:
    """Look at a folder, or at the place where it would be made."""
    place = Path(path)
    while (state := _state(place)) is None:
        place = place.parent
    return Folder(
        path=path,
        writable=place.is_dir() and os.access(place, os.W_OK | os.X_OK),
        free=state.f_bavail * state.f_frsize,
        executable=not state.f_flag & os.ST_NOEXEC,
    )


def _state(place: Path) -> os.statvfs_result | None:
    try:
        return os.statvfs(place)
    except OSError:
        if place == place.parent:
            raise
        return None


def _own(address: str) -> bool | None:
    """Return whether the address is one of this network namespace, None when it is no address."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    except ValueError:
        return None
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def address_in_use(host: str, port: int) -> bool:
    """Return whether something listens on the port already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _is_cached(model: str, environment: Mapping[str, str]) -> bool:
    cached = Path(folders(environment)["HF_HOME"]) / f"models--{model.replace('/', '--')}"
    return any(_is_there(path) for path in (cached, Path(model)))


def _is_there(path: Path) -> bool:
    try:
        path.stat()
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _compiler(environment: Mapping[str, str]) -> str | None:
    named = [environment[name].split()[0] for name in ("CXX", "CC") if environment.get(name, "").strip()]
    return next(filter(None, map(shutil.which, [*named, *COMPILERS])), None)


def _job_environment(text: str) -> frozenset[str]:
    """Return the names of the variables in a Ray job's runtime environment, which Ray hands to the job's driver."""
    try:
        return frozenset(json.loads(text)["runtime_env"]["env_vars"])
    except (ValueError, KeyError, TypeError):
        return frozenset()


def _node_environment(processes: Path = Path("/proc")) -> dict[str, str] | None:
    """Return the environment of this node's raylet, as it was when Ray was started."""
    for entry in processes.iterdir():
        try:
            if entry.name.isdigit() and (entry / "comm").read_text().strip() == "raylet":
                pairs = (pair.partition("=") for pair in (entry / "environ").read_text(errors="replace").split("\0"))
                return relevant({name: value for name, _, value in pairs if name})
        except OSError:
            continue  # gone, or another user's
    return None
