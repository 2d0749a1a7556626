"""The engine process: `vllm serve` with the arguments checked by vLLM's own parser before anything is built.

Run as `python -m vllm_ray_engine.serve` by the launcher. It is vLLM's own command line in the same process, so vLLM is
imported once for both the check and the service.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from typing import Any, cast

from vllm_ray_engine import arguments, middleware
from vllm_ray_engine.config import EngineConfig, from_environment
from vllm_ray_engine.processes import debris, process_tree
from vllm_ray_engine.reasons import EngineFailure

REFUSAL_MARK = "VLLM_RAY_ENGINE_REFUSED "
"""Starts the output line with which this process tells the launcher why it will not start; JSON follows."""

PROBE_KEY_VARIABLE = "VLLM_RAY_ENGINE_PROBE_KEY"
"""Holds the API key that the launcher's health checks use when the user protects the engine with keys."""

if __name__ == "__mp_main__":
    # vLLM spawns its engine core from this process; the spawned one comes here first, long before it loads plugins.
    process_tree.die_with_spawner()
    debris.claim(from_environment().engine_id)


def _probe_keys(args: Namespace, probe_key: str | None) -> None:
    """Let the launcher's key in beside the user's, if the user asks for keys at all."""
    keys = [key for key in (getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]) if key]
    if keys and probe_key:
        args.api_key = [*keys, probe_key]


def _check_when_parsed(config: EngineConfig, probe_key: str | None) -> None:
    """Put the check into the one place where vLLM reads its command line."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    original = FlexibleArgumentParser.parse_args

    def parse_args(self: Any, args: list[str] | None = None, namespace: Namespace | None = None) -> Namespace:
        if args is not None or namespace is not None:
            return cast(Namespace, original(self, args, namespace))
        FlexibleArgumentParser.parse_args = original
        final = arguments.check(lambda line: original(self, line), config)
        _probe_keys(final, probe_key)
        # The last is the outermost: it sees what the user's own answer as well.
        final.middleware = [*final.middleware, middleware.PATH]
        return final

    FlexibleArgumentParser.parse_args = parse_args


def main() -> None:
    """Run the engine; returns only when it ended by itself."""
    parent = os.environ.pop(process_tree.PARENT_VARIABLE, None)
    if parent is not None:
        process_tree.die_with_parent(int(parent))
    config = from_environment()
    debris.claim(config.engine_id)
    # Taken out of the environment, which vLLM copies to every worker.
    probe_key = os.environ.pop(PROBE_KEY_VARIABLE, None)
    sys.argv = ["vllm", *arguments.command_line(config)]
    try:
        _check_when_parsed(config, probe_key)
        from vllm.entrypoints.cli.main import main as vllm_main

        vllm_main()
    except EngineFailure as failure:
        print(f"\n{REFUSAL_MARK}{json.dumps(failure.cause.as_dict())}", flush=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
