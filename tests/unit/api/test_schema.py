"""The structural-schema writer, on small types."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from vllm_ray_operator.api.base import ApiModel
from vllm_ray_operator.api.schema import at, structural
from vllm_ray_operator.api.spec import Quantity


class Inner(ApiModel):
    """What it is,
    in two lines.
    """

    some_name: str = "x"


class Outer(ApiModel):
    """The whole."""

    required: int
    optional: int | None = Field(default=None, ge=1)
    inner: Inner | None = None
    described: Inner | None = Field(default=None, description="More exact.")
    items: list[Annotated[str, Field(max_length=3)]] = Field(default_factory=list, max_length=2)
    inners: list[Inner] = Field(default_factory=list)
    quantity: Quantity | None = Field(default=None, description="An amount.")
    quantities: dict[str, Quantity] = Field(default_factory=dict, max_length=4)
    choice: Literal["A", "B"] | None = None
    single: Literal["A"] = "A"
    free: dict[str, Any] | None = None
    when: datetime | None = None
    flag: bool = False


SCHEMA = structural(Outer)

QUANTITY = {
    "x-kubernetes-int-or-string": True,
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "minimum": 0,
    "maxLength": 32,
}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("required", {"type": "integer"}),
        ("optional", {"type": "integer", "minimum": 1}),
        ("inner.someName", {"type": "string"}),
        ("items", {"type": "array", "maxItems": 2, "items": {"type": "string", "maxLength": 3}}),
        ("inners[].someName", {"type": "string"}),
        ("choice", {"type": "string", "enum": ["A", "B"]}),
        ("single", {"type": "string", "enum": ["A"]}),
        ("free", {"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
        ("when", {"type": "string", "format": "date-time"}),
        ("flag", {"type": "boolean"}),
    ],
)
def test_form_of(path: str, expected: dict[str, Any]) -> None:
    assert at(SCHEMA, path) == expected


def test_quantities_are_ints_or_strings() -> None:
    quantity = dict(at(SCHEMA, "quantity"))
    pattern = quantity.pop("pattern")
    assert quantity == {**QUANTITY, "description": "An amount."}
    values = dict(at(SCHEMA, "quantities")["additionalProperties"])
    assert values.pop("pattern") == pattern
    assert values == QUANTITY


def test_only_what_has_no_default_is_required() -> None:
    assert SCHEMA["required"] == ["required"]


def test_the_field_describes_rather_than_its_type() -> None:
    assert at(SCHEMA, "inner")["description"] == "What it is, in two lines."
    assert at(SCHEMA, "described")["description"] == "More exact."


def test_nothing_of_pydantic_is_left() -> None:
    left = set()

    def visit(schema: dict[str, Any]) -> None:
        left.update(set(schema) & {"title", "default", "$ref", "$defs", "const", "nullable"})
        for child in schema.get("properties", {}).values():
            visit(child)
        for key in ("items", "additionalProperties"):
            if key in schema:
                visit(schema[key])

    visit(SCHEMA)
    assert left == set()


class Multiple(ApiModel):
    value: int = Field(multiple_of=2)


class Union(ApiModel):
    value: int | list[int]


class Pair(ApiModel):
    value: tuple[int, str]


@pytest.mark.parametrize("model", [Multiple, Union, Pair])
def test_what_has_no_structural_form_is_an_error(model: type[ApiModel]) -> None:
    with pytest.raises(ValueError, match="no structural form"):
        structural(model)


@pytest.mark.parametrize("path", ["nothing", "items[].x", "inner.some_name"])
def test_a_wrong_path_is_an_error(path: str) -> None:
    with pytest.raises(KeyError):
        at(SCHEMA, path)
