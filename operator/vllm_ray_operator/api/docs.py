"""The reference of the resource in Markdown, from its schema and the tables of what the operator owns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vllm_ray_operator.api import API_VERSION, KIND, owned
from vllm_ray_operator.api.schema import Schema, at

_HEAD = f"""<!-- Made by `python -m vllm_ray_operator.api.crd` from operator/vllm_ray_operator/api. Do not edit. -->

# The {KIND} resource

`apiVersion: {API_VERSION}`, `kind: {KIND}`, short name `vd`.

Only `spec.model.uri` must be given. Defaults are written into a revision when it is made, so a newer operator with
other defaults changes nothing that runs. The API server refuses what is wrong and says which field to use instead.
"""


def render(schema: Schema) -> str:
    """Return the whole page."""
    parts = [
        _HEAD,
        "## spec\n",
        _table(("Field", "Type", "Meaning"), _fields(at(schema, "spec"), "")),
        "## status\n",
        _table(("Field", "Type", "Meaning"), _fields(at(schema, "status"), "")),
        "## Engine arguments that the operator owns\n\nIn `spec.engine.args`, in any spelling (`--flag value` as two "
        "items, `--flag=value`, with underscores, abbreviated):\n",
        _table(("Argument", "Instead"), _owned(owned.ENGINE_ARGUMENTS)),
        "## Environment variables that the operator owns\n\nIn `spec.engine.env`:\n",
        _table(("Variable", "Instead"), _owned(owned.ENVIRONMENT)),
        "## Labels and annotations that the operator owns\n\n"
        "In `spec.cluster.labels` and `spec.cluster.annotations`:\n",
        _table(("Key", "Instead"), _owned(owned.METADATA)),
        "## Other rules\n",
        "".join(f"- {message}\n" for message in dict.fromkeys(_messages(schema))),
    ]
    return "\n".join(parts)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _fields(schema: Schema, path: str) -> Iterator[tuple[str, str, str]]:
    """Yield path, type and meaning of every field below an object, in order."""
    for name, field in schema.get("properties", {}).items():
        here = f"{path}{name}"
        required = "**Required.** " if name in schema.get("required", ()) and path == "model." else ""
        yield f"`{here}`", _type(field), required + _meaning(field)
        inner, suffix = (field["items"], "[].") if "items" in field else (field, ".")
        yield from _fields(inner, here + suffix)


def _type(field: Schema) -> str:
    if field.get("x-kubernetes-int-or-string"):
        return "integer or percentage" if "%" in field.get("pattern", "") else "quantity"
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    match field:
        case {"items": items}:
            return f"list of {_type(items)}"
        case {"additionalProperties": values}:
            return f"map of {_type(values)}"
        case {"format": "date-time"}:
            return "time"
    return str(field["type"])


def _meaning(field: Schema) -> str:
    bounds = []
    match field:
        case {"minimum": low, "maximum": high}:
            bounds.append(f"{low} to {high}.")
    if "default" in field:
        bounds.append(f"Default: {field['default']}.")
    return " ".join([field.get("description", ""), *bounds]).strip()


def _owned(table: tuple[owned.Owned, ...]) -> Iterator[tuple[str, str]]:
    for entry in table:
        names = ", ".join(f"`{name}*`" if name.endswith(("-", "_", "/")) else f"`{name}`" for name in entry.names)
        yield names, entry.instead[0].upper() + entry.instead[1:] + "."


def _messages(schema: Schema) -> Iterator[str]:
    """Yield the messages of all rules but those of the tables above."""
    for entry in schema.get("x-kubernetes-validations", ()):
        if ": owned by the operator" not in entry["message"]:
            yield entry["message"]
    for field in schema.get("properties", {}).values():
        yield from _messages(field)
    if "items" in schema:
        yield from _messages(schema["items"])
