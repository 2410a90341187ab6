"""The keywords of JSON Schema (draft 2020-12), by what becomes of them, and its formats of strings."""

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
_FRACTION = "(?:[.][0-9]+)?"
_HOURS = "(?:[01][0-9]|2[0-3])"
# A leap second is the last of a day of UTC; such days are written without another offset.
_TIME = (
    f"(?:{_HOURS}:[0-5][0-9]:[0-5][0-9]{_FRACTION}(?:[zZ]|[+-]{_HOURS}:[0-5][0-9])"
    f"|23:59:60{_FRACTION}(?:[zZ]|[+-]00:00))"
)

_POINTER = "(?:/(?:[^/~]|~[01])*)*"

# Formats that the library does not have, or for which its own regular expression is too loose: it has February 29 in
# every year, and leap seconds at any time. RFC 3339 and RFC 6901.
EXACT = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
}

# The library has regular expressions for the others.
FORMATS = frozenset({*EXACT, "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})


# Schemas whose difference from 2020-12 is in keywords that are refused or checked.
DRAFTS = frozenset(
    {
        "https://json-schema.org/draft/2020-12/schema",
        "https://json-schema.org/draft/2019-09/schema",
        "http://json-schema.org/draft-07/schema",
        "http://json-schema.org/draft-06/schema",
    }
)
# In these, the neighbours of a $ref count for nothing.
LONELY_REF_DRAFTS = frozenset({"http://json-schema.org/draft-07/schema", "http://json-schema.org/draft-06/schema"})

# Say nothing about an instance. They are left out of the canonical form, as is every keyword that begins with x-.
ANNOTATIONS = frozenset(
    {
        *("$comment", "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("contentEncoding", "contentMediaType", "contentSchema", "discriminator"),
    }
)

# Hold other schemas.
SCHEMA = frozenset({"items", "additionalProperties"})
SCHEMA_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
SCHEMA_MAPS = frozenset({"properties", "patternProperties"})
DEFINITIONS = frozenset({"$defs", "definitions"})

COUNTS = frozenset({"minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"})
NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

# Names for the schema that they stand in.
ANCHORS = frozenset({"$anchor", "$dynamicAnchor"})

# An instance has to be valid against each of these besides its schema's other keywords.
IN_PLACE = frozenset({"allOf", "anyOf", "oneOf", "$ref"})

# What to use instead.
HINTS = {
    "dependencies": "state the cases with anyOf",
    "dependentRequired": "state the cases with anyOf",
    "dependentSchemas": "state the cases with anyOf",
    "if": "state the cases with anyOf",
    "then": "state the cases with anyOf",
    "else": "state the cases with anyOf",
    "not": "say what is allowed instead",
    "additionalItems": "use prefixItems and items",
    "unevaluatedItems": "use items",
    "unevaluatedProperties": "use additionalProperties",
    "nullable": 'use "type": [..., "null"]',
    "x-guidance": "use disable_any_whitespace",
    "$dynamicRef": "use $ref",
    "$recursiveAnchor": "use $ref",
    "$recursiveRef": "use $ref",
}
