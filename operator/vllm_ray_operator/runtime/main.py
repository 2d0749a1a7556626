"""The console script ``vllm-ray-operator``."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from importlib.metadata import PackageNotFoundError, version

from vllm_ray_operator.runtime import logging as logs
from vllm_ray_operator.runtime import settings as configuration

log = logging.getLogger(__name__)


def main() -> int:
    """Run the operator. Return the exit code: 0 after SIGTERM, 1 to be started anew, 2 for settings of no use."""
    configuration.parse_arguments(sys.argv[1:], _version())
    try:
        settings = configuration.load(os.environ)
    except configuration.SettingsError as error:
        sys.stderr.write(f"vllm-ray-operator: {error}\n")
        return 2
    logs.configure(settings.log_level, settings.log_format)
    log.info("starting", extra=logs.fields(version=_version(), workers=settings.workers))
    from vllm_ray_operator.runtime.wiring import CannotStart, run  # noqa: PLC0415  # --help and faults need no clients loaded

    try:
        return asyncio.run(run(settings))
    except CannotStart as error:
        log.critical("cannot start: %s", error)
        return 1


def _version() -> str:
    try:
        return version("vllm-ray-operator")
    except PackageNotFoundError:
        return "source"


if __name__ == "__main__":
    sys.exit(main())
