"""vLLM platform plug-in: the CPU platform, usable with Ray."""


def platform() -> str:
    """Name the platform class; vLLM calls this through the entry point group `vllm.platform_plugins`."""
    return "vllm_ray_cpu.platform.RayCpuPlatform"
