"""``python -m e2e.chaos [FAULT ...]``: the campaign, or the faults named; docs/healing.md gets each row as it ends."""

from __future__ import annotations

import argparse
import datetime
import signal

from e2e import environment
from e2e.chaos import campaign, faults, report
from e2e.chaos.scene import CLUSTER, bring_up, settle
from e2e.kube import CommandError
from e2e.waiting import say

REPORT = environment.ROOT / "docs" / "healing.md"


def main() -> int:
    """Run the campaign; returns 1 if something did not go as it must."""
    parser = argparse.ArgumentParser(prog="python -m e2e.chaos", description=__doc__)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"of {', '.join(f.name for f in faults.FAULTS)}")
    try:
        chosen = faults.chosen(parser.parse_args().faults)
    except ValueError as error:
        parser.error(str(error))
    title, failed = _title(), False
    signal.signal(signal.SIGTERM, _end)
    try:
        kube = bring_up()
        for fault in chosen:
            outcome = campaign.run(fault, settle(kube))
            line = report.row(fault, outcome, title)
            print(line, flush=True)
            failed = failed or "**fault**" in line
            REPORT.write_text(report.update(REPORT.read_text() if REPORT.exists() else "", line))
    except (CommandError, TimeoutError) as error:
        say(f"the campaign ends: {error}")
        failed = True
    finally:
        environment.module("e2e.cluster", "--name", CLUSTER, "down")
    return 1 if failed else 0


def _end(*_: object) -> None:
    """End as orderly as by Ctrl-C, so that no cluster is left."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + signal.SIGTERM)


def _title() -> str:
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, {environment.commit()}"


if __name__ == "__main__":
    raise SystemExit(main())
