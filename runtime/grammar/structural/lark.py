"""Structural tags as grammars of the library.

Where a mark has the text of a special token, models write the token: it may come there, as its text may.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.grammar.engine import ConstraintError
from runtime.grammar.json_schema.simplified import with_exact_formats
from runtime.grammar.json_text import read_json
from runtime.grammar.lark.text import quoted, slashed, without
from runtime.grammar.structural.formats import FIELD


def grammars_of_structural_tag(
    text: str, options: dict[str, Any], special_tokens: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Returns the library's grammars for a canonical structural tag; the first is the whole.

    options: the library's, of JSON. special_tokens: ids by text, of those that may be in a mark.

    Raises ConstraintError for free text whose end nothing marks.
    """
    writer = _Writer(options, special_tokens)
    start = writer.rule(read_json(text, FIELD)["format"], is_last=True)
    writer.lines.insert(0, f"start: {start}")
    return [{"name": "structural_tag", "lark_grammar": "\n".join(writer.lines) + "\n"}, *writer.grammars]


class _Writer:
    def __init__(self, options: dict[str, Any], special_tokens: Mapping[str, int]) -> None:
        self._options, self._special_tokens = options, special_tokens
        texts = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None
        self.lines: list[str] = []
        self.grammars: list[dict[str, Any]] = []

    def _define(self, body: str, *, is_terminal: bool = False, options: str = "") -> str:
        name = f"{'T' if is_terminal else 'r'}{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    def _grammar(self, grammar: dict[str, Any]) -> str:
        name = f"g{len(self.grammars)}"
        self.grammars.append({"name": name} | grammar)
        return f"@{name}"

    def rule(self, value: dict[str, Any], *, is_last: bool) -> str:
        """Returns the name of a rule for a format. is_last: nothing follows it."""
        match value["type"]:
            case "const_string":
                body = self._mark(value["value"])
            case "json_schema":
                schema = value["json_schema"]
                schema = {} if schema is True else schema
                if schema is False:
                    raise ConstraintError(f"{FIELD} has the schema false, which nothing can satisfy")
                body = self._grammar({"json_schema": with_exact_formats(schema) | {"x-guidance": self._options}})
            case "regex":
                return self._define(slashed(value["pattern"]), is_terminal=True)
            case "grammar":
                body = self._grammar({"lark_grammar": value["grammar"]})
            case "any_text":
                if not is_last:
                    raise ConstraintError(f"{FIELD}: any_text must be the last part, or the content of a tag")
                return self._define(without(value.get("excludes", [])), is_terminal=True)
            case "sequence":
                elements = value["elements"]
                body = " ".join(
                    self.rule(each, is_last=is_last and index == len(elements) - 1)
                    for index, each in enumerate(elements)
                )
            case "or":
                body = " | ".join(self.rule(each, is_last=is_last) for each in value["elements"])
            case "optional" | "star" | "plus" as kind:
                inner = self.rule(value["content"], is_last=is_last and kind == "optional")
                body = f"({inner}){ {'optional': '?', 'star': '*', 'plus': '+'}[kind] }"
            case "repeat":
                body = f"({self.rule(value['content'], is_last=False)}){{{value['min']},{value['max']}}}"
            case "tag":
                body = f"{self._mark(value['begin'])} {self._content_and_end(value)}"
            case "triggered_tags":
                return self._triggered(value, is_last)
            case "tags_with_separator":
                body = self._separated(value)
            case kind:
                raise AssertionError(kind)
        return self._define(body)

    def _content_and_end(self, tag: dict[str, Any]) -> str:
        ends = tag["end"]
        content = tag["content"]
        if content["type"] != "any_text":
            options = " | ".join(map(self._mark, ends))
            return f"{self.rule(content, is_last=False)} ({options})"
        if "" in ends:
            raise ConstraintError(f"{FIELD}: any_text in a tag needs an end")
        # As short as it can be: the text goes to the first end.
        return self._until(ends, content.get("excludes", []))

    def _mark(self, text: str) -> str:
        """The text of a mark, in which special tokens are themselves or their text."""
        parts = self._special.split(text) if self._special is not None else [text]
        # Every second part is a special token's.
        written = [
            f"({quoted(part)} | <[{self._special_tokens[part]}]>)" if index % 2 else quoted(part)
            for index, part in enumerate(parts)
            if part or len(parts) == 1
        ]
        return " ".join(written)

    def _until(self, ends: Sequence[str], excludes: list[str]) -> str:
        """Any text up to one of some ends, the first that comes."""
        text = self._define(without(excludes), is_terminal=True)
        until = self._define(f"{text} ({' | '.join(map(quoted, ends))})", is_terminal=True)
        until = self._define(until, options="[lazy]")
        # A special token is never within text: it ends the text at once.
        marked = [end for end in ends if self._special is not None and self._special.match(end)]
        if not marked:
            return until
        before = self._define(without([*ends, *excludes]), is_terminal=True)
        return self._define(f"{until} | {before} ({' | '.join(map(self._token_first, marked))})")

    def _token_first(self, text: str) -> str:
        assert self._special is not None
        found = self._special.match(text)
        assert found is not None
        rest = text[found.end() :]
        return f"<[{self._special_tokens[found[0]]}]> {self._mark(rest) if rest else ''}".rstrip()

    def _triggered(self, value: dict[str, Any], is_last: bool) -> str:
        if not is_last and not value["stop_after_first"]:
            raise ConstraintError(f"{FIELD}: triggered_tags must be the last part: free text follows its tags")
        excludes = value.get("excludes", [])
        cases = []
        for trigger in value["triggers"]:
            tags = [tag for tag in value["tags"] if tag["begin"].startswith(trigger)]
            # Text with the trigger is a tag or nothing. The text goes to its first trigger, so it has no other one.
            others = [each for each in value["triggers"] if each != trigger] + excludes
            rests = " | ".join(
                " ".join(filter(None, (self._begin(tag["begin"][len(trigger) :]), self._content_and_end(tag))))
                for tag in tags
            )
            cases.append((self._until([trigger], others), rests))
        tag = self._define(" | ".join(f"{until} ({rests})" for until, rests in cases if rests))
        text = self._define(without([*value["triggers"], *excludes]), is_terminal=True)
        if value["stop_after_first"]:
            return tag if value["at_least_one"] else self._define(f"{tag} | {text}")
        return self._define(f"{tag}{'+' if value['at_least_one'] else '*'} {text}")

    def _separated(self, value: dict[str, Any]) -> str:
        tag = self._define(" | ".join(self.rule(each, is_last=False) for each in value["tags"]))
        more = "" if value["stop_after_first"] else f" ({self._begin(value['separator'])} {tag})*"
        return f"{tag}{more}" if value["at_least_one"] else f"({tag}{more})?"

    def _begin(self, text: str) -> str:
        return self._mark(text) if text else ""
