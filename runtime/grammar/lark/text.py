"""Pieces of grammars in Lark's syntax: written for the library, and checked where a client wrote them."""

import json
import re

from runtime.grammar.engine import MAX_DEPTH, MAX_REPEAT, ConstraintError

ANY_TEXT = "/(?s:.*)/"

# What stands between strings, regular expressions and comments decides.
_PIECES = re.compile(
    r'(?P<string>"(?:[^"\\\n]|\\.)*+"i?)|(?P<comment>//[^\n]*|#[^\n]*)|(?P<regex>/(?:[^/\\\n]|\\.)++/[a-z]*)'
    r"|(?P<directive>%\w+)|(?P<token><[^>\s]*>)|(?P<grammar>@\w+)|(?P<options>\[[^\]\n]*\](?=\s*:))"
    r"|(?P<count>\{[^}\n]*\}|~\s*[\d.]+)|(?P<bracket>[()\[\]])"
)
_DIRECTIVES = {"%ignore", "%import"}
_OPTIONS = {"lazy", "capture"}
_HEADER = re.compile(r"%llguidance\s*\{\s*\}")


def quoted(text: str) -> str:
    """Returns a text as a string of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def slashed(pattern: str) -> str:
    """Returns a regular expression as Lark writes it."""
    if not pattern:
        return '""'
    found, is_escaped = list[str](), False
    for character in pattern:
        if character == "/" and not is_escaped:
            found.append("\\/")
        elif character == "\n":
            found.append("n" if is_escaped else "\\n")
        else:
            found.append(character)
        is_escaped = character == "\\" and not is_escaped
    return f"/{''.join(found)}/"


def without(texts: list[str]) -> str:
    """Returns a terminal's body: any text that has none of some texts in it."""
    if not texts:
        return ANY_TEXT
    return f"{ANY_TEXT} & ~({ANY_TEXT} ({' | '.join(map(quoted, texts))}) {ANY_TEXT})"


def check_lark(text: str, field: str) -> str:
    """Returns a client's grammar without the library's header. Raises ConstraintError for the library's own extensions,
    with which a grammar could name special tokens, change sampling or bring an unchecked schema, and for deep nesting.
    """
    text = _HEADER.sub("", text)
    depth = 0
    for piece in _PIECES.finditer(text):
        found = piece[0]
        match piece.lastgroup:
            case "directive" if found not in _DIRECTIVES:
                hint = ": use a structural tag" if found in ("%json", "%lark") else ""
                raise ConstraintError(f"{field}: {found} is not supported{hint}")
            case "token":
                raise ConstraintError(f"{field}: {found[:80]} would be a special token, which no constraint draws")
            case "grammar":
                raise ConstraintError(f"{field}: {found[:80]} refers to another grammar; there is one only")
            case "options":
                for option in found[1:-1].split(","):
                    name = option.partition("=")[0].strip()
                    if name not in _OPTIONS:
                        raise ConstraintError(f"{field}: the option {name[:80]!r} of a rule is not supported")
            case "count":
                if any(int(count[:9]) > MAX_REPEAT for count in re.findall(r"\d+", found)):
                    raise ConstraintError(f"{field}: {found[:80]} repeats more than {MAX_REPEAT} times")
            case "bracket":
                depth += 1 if found in "([" else -1
                if depth > MAX_DEPTH:
                    raise ConstraintError(f"{field} has brackets nested more than {MAX_DEPTH} deep")
            case "regex":
                check_regex(found[1 : found.rindex("/")], field)
    return text.strip() + "\n"


_REGEX_PIECES = re.compile(r"\\.|\{(\d*),?(\d*)\}|[()]", re.DOTALL)


def check_regex(pattern: str, field: str) -> None:
    """Raises ConstraintError for a regular expression that nests deeper, or repeats more often, than the bounds."""
    depth = 0
    for piece in _REGEX_PIECES.finditer(pattern):
        if piece[0] == "(":
            depth += 1
            if depth > MAX_DEPTH:
                raise ConstraintError(f"{field} has groups nested more than {MAX_DEPTH} deep")
        elif piece[0] == ")":
            depth -= 1
        elif any(count and int(count[:9]) > MAX_REPEAT for count in (piece[1], piece[2])):
            raise ConstraintError(f"{field}: {piece[0][:80]} repeats more than {MAX_REPEAT} times")
