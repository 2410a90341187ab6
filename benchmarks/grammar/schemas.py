"""Schemas whose outputs are too long to end: lists of records."""

from typing import Any


def _list_of(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "array",
        "minItems": 60,
        "items": {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        },
    }


SCHEMAS = {
    "records": _list_of(
        id={"type": "integer"},
        name={"type": "string"},
        tags={"type": "array", "items": {"type": "string"}, "maxItems": 4},
        active={"type": "boolean"},
    ),
    "long_keys": _list_of(
        number_of_inhabitants_at_the_last_census={"type": "integer"},
        name_of_the_head_of_the_administration={"type": "string"},
        has_an_international_airport_within_reach={"type": "boolean"},
    ),
}
