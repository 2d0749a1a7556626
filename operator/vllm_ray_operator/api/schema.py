"""Structural schemas (the dialect of CustomResourceDefinitions) from pydantic types.

Only the JSON-schema keywords that are known here pass; any other is an error, so that no constraint gets lost.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from vllm_ray_operator.api.base import ApiModel

Schema = dict[str, Any]

_KEPT = {
    "type",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "required",
    "format",
}
_DROPPED = {"title", "default", "description", "properties", "items", "additionalProperties", "const"}


def structural(model: type[ApiModel]) -> Schema:
    """Return the structural schema of a type, without defaults and without Kubernetes' own extensions.

    Raises ValueError for something that the dialect cannot express.
    """
    schema = model.model_json_schema(by_alias=True)
    return _convert(schema, schema.get("$defs", {}))


def at(schema: Schema, path: str) -> Schema:
    """Return the part of a structural schema at a path such as ``spec.engine.args[]``. Raises KeyError."""
    for name in path.split(".") if path else ():
        schema = schema["properties"][name.removesuffix("[]")]
        if name.endswith("[]"):
            schema = schema["items"]
    return schema


def _convert(source: Mapping[str, Any], defs: Mapping[str, Any]) -> Schema:
    source = _resolve(source, defs)
    unknown = set(source) - _KEPT - _DROPPED - {"x-kubernetes-int-or-string", "anyOf"}
    if unknown:
        raise ValueError(f"no structural form for {sorted(unknown)} in {source}")
    result: Schema = {}
    if "description" in source:
        result["description"] = " ".join(inspect.cleandoc(source["description"]).split())
    result |= {key: value for key, value in source.items() if key in _KEPT or key.startswith("x-") or key == "anyOf"}
    if "const" in source:
        result["enum"] = [source["const"]]
    if "items" in source:
        result["items"] = _convert(source["items"], defs)
    if "properties" in source:
        result["properties"] = {name: _convert(value, defs) for name, value in source["properties"].items()}
    match source.get("additionalProperties"):
        case True:
            result["x-kubernetes-preserve-unknown-fields"] = True
        case dict() as values:
            result["additionalProperties"] = _convert(values, defs)
    return result


def _resolve(source: Mapping[str, Any], defs: Mapping[str, Any]) -> Schema:
    """Put references in place and reduce ``anyOf`` to an optional value or an IntOrString; outer words win."""
    result = {key: value for key, value in source.items() if key not in {"$ref", "$defs", "anyOf"}}
    if "$ref" in source:
        return {**_resolve(defs[source["$ref"].removeprefix("#/$defs/")], defs), **result}
    if "anyOf" not in source:
        return result
    options = [_resolve(option, defs) for option in source["anyOf"] if option != {"type": "null"}]
    if len(options) == 1:
        return {**options[0], **result}
    if sorted(str(option.get("type")) for option in options) != ["integer", "string"]:
        raise ValueError(f"no structural form for the union {source}")
    merged = {key: value for option in options for key, value in option.items() if key != "type"}
    return {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}], **merged, **result}
