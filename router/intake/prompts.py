"""Prompts of all forms as token ids, with the items among them."""

import asyncio

from protos import inference_pb2 as pb
from router.errors import InvalidRequest
from router.intake import validation
from router.intake.media.items import Items
from router.intake.media.prompts import Prompt, check_no_placeholders, check_resumed, cut, expanded, num_tokens
from router.intake.media.read import ReadItem
from router.intake.media.store import Held
from router.intake.validation import truncation
from router.replicas.slices import finish_in_slices
from router.text.chat_template import TemplateError
from router.text.tokenizer import TooManyTokensError
from router.text.tokenizer_pool import TokenizerPool, listed
from runtime.media.recipes.recipe import Recipe

_WithText = pb.GenerateRequest | pb.TokenizeRequest
# Their texts are added up at once: 16,384 take 20 ms.
_MANY_MESSAGES = 1_024


class Prompts:
    def __init__(self, tokenizer: TokenizerPool, items: Items, *, trusts_templates: bool) -> None:
        """trusts_templates: option trust_request_chat_template."""
        self._tokenizer = tokenizer
        self._items = items
        self._trusts_templates = trusts_templates

    async def of_request(self, message: pb.GenerateRequest, model: pb.ModelInfo, media_json: str, held: Held) -> Prompt:
        """Returns the prompt of a request that `check_request` has accepted. media_json: ModelInfo's of a replica that
        takes items; empty: there is none. held: gets the items. Raises RequestError."""
        recipe = self._items.recipe(media_json)
        if message.HasField("resume"):
            return await self._resumed(message, model, recipe, held)
        items = await self._items.read(message, recipe, held)
        if not message.HasField("truncate_prompt_tokens"):
            return await self._whole(message, model, model.max_model_len, recipe, items)
        try:
            prompt = await self._whole(message, model, validation.MAX_TOKENIZED, recipe, items)
        except TooManyTokensError as error:
            raise InvalidRequest(f"{error}: shorten it before it is truncated") from None
        return cut(prompt, *truncation(len(prompt.token_ids), message, model.max_model_len))

    async def of_tokenize(
        self, message: pb.TokenizeRequest, media_json: str, held: Held, max_model_len: int, most_tokens: int
    ) -> list[int]:
        """Returns the tokens that a request with this input has. Raises RequestError or TooManyTokensError."""
        if message.WhichOneof("input") == "prompt":
            return await self._encode(message.prompt, message, max_model_len, most_tokens)
        await finish_in_slices(validation.checks_of_chat(message.chat))
        recipe = self._items.recipe(media_json)
        items = await self._items.read(message, recipe, held)
        token_ids = await self._encode_chat(message.chat, message, max_model_len, most_tokens)
        return _expanded(token_ids, items, recipe, "the rendered chat", most_tokens).token_ids

    def stop_fill_in(self, sampling: pb.SamplingParams) -> None:
        """Adds the tokens that end a filled middle. Raises InvalidRequest."""
        fill_in = self._tokenizer.tokenizer.fill_in
        assert fill_in is not None
        stops = [token_id for token_id in fill_in.stop_token_ids if token_id not in sampling.stop_token_ids]
        sampling.stop_token_ids.extend(stops)
        validation.check_stop_tokens(sampling)

    async def _resumed(
        self, message: pb.GenerateRequest, model: pb.ModelInfo, recipe: Recipe | None, held: Held
    ) -> Prompt:
        validation.check_prompt_length(len(message.resume.prompt_token_ids), model)
        token_ids = await listed(message.resume.prompt_token_ids)
        items = await self._items.of_resume(message, recipe, held)
        if items:
            assert recipe is not None
            return check_resumed(token_ids, message.resume.items, items, recipe)
        if recipe is not None:
            check_no_placeholders(token_ids, recipe)
        return Prompt(token_ids)

    async def _whole(
        self,
        message: pb.GenerateRequest,
        model: pb.ModelInfo,
        most_tokens: int,
        recipe: Recipe | None,
        items: list[ReadItem],
    ) -> Prompt:
        """Raises RequestError, and TooManyTokensError for more than most_tokens that the model could take."""
        kind = message.WhichOneof("input")
        try:
            if kind == "token_ids":
                source, ids = "token_ids.ids", message.token_ids.ids
                if len(ids) > most_tokens:
                    validation.check_prompt_length(len(ids), model)
                token_ids = await listed(ids)
            elif kind == "chat":
                source = "the rendered chat"
                token_ids = await self._encode_chat(message.chat, message, model.max_model_len, most_tokens)
            elif message.suffix:
                source, token_ids = "prompt", await self._encode_fill_in(message, model.max_model_len, most_tokens)
            else:
                source = "prompt"
                token_ids = await self._encode(message.prompt, message, model.max_model_len, most_tokens)
            return _expanded(token_ids, items, recipe, source, most_tokens)
        except TooManyTokensError as error:
            if not message.HasField("truncate_prompt_tokens"):
                validation.check_prompt_length(error.num_tokens, model)
            raise

    async def _encode(self, text: str, asked: _WithText, max_model_len: int, most_tokens: int) -> list[int]:
        """Raises RequestError or TooManyTokensError."""
        validation.check_text_length(text, self._tokenizer.tokenizer.longest_token, max_model_len)
        with_special = asked.add_special_tokens if asked.HasField("add_special_tokens") else True
        return await self._tokenizer.encode(text, most_tokens, add_special_tokens=with_special)

    async def _encode_fill_in(self, message: pb.GenerateRequest, max_model_len: int, most_tokens: int) -> list[int]:
        """Encodes a prompt with a suffix. Raises RequestError or TooManyTokensError."""
        prefix, suffix, tokenizer = message.prompt, message.suffix, self._tokenizer.tokenizer
        if tokenizer.fill_in is None:
            raise InvalidRequest(
                f"suffix has {len(suffix)} characters, but this model's tokenizer has no tokens for filling in the "
                "middle: leave it out"
            )
        validation.check_text_length(prefix + suffix, tokenizer.longest_token, max_model_len)
        with_special = message.add_special_tokens if message.HasField("add_special_tokens") else True
        return await self._tokenizer.encode_fill_in(prefix, suffix, most_tokens, add_special_tokens=with_special)

    async def _encode_chat(
        self, chat: pb.ChatPrompt, asked: _WithText, max_model_len: int, most_tokens: int
    ) -> list[int]:
        """Renders and encodes a chat that `check_chat` has accepted. Raises RequestError or TooManyTokensError."""
        validation.check_chat_template(chat.chat_template, is_trusted=self._trusts_templates)
        if len(chat.messages) > _MANY_MESSAGES:
            await asyncio.sleep(0)
        validation.check_chat_length(chat, self._tokenizer.tokenizer.longest_token, max_model_len)
        try:
            return await self._tokenizer.encode_chat(chat, most_tokens, add_special_tokens=asked.add_special_tokens)
        except TemplateError as error:
            raise InvalidRequest(f"chat: {error}") from None


def _expanded(
    token_ids: list[int], items: list[ReadItem], recipe: Recipe | None, source: str, most_tokens: int
) -> Prompt:
    """Raises InvalidRequest, and TooManyTokensError before anything so long is built."""
    if recipe is None:
        return Prompt(token_ids)
    if (total := num_tokens(len(token_ids), items)) > most_tokens:
        raise TooManyTokensError(total, most_tokens)
    return expanded(token_ids, items, recipe, source=source)
