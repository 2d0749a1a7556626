from __future__ import annotations

from typing import Any

import pytest

from tests.unit.plan import build
from tests.unit.plan.build import DEFAULTS, SPEC, revisions_for, spec_with
from vllm_ray_operator.api.rules import MAX_NAME_LENGTH
from vllm_ray_operator.plan import names, revision
from vllm_ray_operator.plan.revision import Defaults, Unresolvable
from vllm_ray_operator.plan.world import Revision, World

OTHER_DEFAULTS = Defaults(engine_image="example/engine:2")


def chosen(raw: Any, known: tuple[Revision, ...], defaults: Defaults = DEFAULTS) -> tuple[Any, Any]:
    world = World(build.deployment(raw), revisions=known)
    cluster = revision.choose_cluster(world, defaults)
    return cluster, revision.choose_engine(world, cluster)


# What is changed in the spec, and of what that makes a new revision.
CHANGES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "nothing": ({}, set()),
    "scaled": ({"replicas": 7}, set()),
    "scaled to nothing": ({"replicas": 0}, set()),
    "empty parts written out": ({"engine": {}, "cluster": {}}, set()),
    "image": ({"engine": {"image": "x"}}, {"cluster"}),
    "shared memory": ({"engine": {"shmSize": "1Gi"}}, {"cluster"}),
    "arguments": ({"engine": {"args": ["--seed=1"]}}, {"engine"}),
    "environment": ({"engine": {"env": [{"name": "A", "value": "1"}]}}, {"engine"}),
    "port": ({"engine": {"port": 9000}}, {"engine"}),
    "time to drain": ({"engine": {"drainTimeoutSeconds": 90}}, set()),
    "how to roll": ({"rollout": {"paused": True}, "restart": {"backoffSeconds": 1}}, set()),
    "restart on demand": ({"restartedAt": "2026-01-02T03:04:05Z"}, {"engine"}),
    "another model": ({"model": {"uri": "hf://org/other"}}, {"engine"}),
    "another model in another claim": ({"model": {"uri": "pvc://claim/x"}}, {"cluster", "engine"}),
    "tensor": ({"parallelism": {"tensor": 4}}, {"cluster", "engine"}),
    "Ray": ({"cluster": {"rayVersion": "2.61.0"}}, {"cluster"}),
    "accelerators of a pod": ({"cluster": {"workers": {"acceleratorsPerNode": 1}}}, {"cluster", "engine"}),
    "a pod overlay": ({"cluster": {"workers": {"template": {"spec": {"nodeSelector": {"a": "b"}}}}}}, {"cluster"}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_only_a_change_by_the_user_makes_a_revision(name: str) -> None:
    parts, expected = CHANGES[name]
    known = revisions_for(SPEC)
    cluster, engine = chosen(spec_with(**parts), known)
    new = {kind for kind, choice in (("cluster", cluster), ("engine", engine)) if choice.create is not None}
    assert new == expected


def test_an_operator_with_other_defaults_renders_nothing_anew() -> None:
    known = revisions_for(SPEC)
    assert chosen(spec_with(replicas=3), known, OTHER_DEFAULTS) == chosen(SPEC, known)


def test_nor_does_one_without_defaults() -> None:
    known = revisions_for(SPEC)
    assert chosen(SPEC, known, Defaults()) == chosen(SPEC, known)


def test_new_defaults_come_with_the_next_change() -> None:
    known = revisions_for(SPEC)
    cluster, _ = chosen(spec_with(engine={"shmSize": "1Gi"}), known, OTHER_DEFAULTS)
    assert cluster.resolved.worker["spec"]["containers"][0]["image"] == "example/engine:2"


def test_going_back_takes_the_older_revision_as_it_was() -> None:
    first = revisions_for(SPEC)
    both = revisions_for(spec_with(parallelism={"tensor": 4}), known=first)
    assert len(both) == 4
    back = chosen(SPEC, both, OTHER_DEFAULTS)
    assert [c.name for c in back] == [r.name for r in first]
    assert all(c.create is None for c in back)


SAME = spec_with(engine={"image": DEFAULTS.engine_image, "port": 8000})


def test_the_same_in_other_words_is_a_revision_that_means_the_same() -> None:
    known = revisions_for(SPEC)
    before: tuple[Any, ...] = chosen(SPEC, known)
    now: tuple[Any, ...] = chosen(SAME, known)
    for old, new in ((before[0], now[0]), (before[1], now[1])):
        assert new.create is not None
        assert new.name != old.name, "a name that exists already would never be stored"
        assert (new.digest, new.resolved) == (old.digest, old.resolved)


def test_a_revision_is_complete_and_comes_back_as_it_was() -> None:
    for new, kept in zip(chosen(SPEC, ()), chosen(SPEC, revisions_for(SPEC)), strict=True):
        assert kept.create is None
        assert (kept.name, kept.digest, kept.resolved) == (new.name, new.digest, new.resolved)


def test_what_is_stored() -> None:
    cluster, engine = chosen(SPEC, ())
    for kind, choice in (("cluster", cluster), ("engine", engine)):
        metadata = choice.create["metadata"]
        assert metadata["labels"] == {**names.selector("chat"), "vllm-ray.dev/revision-kind": kind}
        assert metadata["ownerReferences"][0]["uid"] == build.UID
        assert choice.create["revision"] == 1
        assert choice.create["data"]["resolved"] == choice.resolved.to_wire()
    assert engine.resolved.model_revision is None
    assert engine.resolved.served_name == "org/tiny"
    assert engine.resolved.startup_timeout_seconds == 1800


def test_numbers_grow() -> None:
    known = revisions_for(SPEC)
    cluster, _ = chosen(spec_with(engine={"image": "x"}), known)
    assert cluster.create["revision"] == 1 + max(r.number for r in known)


def test_names_fit_a_ray_cluster() -> None:
    assert len(names.ray_cluster("x" * MAX_NAME_LENGTH, "12345678")) == 53
    assert len(names.revision("x" * MAX_NAME_LENGTH, "cluster", "12345678")) <= 63


def test_no_image_from_anywhere() -> None:
    with pytest.raises(Unresolvable):
        chosen(SPEC, (), Defaults())


def numbered(count: int) -> tuple[Revision, ...]:
    return tuple(Revision(f"r{n}", "engine", n, {}, {}) for n in range(1, count + 1))


HISTORY: dict[str, tuple[int, list[str], list[str]]] = {
    "few": (10, [], []),
    "oldest go": (12, [], ["r1", "r2"]),
    "those in use stay and do not count": (12, ["r1", "r12"], []),
    "the oldest that is not in use": (12, ["r1"], ["r2"]),
}


@pytest.mark.parametrize("name", HISTORY)
def test_history_limit(name: str) -> None:
    count, in_use, expected = HISTORY[name]
    world = World(build.deployment(SPEC), revisions=tuple(reversed(numbered(count))))
    assert [r.name for r in revision.surplus(world, in_use)] == expected
