"""Many more random schedules than the unit tests run: ``python -m tests.unit.plan.soak --seeds 20000``.

Prints every seed that fails with the reason; ``--show`` prints the log of one seed. Exit code 1 if any failed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time

from tests.unit.plan.test_schedules import run


def main() -> int:
    """Run the schedules of the given seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=1000, help="first seed")
    parser.add_argument("--seeds", type=int, default=20000, help="how many")
    parser.add_argument("--backups", action="store_true", help="schedules in which older statuses are restored")
    parser.add_argument("--show", type=int, help="run this seed only, with its log")
    options = parser.parse_args()
    if options.show is not None:
        print(*run(options.show, backups=options.backups).log, sep="\n")
        return 0
    failed, begin = 0, time.monotonic()
    for done, seed in enumerate(range(options.first, options.first + options.seeds), start=1):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                run(seed, backups=options.backups)
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
        if done % 1000 == 0 or done == options.seeds:
            print(f"{done} schedules, {failed} failed, {time.monotonic() - begin:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
