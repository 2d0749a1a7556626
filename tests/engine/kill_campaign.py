"""Kill every process at every moment: `python3 -m tests.engine.kill_campaign [PHASE ...]`, inside the engine image.

Prints one line `CELL {...}` for each process and phase, for whoever writes the report.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from datetime import date
from importlib.metadata import version

from .conftest import Attempts
from .ownership import PHASES, START_SECONDS, Campaign, PodCluster


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phases", nargs="*", choices=[*PHASES, []], help="default: all")
    parser.add_argument("--victim", action="append", help="only this process")
    options = parser.parse_args()
    command = " ".join(["make kill-campaign", *([f'PHASES="{" ".join(options.phases)}"'] if options.phases else [])])
    versions = " ".join(f"{name} {version(name)}" for name in ("vllm", "ray"))
    print(f"FACTS `{command}`, {date.today()}, {versions}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.0f}")
    faults = 0
    cluster = PodCluster()
    try:
        cluster.start()
        attempts = Attempts(cluster)
        campaign = Campaign(attempts)
        for phase in options.phases or PHASES:
            for victim in options.victim or PHASES[phase].victims:
                cell = campaign.kill(phase, victim)
                faults += bool(cell.fault)
                print("CELL", json.dumps(asdict(cell)), flush=True)
        # After the last of them the next attempt starts too, as it did after each of the others.
        attempts.start().wait_phase("Serving", START_SECONDS)
    finally:
        cluster.stop()
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
