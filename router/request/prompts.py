"""Prompts of all forms as token ids, with the items among them."""

import asyncio

from protos import inference_pb2 as pb
from router.errors import InvalidRequest
from router.request.chat import check_chat_length, check_chat_template, checks_of_chat
from router.request.features import fill_in
from router.request.features.items import ItemReader, of_resume, read_items, recipe_of
from router.request.features.truncation import truncated
from router.request.media.asked import asked_items
from router.request.media.prompts import Prompt, check_no_placeholders, check_resumed, expanded, num_tokens
from router.request.media.read import ReadItem
from router.request.served import Text
from router.request.values import MAX_TOKENIZED, check_num_chars, check_prompt_length
from router.text.chat_template import TemplateError
from router.text.tokenizer import TooManyTokensError
from router.text.tokenizer_pool import listed
from router.turns import finish_in_slices
from runtime.media.recipes.recipe import Recipe

_WithText = pb.GenerateRequest | pb.TokenizeRequest
# Their texts are added up at once: 16,384 take 20 ms.
_MANY_MESSAGES = 1_024


async def prompt_of(
    message: pb.GenerateRequest, model: pb.ModelInfo, media_json: str, text: Text, reader: ItemReader
) -> Prompt:
    """Returns the prompt of a request that `checks_of_request` has accepted. media_json: that of the served model.
    Raises RequestError."""
    recipe = recipe_of(media_json) if media_json else None
    if message.HasField("resume"):
        return await _resumed(message, model, recipe, reader)
    asked = asked_items(message) if message.items or message.HasField("chat") else []
    items = await read_items(message, asked, recipe, reader) if asked else []
    if not message.HasField("truncate_prompt_tokens"):
        return await _whole(message, model, model.max_model_len, text, recipe, items)
    try:
        prompt = await _whole(message, model, MAX_TOKENIZED, text, recipe, items)
    except TooManyTokensError as error:
        raise InvalidRequest(f"{error}: shorten it before it is truncated") from None
    return truncated(prompt, message, model.max_model_len)


async def tokens_of(
    message: pb.TokenizeRequest, media_json: str, text: Text, reader: ItemReader, max_model_len: int, most_tokens: int
) -> list[int]:
    """Returns the tokens that a request with this input has. Raises RequestError or TooManyTokensError."""
    if message.WhichOneof("input") == "prompt":
        return await _encode(message.prompt, message, text, max_model_len, most_tokens)
    await finish_in_slices(checks_of_chat(message.chat))
    recipe, asked = recipe_of(media_json) if media_json else None, asked_items(message)
    items = await read_items(message, asked, recipe, reader) if asked else []
    token_ids = await _encode_chat(message.chat, message, text, max_model_len, most_tokens)
    return _expanded(token_ids, items, recipe, "the rendered chat", most_tokens).token_ids


async def _resumed(
    message: pb.GenerateRequest, model: pb.ModelInfo, recipe: Recipe | None, reader: ItemReader
) -> Prompt:
    check_prompt_length(len(message.resume.prompt_token_ids), model)
    token_ids = await listed(message.resume.prompt_token_ids)
    items = await of_resume(message, recipe, reader)
    if items:
        assert recipe is not None
        return check_resumed(token_ids, message.resume.items, items, recipe)
    if recipe is not None:
        check_no_placeholders(token_ids, recipe)
    return Prompt(token_ids)


async def _whole(
    message: pb.GenerateRequest,
    model: pb.ModelInfo,
    most_tokens: int,
    text: Text,
    recipe: Recipe | None,
    items: list[ReadItem],
) -> Prompt:
    """Raises RequestError, and TooManyTokensError for more than most_tokens that the model could take."""
    kind = message.WhichOneof("input")
    try:
        if kind == "token_ids":
            source, ids = "token_ids.ids", message.token_ids.ids
            if len(ids) > most_tokens:
                check_prompt_length(len(ids), model)
            token_ids = await listed(ids)
        elif kind == "chat":
            source = "the rendered chat"
            token_ids = await _encode_chat(message.chat, message, text, model.max_model_len, most_tokens)
        elif message.suffix:
            source, token_ids = "prompt", await _encode_fill_in(message, text, model.max_model_len, most_tokens)
        else:
            source = "prompt"
            token_ids = await _encode(message.prompt, message, text, model.max_model_len, most_tokens)
        return _expanded(token_ids, items, recipe, source, most_tokens)
    except TooManyTokensError as error:
        if not message.HasField("truncate_prompt_tokens"):
            check_prompt_length(error.num_tokens, model)
        raise


async def _encode(prompt: str, asked: _WithText, text: Text, max_model_len: int, most_tokens: int) -> list[int]:
    """Raises RequestError or TooManyTokensError."""
    encoder = text.encoder
    check_num_chars(len(prompt), encoder.tokenizer.longest_token, max_model_len)
    return await encoder.encode(prompt, most_tokens, add_special_tokens=_adds_special_tokens(asked))


async def _encode_fill_in(message: pb.GenerateRequest, text: Text, max_model_len: int, most_tokens: int) -> list[int]:
    """Encodes a prompt with a suffix. Raises RequestError or TooManyTokensError."""
    prefix, suffix, encoder = message.prompt, message.suffix, text.encoder
    fill_in.form_of(message, encoder.tokenizer)
    check_num_chars(len(prefix) + len(suffix), encoder.tokenizer.longest_token, max_model_len)
    with_special = _adds_special_tokens(message)
    return await encoder.encode_fill_in(prefix, suffix, most_tokens, add_special_tokens=with_special)


async def _encode_chat(
    chat: pb.ChatPrompt, asked: _WithText, text: Text, max_model_len: int, most_tokens: int
) -> list[int]:
    """Renders and encodes a chat that has been checked. Raises RequestError or TooManyTokensError."""
    check_chat_template(chat.chat_template, is_trusted=text.trusts_templates)
    if len(chat.messages) > _MANY_MESSAGES:
        await asyncio.sleep(0)
    check_chat_length(chat, text.encoder.tokenizer.longest_token, max_model_len)
    try:
        return await text.encoder.encode_chat(chat, most_tokens, add_special_tokens=asked.add_special_tokens)
    except TemplateError as error:
        raise InvalidRequest(f"chat: {error}") from None


def _adds_special_tokens(asked: _WithText) -> bool:
    """True if the prompt's text gets the special tokens around it, such as BOS."""
    return asked.add_special_tokens if asked.HasField("add_special_tokens") else True


def _expanded(
    token_ids: list[int], items: list[ReadItem], recipe: Recipe | None, source: str, most_tokens: int
) -> Prompt:
    """Raises InvalidRequest, and TooManyTokensError before anything so long is built."""
    if recipe is None:
        return Prompt(token_ids)
    if (total := num_tokens(len(token_ids), items)) > most_tokens:
        raise TooManyTokensError(total, most_tokens)
    return expanded(token_ids, items, recipe, source=source)
