"""Command line: run the cells that have no result yet, then write docs/compatibility.md from all results."""

from __future__ import annotations

import argparse
import signal
import sys
from types import FrameType

from e2e.images.process import Progress
from e2e.images.spec import REPOSITORY
from e2e.matrix import environments, plan, render, results, running

DOCUMENT = REPOSITORY / "docs" / "compatibility.md"


def parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    top = argparse.ArgumentParser(
        prog="python -m e2e.matrix",
        description="Run the compatibility matrix and write docs/compatibility.md. Results are kept in build/matrix,"
        " for as long as the engine package is the same: an interrupted run goes on where it was. Needs root.",
    )
    top.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="vllm=VERSION,ray=VERSION",
        help="these cells; both parts are optional, and it may be given several times",
    )
    top.add_argument("--again", action="store_true", help="also cells that have a result")
    top.add_argument("--list", action="store_true", help="print the cells without a result, as --only takes them")
    top.add_argument("--render", action="store_true", help="run nothing, write the document from the kept results")
    top.add_argument("--keep", action="store_true", help="keep the Python environments, some GB in the user's cache")
    return top


def main() -> int:
    """Return 0 when every cell that was asked for has passed."""

    def stop(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    options = parser().parse_args()
    everything, base, package = plan.cells(), results.folder(), running.package_name()
    try:
        wanted = plan.select(everything, options.only)
    except plan.SelectionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    known = results.load(everything, base, package)
    missing = [cell for cell in wanted if options.again or cell not in known]
    if options.list:
        print("\n".join(f"vllm={cell.vllm},ray={cell.ray}" for cell in missing))
        return 0
    if not options.render:
        progress = Progress("matrix")
        for number, cell in enumerate(missing, 1):
            progress.say(f"{cell.name} ({number} of {len(missing)})")
            result = running.run(cell, progress, base / "logs")
            results.save(result, base)
            progress.say(f"{cell.name}: {'passed' if result.passed else f'FAILED: {result.failure}'}")
            if not options.keep and cell.environment not in {later.environment for later in missing[number:]}:
                environments.discard(cell.environment)
        known = results.load(everything, base, package)
    DOCUMENT.write_text(render.document(known, everything))
    return 0 if all(cell in known and known[cell].passed for cell in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
