"""The served model's tokenizer, on the plain `tokenizers` library: text to token ids, and token ids to text as
they arrive.

Detokenizing byte by byte, rather than decoding a window of tokens again, makes every token cost the same, and makes the
text of a prefix of tokens a prefix of the text: what was sent never has to be taken back.
"""

import json
from collections.abc import Sequence
from encodings.utf_8 import IncrementalDecoder as Utf8Decoder
from pathlib import Path

import tokenizers

from protos.inference_pb2 import ChatPrompt
from router.text.chat_template import (
    TemplateError,
    message_text,
    read_chat_template,
    read_special_tokens,
    template_arguments,
    template_message,
    up_to_the_end_of,
)
from router.text.fill_in import FillIn, fill_in_of
from router.text.request_templates import RequestTemplates
from runtime.tokenizer.files import TokenizerError
from runtime.tokenizer.token_bytes import UnknownDecoderError, token_bytes_function

# A character that no token joins with the text behind it, as in Code Llama's own encode_infilling.
_MARK = "\u263a"


class IncrementalDetokenizer:
    """The text of a growing sequence of tokens.

    Bytes that begin a character are held back until it is whole. U+FFFD stands for bytes that can no longer become one.
    """

    __slots__ = ("_decoder", "_skipped", "_table")

    def __init__(self, table: "Tokenizer", *, skip_special_tokens: bool) -> None:
        self._table = table
        self._skipped = table.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = Utf8Decoder("replace")

    def push(self, token_id: int) -> str:
        """Takes one token; returns the text that became certain with it."""
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._table.token_bytes(token_id))

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Takes several tokens; returns the text that became certain with them."""
        # Between two characters, which is nearly always, most tokens' texts are cached and need no decoding.
        if not self._decoder.buffer and self._skipped.isdisjoint(token_ids):
            texts = [self._table.token_text(token_id) for token_id in token_ids]
            if None not in texts:
                return "".join(texts)  # type: ignore[arg-type] # just seen
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        """Returns the rest: U+FFFD if a character remained incomplete, else nothing."""
        return self._decoder.decode(b"", True)


def detokenize(table: "Tokenizer", token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The text of a whole sequence of tokens."""
    detokenizer = IncrementalDetokenizer(table, skip_special_tokens=skip_special_tokens)
    return "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()


class TooManyTokensError(ValueError):
    """A text has more tokens than its caller can use."""

    def __init__(self, num_tokens: int, most_tokens: int) -> None:
        super().__init__(f"the text has {num_tokens} tokens, and {most_tokens} are the most here")
        self.num_tokens = num_tokens


class Tokenizer:
    """Encodes, renders chats, and knows every token's bytes. Safe to use from several threads."""

    def __init__(self, directory: Path) -> None:
        """directory: as runtime.tokenizer.files gives it. Raises TokenizerError."""
        self.directory = directory
        path = directory / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - tokenizers raises nothing more specific
            raise TokenizerError(f"{path} can't be read by the tokenizers library: {error}") from None
        # A truncation or padding kept in the file is for training.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        decoder = self._tokenizer.decoder
        try:
            # The decoder's state is its section of the file; parsing the file would take 30 times its size in memory.
            self._to_bytes = token_bytes_function(json.loads(decoder.__getstate__()) if decoder else None)
        except UnknownDecoderError as error:
            raise TokenizerError(f"{path} can't be used: {error}") from None
        self.special_ids = frozenset(
            token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        # Characters of the longest token: a text of k times as many characters has k tokens or more.
        self.longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        special_tokens = read_special_tokens(directory)
        self._template = read_chat_template(directory, special_tokens)
        self._request_templates = RequestTemplates(special_tokens)
        self._fill_in = fill_in_of(self._tokenizer.token_to_id)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def chat_template(self) -> str:
        """The text of the model's chat template; empty if it has none."""
        return "" if self._template is None else self._template.source

    def encode(self, text: str, most_tokens: int | None = None, *, add_special_tokens: bool = True) -> list[int]:
        """add_special_tokens: those that the tokenizer's post-processor adds (BOS).

        Raises TooManyTokensError if there are more than most_tokens.
        """
        return self._ids(text, most_tokens, add_special_tokens)

    def encode_bad_words(self, words: Sequence[str]) -> list[list[list[int]]]:
        """Returns the token sequences to ban for each word, none if it has no tokens.

        As in vLLM: its tokens at the beginning of a text, and those after a space if they are as many and the first one
        differs.
        """
        texts = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
        ids = [each.ids for each in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        found: list[list[list[int]]] = []
        for first, after_space in zip(ids[::2], ids[1::2], strict=True):
            found.append([first] if first else [])
            if first and len(after_space) == len(first) and after_space[0] != first[0]:
                found[-1].append(after_space)
        return found

    def encode_chat(
        self, chat: ChatPrompt, most_tokens: int | None = None, *, add_special_tokens: bool = False
    ) -> list[int]:
        """Renders and encodes. add_special_tokens: the tokenizer's, besides those of the template.

        Raises TemplateError, with the template's message, and TooManyTokensError if there are more than most_tokens.
        """
        return self._ids(self.render(chat), most_tokens, add_special_tokens)

    @property
    def fill_in(self) -> FillIn | None:
        """How a prompt with a suffix is written; None if the model has no tokens for that."""
        return self._fill_in

    def encode_fill_in(
        self, prefix: str, suffix: str, most_tokens: int | None = None, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Encodes a prompt for what stands between two texts. add_special_tokens: those before a text (BOS).

        Raises TooManyTokensError if there are more than most_tokens.
        """
        assert self._fill_in is not None
        first = self._ids_before() if add_special_tokens else []
        prefix_ids, suffix_ids = self._ids(prefix, most_tokens, False), self._ids_within(suffix, most_tokens)
        token_ids = first + self._fill_in.prompt(prefix_ids, suffix_ids)
        if most_tokens is not None and len(token_ids) > most_tokens:
            raise TooManyTokensError(len(token_ids), most_tokens)
        return token_ids

    def encode_continuation(self, text: str) -> list[int]:
        """Encodes a short text that continues an output; special tokens in it are those."""
        return self._ids_within(text, None)

    def _ids_before(self) -> list[int]:
        """Returns the special tokens that the tokenizer adds before a text."""
        bare, whole = self._ids(_MARK, None, False), self._ids(_MARK, None, True)
        places = (place for place in range(len(whole)) if whole[place : place + len(bare)] == bare)
        return whole[: next(places, 0)]

    def _ids_within(self, text: str, most_tokens: int | None) -> list[int]:
        """Encodes a text that continues another one: sentencepiece would write a space before it."""
        mark = self._ids(_MARK, None, False)
        if not self.token_bytes(mark[0]).startswith(b" "):
            return self._ids(text, most_tokens, False)
        return self._ids(_MARK + text, None, False)[len(mark) :]

    def _ids(self, text: str, most_tokens: int | None, add_special_tokens: bool) -> list[int]:
        # `encode` holds the interpreter's lock throughout: 0.5 s for 1 MB, in which no other thread makes a step. This
        # call releases it: gaps of 3 to 18 ms. The list of ids is made under the lock, 30 ms for a million.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if most_tokens is not None and len(encoding) > most_tokens:
            raise TooManyTokensError(len(encoding), most_tokens)
        return encoding.ids

    def render(self, chat: ChatPrompt) -> str:
        """Returns the text of a chat. Raises TemplateError."""
        template = self._request_templates.get(chat.chat_template) if chat.chat_template else self._template
        if template is None:
            raise TemplateError("the model has no chat template: send `prompt` or `token_ids` instead of `chat`")
        continues = chat.continue_final_message
        text = template.render(
            [
                template_message(message, f"messages[{i}]", takes_text=template.takes_text)
                for i, message in enumerate(chat.messages)
            ],
            add_generation_prompt=chat.add_generation_prompt
            if chat.HasField("add_generation_prompt")
            else not continues,
            arguments=template_arguments(chat),
        )
        return up_to_the_end_of(message_text(chat.messages[-1]), text) if continues else text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return detokenize(self, token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; none if the id names no token (vocabularies are padded)."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id)
            if token is None:
                # Not cached: there are four billion such ids.
                return b""
            known = self._bytes[token_id] = self._to_bytes(token)
        return known

    def token_text(self, token_id: int) -> str | None:
        """The token's text; None if its bytes are not whole characters."""
        try:
            return self._texts[token_id]
        except KeyError:
            known = self.token_bytes(token_id)
        try:
            text = known.decode()
        except UnicodeDecodeError:
            text = None
        if known:
            self._texts[token_id] = text
        return text
