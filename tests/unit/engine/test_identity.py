"""Identity: the wrappers, on stand-ins for vLLM's functions as different releases have them."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_ray_engine.patches import context, identity
from vllm_ray_engine.patches.context import Context
from vllm_ray_engine.patches.features import mentions

from .conftest import configure

CONTEXT = context.of_launcher(configure())
BASE = CONTEXT.instance_id


class VllmConfig:
    def __init__(self, instance_id: str = "") -> None:
        self.instance_id = instance_id
        self.__post_init__()

    def __post_init__(self) -> None:
        self.instance_id = "1796008025453908330"


def replaced(config: VllmConfig) -> VllmConfig:
    """As vLLM's `replace`: the constructor, with the old values."""
    return type(config)(**vars(config))


COPIES: dict[str, Callable[[VllmConfig], VllmConfig]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": replaced,
    "pickle": lambda config: pickle.loads(pickle.dumps(config)),  # noqa: S301
}


@pytest.mark.parametrize("kind", COPIES)
def test_instance_id_is_ours_and_a_derived_one_stays(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(VllmConfig, "__post_init__", identity.set_instance_id(VllmConfig.__post_init__, CONTEXT))
    config = VllmConfig()
    assert config.instance_id == BASE
    assert COPIES[kind](config).instance_id == BASE
    config.instance_id += "_dp1"
    assert COPIES[kind](COPIES[kind](config)).instance_id == f"{BASE}_dp1"


def test_a_foreign_id_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmConfig, "__post_init__", identity.set_instance_id(VllmConfig.__post_init__, CONTEXT))
    assert VllmConfig("older-attempt_dp1").instance_id == BASE


def test_instance_id_of_a_rank_that_is_launched_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Context("base", "space", rank=3)
    monkeypatch.setattr(VllmConfig, "__post_init__", identity.set_instance_id(VllmConfig.__post_init__, rank))
    assert VllmConfig().instance_id == "base_dp3"
    assert replaced(VllmConfig()).instance_id == "base_dp3"


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, BASE), ({"namespace": None}, BASE), ({"namespace": "theirs"}, "theirs")],
)
def test_default_namespace(given: dict[str, Any], expected: str) -> None:
    init = identity.default_namespace(lambda **options: options, CONTEXT)
    assert init(address="auto", **given) == {"address": "auto", "namespace": expected}


# Ranks that the Ray backend makes.


def apply_suffix(config: Any, rank: int) -> None:
    """As vLLM 0.21 and newer."""
    config.instance_id = f"{config.instance_id}_dp{rank}"
    if config.kv_transfer_config is not None:
        config.kv_transfer_config.engine_id = f"{config.kv_transfer_config.engine_id}_dp{rank}"


def configured(**more: Any) -> Any:
    """Return what a rank is given: the base id, in a copy of the engine's config."""
    parallel = SimpleNamespace(data_parallel_size=4)
    return SimpleNamespace(instance_id=BASE, kv_transfer_config=None, parallel_config=parallel, **more)


@pytest.mark.parametrize("original", [apply_suffix, lambda config, rank: None], ids=["upstream names", "it does not"])
def test_ranks_in_actors(original: Callable[..., None]) -> None:
    config = configured()
    identity.name_actor_rank(original, CONTEXT)(config, 3)
    assert config.instance_id == f"{BASE}_dp3"


def test_the_patch_of_actor_ranks_steps_aside() -> None:
    assert identity.names_actor_ranks(apply_suffix)
    assert not identity.names_actor_ranks(lambda config, rank: None)


# Ranks that the multiprocess backend makes.


class EngineCoreProc:
    ran: list[tuple[Any, dict[str, Any]]] = []  # noqa: RUF012

    @staticmethod
    def run_engine_core(*_args: Any, dp_rank: int = 0, local_dp_rank: int = 0, **kwargs: Any) -> None:
        ranks = {"dp_rank": dp_rank, "local_dp_rank": local_dp_rank}
        EngineCoreProc.ran.append((kwargs["vllm_config"].instance_id, ranks))


@pytest.fixture
def run_engine_core(monkeypatch: pytest.MonkeyPatch) -> identity.RankedEngineCore:
    module: Any = ModuleType("vllm.v1.engine.core")
    module.EngineCoreProc = EngineCoreProc
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", module)
    monkeypatch.setattr(EngineCoreProc, "ran", [])
    return identity.RankedEngineCore(EngineCoreProc.run_engine_core, CONTEXT)


@pytest.mark.parametrize("spawned", [False, True], ids=["forked", "spawned"])
def test_ranks_in_processes(run_engine_core: identity.RankedEngineCore, spawned: bool) -> None:
    target = pickle.loads(pickle.dumps(run_engine_core)) if spawned else run_engine_core  # noqa: S301
    target(vllm_config=configured(), dp_rank=3, local_dp_rank=1)
    assert EngineCoreProc.ran == [(f"{BASE}_dp3", {"dp_rank": 3, "local_dp_rank": 1})]


def test_a_rank_that_is_named_already_keeps_its_name(run_engine_core: identity.RankedEngineCore) -> None:
    config = configured()
    config.instance_id = f"{BASE}_dp3"
    run_engine_core(vllm_config=config, dp_rank=3)
    assert EngineCoreProc.ran[0][0] == f"{BASE}_dp3"


def test_one_engine_has_no_rank(run_engine_core: identity.RankedEngineCore) -> None:
    config = configured()
    config.parallel_config.data_parallel_size = 1
    run_engine_core(vllm_config=config)
    assert EngineCoreProc.ran[0][0] == BASE


def test_the_patch_of_process_ranks_steps_aside() -> None:
    def run_engine_core(*_args: Any, dp_rank: int = 0, **kwargs: Any) -> None:
        _apply_dp_identity_suffix(kwargs["vllm_config"], dp_rank)  # type: ignore[name-defined]  # noqa: F821

    test = mentions("_apply_dp_identity_suffix")
    assert test(run_engine_core)
    assert not test(EngineCoreProc.run_engine_core)


# Transfers.


@pytest.mark.parametrize("engine_id", ["a-random-one", "fixed-by-the-user_dp0", f"{BASE}_dp3"])
def test_transfers_go_by_the_instance_id_of_the_rank(engine_id: str) -> None:
    seen: list[str] = []
    init = identity.name_transfers(lambda self, config: seen.append(config.kv_transfer_config.engine_id), CONTEXT)
    config = configured(ec_transfer_config=SimpleNamespace(engine_id="fixed"))
    config.instance_id = f"{BASE}_dp3"
    config.kv_transfer_config = SimpleNamespace(engine_id=engine_id)
    init(object(), config)
    assert seen == [config.ec_transfer_config.engine_id] == [f"{BASE}_dp3"]


def test_an_engine_without_transfers() -> None:
    seen: list[Any] = []
    identity.name_transfers(lambda self, config: seen.append(config), CONTEXT)(object(), configured())
    assert len(seen) == 1
