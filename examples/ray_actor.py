"""vLLM in a Ray actor of your own, without Kubernetes, with the engine plug-in of vllm-ray-operator.

The wheel of vllm-ray-operator (`pip install --no-deps`) has to be in the environment of the Ray nodes; only its package
vllm_ray_engine is used here, and it imports nothing but the standard library, Ray and vLLM. Then, for example:

    python ray_actor.py --model Qwen/Qwen3-32B --tensor 8

What the plug-in changes: the engine's worker actors carry an id of yours, in the actor's own Ray namespace; the engine
core is spawned and connects to this Ray cluster, whatever VLLM_WORKER_MULTIPROC_METHOD says and wherever else a Ray
cluster runs on the machine; it uses the actor's placement group; and when it fails, its error is the last in the log.
"""

from __future__ import annotations

import argparse
import json
import uuid
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


class Engine:
    """One engine, in an actor that lives in the first bundle of its placement group; the workers get the others."""

    def __init__(self, model: str, tensor: int, options: dict[str, Any]) -> None:
        from vllm_ray_engine.plugin import enable

        # Before vLLM makes anything. A new id at every start: an actor that Ray restarts gets here again.
        enable(f"chat-{uuid.uuid4().hex[:8]}")

        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(model=model, tensor_parallel_size=tensor, distributed_executor_backend="ray", **options)
        )

    async def complete(self, prompt: str, tokens: int) -> str:
        """Return the continuation of a prompt."""
        from vllm import SamplingParams

        text = ""
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        async for output in self._engine.generate(prompt, sampling, request_id=uuid.uuid4().hex):
            text = output.outputs[0].text
        return text

    async def close(self) -> None:
        """End the engine and its workers."""
        self._engine.shutdown()


def main() -> None:
    """Start an engine, ask it one thing, and end it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tensor", type=int, default=1, help="accelerators")
    parser.add_argument("--options", type=json.loads, default={}, help="more engine arguments, as JSON")
    asked = parser.parse_args()

    ray.init(namespace="chat")
    group = ray.util.placement_group([{"CPU": 1}] + [{"GPU": 1}] * asked.tensor)
    ray.get(group.ready())
    first_bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    engine = (
        ray.remote(Engine)
        .options(num_cpus=1, scheduling_strategy=first_bundle)
        .remote(asked.model, asked.tensor, asked.options)
    )
    print("answer:", repr(ray.get(engine.complete.remote("Hello", 8))))
    print(
        "actors:", json.dumps([name for name in ray.util.list_named_actors() if name.startswith("vllm_Worker_chat-")])
    )
    ray.get(engine.close.remote())


if __name__ == "__main__":
    main()
