"""Acting: carries out what the planner asked for. Every action is idempotent."""

from vllm_ray_operator.act.execute import execute

__all__ = ["execute"]
