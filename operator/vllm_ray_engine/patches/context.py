"""What a process of an engine must know to take part in it: the attempt's instance id, its Ray namespace, its group.

Every patch gets it. It comes from the launcher's configuration, or, outside Kubernetes, from a user's own code that
asked for the plug-in (`plugin.enable`); a process that finds neither in its environment is none of ours.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vllm_ray_engine import config
from vllm_ray_engine.config import ConfigError, EngineConfig

ENVIRONMENT_VARIABLE = "VLLM_RAY_ENGINE_CONTEXT"
"""Holds the context as JSON where no launcher configured it. vLLM copies variables that start with VLLM_ to actors."""


@dataclass(frozen=True)
class GroupRef:
    """A placement group as another process finds it.

    name: found in the Ray namespace of the context. id: hex, found whatever its name, namespace and Ray job are. One of
    the two is set. awaited: it may not have been made yet.
    """

    name: str = ""
    id: str = ""
    awaited: bool = False

    def __post_init__(self) -> None:
        if bool(self.name) == bool(self.id):
            raise ValueError("a placement group is referred to by its name or by its id")

    def find(self) -> Any:
        """Return Ray's handle of the group. Raises ValueError when no group has the name; an id is not looked up."""
        if self.name:
            import ray

            return ray.util.get_placement_group(self.name)
        from ray.util.placement_group import PlacementGroup, PlacementGroupID

        return PlacementGroup(PlacementGroupID(bytes.fromhex(self.id)))


@dataclass(frozen=True)
class Context:
    """Which engine this process belongs to.

    instance_id: base id of the attempt, without the suffix of a rank. namespace: Ray namespace that a driver gets
    which asks for none. group: the placement group to use, None lets vLLM make its own. rank: the data-parallel rank
    that this launch is, when the ranks are launched apart from each other. rank_groups: the groups to use for the ranks
    that vLLM's Ray backend makes, in any order; empty lets vLLM make its own.
    """

    instance_id: str
    namespace: str
    group: GroupRef | None = None
    rank: int | None = None
    rank_groups: tuple[GroupRef, ...] = ()

    def __post_init__(self) -> None:
        if not self.instance_id or not self.namespace:
            raise ValueError("a context has an instance id and a namespace")

    @property
    def own_id(self) -> str:
        """Return the instance id of this launch: of its rank if it is one, else the base id."""
        return self.instance_id if self.rank is None else self.of_rank(self.rank)

    def of_rank(self, rank: int) -> str:
        """Return the instance id of a data-parallel rank, as vLLM itself writes it."""
        return f"{self.instance_id}_dp{rank}"

    def owns(self, instance_id: str) -> bool:
        """Return whether this is the base id or that of a rank."""
        return re.fullmatch(re.escape(self.instance_id) + r"(_dp\d+)?", instance_id) is not None

    def as_json(self) -> str:
        """Return the value of ENVIRONMENT_VARIABLE."""
        return json.dumps(asdict(self))


def of_launcher(launched: EngineConfig) -> Context:
    """Return the context of an engine that the launcher runs."""
    groups = tuple(GroupRef(name=name, awaited=True) for name in launched.group_names)
    return Context(
        launched.instance_id,
        launched.instance_id,
        None if launched.makes_ranks else groups[0],
        rank=launched.data_rank,
        rank_groups=groups if launched.makes_ranks else (),
    )


def of_actor(instance_id: str) -> Context:
    """Return the context of an engine in this Ray actor. Raises RuntimeError when this process is not in Ray."""
    import ray

    if not ray.is_initialized():
        raise RuntimeError("this process is not connected to Ray")
    runtime = ray.get_runtime_context()
    group = runtime.get_placement_group_id()
    return Context(instance_id, runtime.namespace, None if group is None else GroupRef(id=group))


def parse(text: str) -> Context:
    """Return the context that `as_json` wrote. Raises ConfigError."""
    try:
        data = json.loads(text)
        group, rank_groups = data.pop("group"), data.pop("rank_groups")
        return Context(
            **data,
            group=None if group is None else GroupRef(**group),
            rank_groups=tuple(GroupRef(**ref) for ref in rank_groups),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE} is not a context: {error}") from None


def from_environment(environment: Mapping[str, str] = os.environ) -> Context | None:
    """Return the context of this process, None when it belongs to no engine of ours. Raises ConfigError."""
    if config.ENVIRONMENT_VARIABLE in environment:
        return of_launcher(config.from_environment(environment))
    if ENVIRONMENT_VARIABLE in environment:
        return parse(environment[ENVIRONMENT_VARIABLE])
    return None
