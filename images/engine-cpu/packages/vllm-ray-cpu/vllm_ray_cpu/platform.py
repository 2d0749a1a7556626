"""The CPU platform with a Ray resource name."""

from typing import ClassVar

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    """One Ray "GPU" stands for one CPU worker: start Ray nodes with `--num-gpus=<workers>`.

    It has to be one of the accelerators that Ray itself knows, since the executors ask Ray for the accelerator ids
    assigned to a worker; a custom resource has none.
    """

    ray_device_key: ClassVar[str] = "GPU"
    # "GPU" makes Ray set CUDA_VISIBLE_DEVICES, which means nothing here: no variable has to keep it from doing so.
    ray_noset_device_env_vars: ClassVar[list[str]] = []
