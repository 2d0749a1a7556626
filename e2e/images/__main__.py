"""Command line: `build`, `tag`, `run`, `clean`. Results go to stdout as JSON, progress to stderr."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from e2e.images.build import AUTO, build, image_name, tool_with_image
from e2e.images.cache import cache_folder, remove
from e2e.images.process import CommandError
from e2e.images.spec import NAMES
from e2e.images.testing import test_setting
from e2e.images.tools import RunRequest


def known_name(value: str) -> str:
    """Check an image's name."""
    if value not in NAMES:
        raise argparse.ArgumentTypeError(f"there is no image {value!r}, but {', '.join(NAMES)}")
    return value


def parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    top = argparse.ArgumentParser(prog="python -m e2e.images", description="Build the project's images, once each.")
    base = argparse.ArgumentParser(add_help=False)
    base.add_argument(
        "--base",
        default=os.environ.get("IMAGE_BASE", AUTO),
        help="auto (default; the public base, or a local one where it cannot be pulled), local, or an image reference;"
        " also by the variable IMAGE_BASE",
    )
    commands = top.add_subparsers(dest="command", required=True)

    make = commands.add_parser("build", parents=[base], help="build images and print them with their archives")
    make.add_argument("names", nargs="*", type=known_name, default=list(NAMES), metavar="|".join(NAMES))
    make.add_argument("--out", type=Path, help="folder for the archives (default: the cache folder)")

    show = commands.add_parser("tag", parents=[base], help="print an image's full name without building it")
    show.add_argument("name", choices=NAMES)

    execute = commands.add_parser("run", parents=[base], help="run a command inside an image, on the host's network")
    execute.add_argument("name", choices=NAMES)
    execute.add_argument("-v", "--volume", action="append", default=[], metavar="HOST:CONTAINER[:ro]")
    execute.add_argument("-e", "--env", action="append", default=[], metavar="KEY=VALUE")
    execute.add_argument("-u", "--user", help="user id (default: the image's)")
    execute.add_argument("-w", "--workdir", help="folder inside the image to start in (default: the image's)")
    execute.add_argument("--tests", action="store_true", help="mount the repository at /src and make pytest importable")
    execute.add_argument("argv", nargs="+", metavar="COMMAND")

    commands.add_parser("clean", help="remove all images, bases and archives from the cache")
    return top


def run(options: argparse.Namespace) -> int:
    """Run a command inside an image and return its exit code."""
    env = dict(entry.split("=", 1) for entry in options.env)
    volumes, workdir = list(options.volume), options.workdir
    if options.tests:
        setting = test_setting()
        volumes = [*setting.volumes, *volumes]
        env = {**setting.env, **env}
        workdir = workdir or setting.workdir
    tool, image = tool_with_image(options.name, options.base)
    return tool.run(RunRequest(image, options.argv, volumes, env, options.user, workdir))


def main() -> int:
    """Carry out one command and return the exit code; expected failures are one message on stderr."""

    def stop(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)  # unwinds, so that programs that we started are ended and temporary files removed

    signal.signal(signal.SIGTERM, stop)
    options = parser().parse_args()
    try:
        match options.command:
            case "build":
                results = {name: build(name, options.base, options.out).as_json() for name in options.names}
                print(json.dumps(results, indent=2))
            case "tag":
                print(image_name(options.name, options.base))
            case "run":
                return run(options)
            case "clean":
                remove(cache_folder())
    except (CommandError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
