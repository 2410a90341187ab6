"""Constraints: their canonical form, and what the library compiles for them."""

import json
from collections.abc import Mapping
from typing import Any

from protos.inference_pb2 import Constraint
from runtime.grammar.engine import MAX_AFTER_BYTES, MAX_CHOICES, MAX_TEXT_BYTES, ConstraintError
from runtime.grammar.json_schema.canonical import canonical_schema
from runtime.grammar.json_schema.simplified import with_exact_formats
from runtime.grammar.json_text import check_size, read_json
from runtime.grammar.lark.gbnf import canonical_grammar
from runtime.grammar.lark.text import check_regex, quoted, slashed
from runtime.grammar.structural.formats import canonical_structural_tag
from runtime.grammar.structural.lark import grammars_of_structural_tag

# Whitespace between the parts of a JSON text. Without a bound a model may write it until its output is at its end.
MOST_WHITESPACE = 64
_ANY_OBJECT = '{"type":"object"}'


def canonical_constraint(constraint: Constraint) -> Constraint:
    """Returns a constraint in its canonical form: formatted in one way, defaults stated, closed objects written out.

    Raises ConstraintError. That the library can compile it is another question.
    """
    kind = constraint.WhichOneof("kind")
    is_closed = constraint.disable_additional_properties
    found = Constraint(after=constraint.after)
    match kind:
        case "json_schema":
            found.json_schema = canonical_schema(constraint.json_schema, is_closed=is_closed)
        case "json_object":
            if not constraint.json_object:
                raise ConstraintError("json_object must be true, or left out")
            found.json_object = True
        case "regex":
            check_size(constraint.regex, "regex")
            check_regex(constraint.regex, "regex")
            found.regex = unanchored(constraint.regex)
        case "choice":
            found.choice.texts[:] = _checked_choices(list(constraint.choice.texts))
        case "grammar":
            found.grammar = canonical_grammar(constraint.grammar)
        case "structural_tag":
            found.structural_tag = canonical_structural_tag(constraint.structural_tag, is_closed=is_closed)
            check_size(found.structural_tag, "structural_tag, with its parts written in full,")
        case _:
            raise ConstraintError(
                "constraint has no kind: set json_schema, json_object, regex, choice, grammar or structural_tag"
            )
    if kind in ("json_schema", "json_object", "structural_tag"):
        found.disable_any_whitespace = constraint.disable_any_whitespace
    elif constraint.disable_any_whitespace:
        raise ConstraintError(f"disable_any_whitespace does not go with {kind}")
    if is_closed and kind not in ("json_schema", "structural_tag"):
        raise ConstraintError(f"disable_additional_properties does not go with {kind}")
    size = len(constraint.after.encode())
    if size > MAX_AFTER_BYTES:
        raise ConstraintError(f"after has {size} bytes: use at most {MAX_AFTER_BYTES}")
    return found


def library_grammar(constraint: Constraint, special_tokens: Mapping[str, int]) -> str:
    """Returns what the library compiles for a canonical constraint, without its free part. special_tokens: see
    Vocabulary. Raises ConstraintError."""
    options = _json_options(constraint)
    match constraint.WhichOneof("kind"):
        case "json_schema" | "json_object" as kind:
            schema = read_json(constraint.json_schema if kind == "json_schema" else _ANY_OBJECT, "json_schema")
            if schema is False:
                raise ConstraintError("json_schema is false, which nothing can satisfy")
            grammars = [{"json_schema": with_exact_formats(schema) | {"x-guidance": options}}]
        case "regex":
            grammars = [{"lark_grammar": f"start: T\nT: {slashed(constraint.regex)}\n"}]
        case "choice":
            grammars = [{"lark_grammar": f"start: T\nT: {' | '.join(map(quoted, constraint.choice.texts))}\n"}]
        case "grammar":
            grammars = [{"lark_grammar": constraint.grammar}]
        case "structural_tag":
            grammars = grammars_of_structural_tag(constraint.structural_tag, options, special_tokens)
        case kind:
            raise ConstraintError(f"no canonical constraint: {kind}")
    return json.dumps({"grammars": grammars})


def _json_options(constraint: Constraint) -> dict[str, Any]:
    """Returns the library's options for JSON.

    No \\u escapes: with them, llguidance 1.9.1 takes an escaped name of a property for another one ("\\u0061" for "a").
    """
    options: dict[str, Any] = {"json_allowed_escapes": 'nrbtf\\"'}
    if constraint.disable_any_whitespace:
        return options | {"whitespace_flexible": False}
    return options | {"whitespace_pattern": f"[\\x20\\x0A\\x0D\\x09]{{1,{MOST_WHITESPACE}}}"}


def _checked_choices(texts: list[str]) -> list[str]:
    if not 0 < len(texts) <= MAX_CHOICES:
        raise ConstraintError(f"choice has {len(texts)} texts: use 1 to {MAX_CHOICES}")
    if "" in texts:
        raise ConstraintError("choice has an empty text")
    size = sum(len(text.encode()) for text in texts)
    if size > MAX_TEXT_BYTES:
        raise ConstraintError(f"choice has {size} bytes: use at most {MAX_TEXT_BYTES}")
    return list(dict.fromkeys(texts))


def unanchored(pattern: str) -> str:
    """Returns a regular expression without ^ at its beginning and $ at its end: it is for a whole output anyway."""
    if _is_alternation(pattern):
        return pattern
    shorter = pattern.lstrip("^").rstrip("$")
    num_backslashes = len(shorter) - len(shorter.rstrip("\\"))
    # The first $ behind an odd number of backslashes is a character.
    return shorter + "$" * (num_backslashes % 2 and pattern.endswith("$"))


def _is_alternation(pattern: str) -> bool:
    """Tells whether a regular expression has alternatives outside of its groups."""
    depth, class_at, is_escaped = 0, -1, False
    for at, character in enumerate(pattern):
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif class_at >= 0:
            # A ] that comes first, also behind a ^, is one of the class's characters.
            if character == "]" and pattern[class_at + 1 : at] not in ("", "^"):
                class_at = -1
        elif character == "[":
            class_at = at
        elif character == "|" and depth == 0:
            return True
        else:
            depth += (character == "(") - (character == ")")
    return False
