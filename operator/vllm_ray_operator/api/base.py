"""The shared base of all API types: camelCase on the wire, snake_case in Python, immutable."""

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """Part of a resource.

    Unknown fields are ignored when read: the API server has pruned or refused them already, and an older operator
    has to live with the fields of a newer CRD.
    """

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore")

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON form: camelCase, absent values left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
