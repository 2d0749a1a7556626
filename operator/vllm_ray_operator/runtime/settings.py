"""The operator's settings, from the environment."""

from __future__ import annotations

import argparse
import re
import socket
import textwrap
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

LogFormat = Literal["json", "text"]


class SettingsError(Exception):
    """A setting that cannot be used; the message names it."""


@dataclass(frozen=True)
class Settings:
    """How this process runs."""

    engine_image: str | None
    namespaces: tuple[str, ...]
    log_level: str
    log_format: LogFormat
    workers: int
    health_port: int
    metrics_port: int
    pod_namespace: str
    identity: str


@dataclass(frozen=True)
class _Variable:
    """One environment variable. ``parse`` raises ValueError with what is wanted."""

    name: str
    default: str
    help: str
    parse: Callable[[str], Any]


def _number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(text)

    return parse


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError("one of " + ", ".join(choices))
        return text.lower()

    return parse


def _namespaces(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if not _is_dns_label(name):
            raise ValueError(f"names of namespaces, separated by commas ({name!r} is none)")
    return names


def _namespace(text: str) -> str:
    if not _is_dns_label(text):
        raise ValueError("the name of a namespace")
    return text


def _is_dns_label(text: str) -> bool:
    return re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", text) is not None


_VARIABLES = (
    _Variable(
        "VLLM_RAY_OPERATOR_ENGINE_IMAGE",
        "",
        "Engine image of deployments that name none. Empty: every deployment has to set spec.engine.image.",
        lambda text: text or None,
    ),
    _Variable(
        "VLLM_RAY_OPERATOR_NAMESPACES",
        "",
        "Namespaces that are watched, separated by commas. Empty: all.",
        _namespaces,
    ),
    _Variable(
        "VLLM_RAY_OPERATOR_LOG_LEVEL",
        "info",
        "debug, info, warning or error.",
        _one_of("debug", "info", "warning", "error"),
    ),
    _Variable("VLLM_RAY_OPERATOR_LOG_FORMAT", "json", "json or text.", _one_of("json", "text")),
    _Variable("VLLM_RAY_OPERATOR_WORKERS", "8", "Deployments that are worked on at the same time.", _number(1, 256)),
    _Variable("VLLM_RAY_OPERATOR_HEALTH_PORT", "8081", "Port of /healthz and /readyz.", _number(1, 65535)),
    _Variable("VLLM_RAY_OPERATOR_METRICS_PORT", "8080", "Port of /metrics.", _number(1, 65535)),
    _Variable("POD_NAMESPACE", "default", "Namespace of the leader lease: the operator's own.", _namespace),
    _Variable("POD_NAME", "", "Name of the operator's pod, for the leader lease. Empty: the host's name.", str),
    _Variable(
        "POD_UID",
        "",
        "Uid of the operator's pod. With it, a restarted container takes its own lease over without waiting.",
        str,
    ),
)


def load(environment: Mapping[str, str]) -> Settings:
    """Return the settings. SettingsError names the variable, what it holds and what it should hold."""
    values: dict[str, Any] = {}
    for variable in _VARIABLES:
        text = environment.get(variable.name, "").strip() or variable.default
        try:
            values[variable.name] = variable.parse(text)
        except ValueError as error:
            raise SettingsError(f"{variable.name} is {text!r}; it must be {error}") from None
    if values["VLLM_RAY_OPERATOR_HEALTH_PORT"] == values["VLLM_RAY_OPERATOR_METRICS_PORT"]:
        raise SettingsError("VLLM_RAY_OPERATOR_HEALTH_PORT and VLLM_RAY_OPERATOR_METRICS_PORT must differ")
    return Settings(
        engine_image=values["VLLM_RAY_OPERATOR_ENGINE_IMAGE"],
        namespaces=values["VLLM_RAY_OPERATOR_NAMESPACES"],
        log_level=values["VLLM_RAY_OPERATOR_LOG_LEVEL"],
        log_format=cast("LogFormat", values["VLLM_RAY_OPERATOR_LOG_FORMAT"]),
        workers=values["VLLM_RAY_OPERATOR_WORKERS"],
        health_port=values["VLLM_RAY_OPERATOR_HEALTH_PORT"],
        metrics_port=values["VLLM_RAY_OPERATOR_METRICS_PORT"],
        pod_namespace=values["POD_NAMESPACE"],
        identity=_identity(values["POD_NAME"], values["POD_UID"]),
    )


def _identity(pod_name: str, pod_uid: str) -> str:
    """Return a name that no other living process can have: a pod runs one container of ours at a time."""
    return f"{pod_name or socket.gethostname()}_{pod_uid or uuid.uuid4()}"


def parse_arguments(arguments: Sequence[str], version: str) -> None:
    """Answer ``--help`` and ``--version`` (SystemExit 0) and refuse all else (SystemExit 2)."""
    lines = ["settings, read from the environment:"]
    for variable in _VARIABLES:
        lines.append(f"  {variable.name}  (default: {variable.default or 'empty'})")
        lines += textwrap.wrap(variable.help, width=90, initial_indent="      ", subsequent_indent="      ")
    parser = argparse.ArgumentParser(
        prog="vllm-ray-operator",
        description="Reconciles VLLMDeployment resources into RayClusters and engine jobs.",
        epilog="\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version}")
    parser.parse_args(arguments)
