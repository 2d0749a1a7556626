"""Checks before an engine starts what usually goes wrong: `python3 -m vllm_ray_engine.doctor`.

By hand in a pod, in the launcher's first phase, or as a library. Exit code 1 when there is an error, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence

from vllm_ray_engine import config, plugin, reasons, versions
from vllm_ray_engine.config import ConfigError, EngineConfig
from vllm_ray_engine.diagnosis import checks, facts, nodes, root_cause
from vllm_ray_engine.diagnosis.checks import ERROR, OK, WARNING, Finding
from vllm_ray_engine.diagnosis.facts import Wanted
from vllm_ray_engine.reasons import EngineFailure, UnsupportedVersion

_MARKS = {OK: "ok     ", WARNING: "warning", ERROR: "error  "}


def wanted(engine: EngineConfig) -> Wanted:
    """Return what the launcher is going to start on its own node; its control endpoint listens already."""
    return Wanted(
        model=engine.model,
        args=engine.args,
        host=engine.host,
        ports={engine.port: "engine (spec.engine.port)"},
        local_workers=min(engine.accelerators_per_node, engine.workers),
    )


def check_start(engine: EngineConfig) -> list[Finding]:
    """Check what an attempt needs, in the attempt's own environment. Returns the warnings, raises for an error."""
    try:
        findings = checks.judge(facts.gather(wanted(engine)))
    except OSError as error:  # what the engine meets by itself, if it needs it at all
        return [Finding("doctor", WARNING, f"cannot look at this pod: {error}")]
    for finding in findings:
        if finding.status == ERROR:
            raise EngineFailure(finding.reason, ": ".join(filter(None, (finding.message, finding.remedy))))
    return [finding for finding in findings if finding.status == WARNING]


def patches() -> Finding:
    """Look for every function that the plugin changes by importing vLLM, as vLLM's processes do."""
    try:
        plugin.resolve(plugin.PATCHES, versions.release("vllm"))
    except UnsupportedVersion as error:
        return Finding("patches", ERROR, str(error), "", reasons.UNSUPPORTED_VERSION)
    return Finding("patches", OK, "vLLM is imported, and has all functions that the plugin changes")


def cluster(what: Wanted, needed: dict[str, float]) -> list[Finding]:
    """Check every node of the Ray cluster, and what they have in common."""
    try:
        found = nodes.gather(what)
    except Exception as error:
        told = root_cause.reason_of(str(error))
        reason = reasons.RAY_CONNECTION_LOST if told == reasons.ENGINE_EXITED else told
        return [Finding("ray", ERROR, f"cannot connect to Ray: {error}", "look at the head pod", reason)]
    findings = [
        finding
        for node in found
        if node.facts is not None
        for finding in checks.judge(node.facts, checks.OF_NODES, node.address)
    ]
    return [*findings, *nodes.compare(found), *([nodes.enough(found, needed)] if needed else [])]


def show(findings: Sequence[Finding]) -> str:
    """Return the findings as text, a line each, with what to do below."""
    lines = []
    for finding in findings:
        place = f"{finding.node} " if finding.node else ""
        lines.append(f"{_MARKS[finding.status]} {place}{finding.check}: {finding.message}")
        if finding.remedy and finding.status != OK:
            lines.append(f"        -> {finding.remedy}")
    count = {status: sum(finding.status == status for finding in findings) for status in _MARKS}
    lines.append(f"{count[ERROR]} errors, {count[WARNING]} warnings, {count[OK]} ok")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    text = "\n".join(
        f"  {check.__name__.replace('_', '-'):24}{(check.__doc__ or '').splitlines()[0]}" for check in checks.CHECKS
    )
    parser = argparse.ArgumentParser(
        prog="python3 -m vllm_ray_engine.doctor",
        description="Check, before an engine starts, what usually goes wrong on this node.",
        epilog=f"checks:\n{text}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="path or name of the model that is to run")
    parser.add_argument("--port", type=int, action="append", default=[], help="a port that is to be free (repeatable)")
    parser.add_argument("--workers", type=int, default=1, help="workers of the engine on its own node (default 1)")
    parser.add_argument("--need", action="append", default=[], metavar="RESOURCE=COUNT", type=_resource,
                        help="with --nodes: a Ray resource that is needed, such as GPU=8 (repeatable)")  # fmt: skip
    parser.add_argument("--patches", action="store_true", help="import vLLM and look up what the plugin changes (10 s)")
    parser.add_argument("--nodes", action="store_true", help="check every node of the Ray cluster, by a task on each")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    return parser


def _resource(text: str) -> tuple[str, float]:
    name, found, count = text.partition("=")
    if not name or not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not RESOURCE=COUNT")
    return name, float(count)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check this node, and others as far as asked; print what was found and return the exit code."""
    given = _parser().parse_args(arguments)
    what = Wanted(model=given.model, ports=dict.fromkeys(given.port, "engine"), local_workers=given.workers)
    needed: dict[str, float] = dict(given.need)
    try:
        if config.ENVIRONMENT_VARIABLE in os.environ and given.model is None:
            engine = config.from_environment()
            what = wanted(engine)
            needed = {engine.accelerator_key: engine.workers, engine.slot_resource: engine.workers} | needed
    except ConfigError as error:
        findings = [Finding("configuration", ERROR, str(error), "", reasons.INVALID_ARGUMENTS)]
    else:
        findings = checks.judge(facts.gather(what))
    if given.patches:
        findings.append(patches())
    if given.nodes:
        elsewhere = dataclasses.replace(what, ports={})
        findings += cluster(elsewhere, needed)
    failed = any(finding.status == ERROR for finding in findings)
    if given.json:
        print(
            json.dumps({"ok": not failed, "findings": [dataclasses.asdict(finding) for finding in findings]}, indent=1)
        )
    else:
        print(show(findings))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
