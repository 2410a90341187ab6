"""OpenAI's HTTP, of any server: Octavo, vLLM, llama-server, SGLang and others."""

import contextlib
import ssl
import time
from collections.abc import Mapping
from typing import Any, Self

import httpx2
import msgspec
import tenacity

from octavo.bench.backends.base import Prompt, Served
from octavo.bench.backends.openai_events import CountedBy, Lines, Output
from octavo.client.errors import AccessDenied, ModelNotFound, Unavailable
from octavo.reports import RequestTrace

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_CONNECT_S, _MODELS_S = 30.0, 30.0
# Fields beyond OpenAI's that force the output's length and tell the tokens of each event, by owned_by of a server's
# models. Other servers may refuse them.
_EXACT: Mapping[str, Mapping[str, Any]] = {
    "octavo": {"ignore_eos": True, "min_tokens": ...},
    "vllm": {"ignore_eos": True, "min_tokens": ...},
    "sglang": {"ignore_eos": True},
    "llamacpp": {"ignore_eos": True},
}
_RUNNING_USAGE = {"include_usage": True, "continuous_usage_stats": True}


class OpenAIBackend:
    def __init__(
        self,
        base_url: str,
        *,
        is_chat: bool,
        endpoint: str = "",
        model: str = "",
        api_key: str = "",
        takes_text: bool = False,
        extra_body: Mapping[str, Any] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """base_url: http://HOST:PORT, with or without /v1. endpoint: another path than OpenAI's. model: empty for the
        server's first. extra_body: fields of each request; null leaves one out. tls: None for the usual CAs."""
        self.takes_text = takes_text or is_chat
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._is_chat, self._model = is_chat, model
        self._endpoint = endpoint or ENDPOINTS["openai-chat" if is_chat else "openai"]
        self._extra_body = dict(extra_body or {})
        self._key = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._tls = tls
        self._engine = ""
        # The least exact way in which a request's tokens were counted, and the tokens of prompts, by usage.
        self._counted_by = CountedBy.TOKEN_IDS
        self._prompt_tokens: list[int] = []

    @property
    def num_prompt_tokens(self) -> int:
        return round(sum(self._prompt_tokens) / len(self._prompt_tokens)) if self._prompt_tokens else 0

    @property
    def told(self) -> dict[str, object]:
        return {"api": "http", "tokens_counted_by": str(self._counted_by)}

    async def __aenter__(self) -> Self:
        self._client = httpx2.AsyncClient(
            base_url=self._base_url,
            headers={"content-type": "application/json", "accept-encoding": "identity", **self._key},
            timeout=httpx2.Timeout(None, connect=_CONNECT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            verify=True if self._tls is None else self._tls,
            # Proxies of the environment would be measured, too.
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def served(self) -> Served:
        """Asks for the models. Raises Unavailable, AccessDenied, ModelNotFound, InvalidRequest."""
        url = f"{self._base_url}/v1/models"
        try:
            answer = await self._client.get("/v1/models", timeout=_MODELS_S)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise Unavailable(f"--base-url {self._base_url}: {error or type(error).__name__}") from None
        if answer.status_code in (401, 403):
            raise AccessDenied(f"{url}: {answer.text[:500]}")
        models = _models_of(answer)
        if self._model:
            found = next((model for model in models if model.get("id") == self._model), {"id": self._model})
        elif models:
            found = models[0]
        else:
            raise ModelNotFound(f"{url} names no model (status {answer.status_code}): name one with --model")
        meta = found.get("meta")
        self._model, self._engine = str(found["id"]), str(found.get("owned_by") or "openai")
        return Served(
            engine=self._engine,
            name=self._model,
            max_model_len=_number(found.get("max_model_len")),
            vocab_size=_number(meta.get("n_vocab")) if isinstance(meta, dict) else 0,
        )

    async def complete(self, prompt: Prompt, seed: int, output_len: int) -> RequestTrace:
        body = self._body(prompt, seed, output_len)
        content = msgspec.json.encode(body)
        trace = RequestTrace(began=time.perf_counter(), token_times=[], token_counts=[])
        output, lines = Output(trace), Lines()
        try:
            async with contextlib.AsyncExitStack() as stack:
                answer = await self._open(content, stack)
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    trace.error = f"status {answer.status_code}: {text[:500]}"
                else:
                    async for received in answer.aiter_raw():
                        now = time.perf_counter()
                        for data in lines.feed(received):
                            output.take(data, now)
        except httpx2.HTTPError as error:
            trace.error = f"{type(error).__name__}: {error}"
        trace.ended = time.perf_counter()
        if not trace.error:
            output.end(output_len, is_exact=body.get("ignore_eos") is True)
            self._note(output)
        return trace

    @tenacity.retry(
        stop=tenacity.stop_after_attempt(2),
        retry=tenacity.retry_if_exception_type(httpx2.RemoteProtocolError),
        reraise=True,
    )
    async def _open(self, content: bytes, stack: contextlib.AsyncExitStack) -> httpx2.Response:
        """Sends a request; once more if the server closes the connection instead of answering, as some do with those
        that were kept from another request. Raises httpx2.HTTPError."""
        return await stack.enter_async_context(self._client.stream("POST", self._endpoint, content=content))

    def _body(self, prompt: Prompt, seed: int, output_len: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        if self._is_chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        exact = _EXACT.get(self._engine)
        if exact is not None:
            known = {"temperature": 0.0, "seed": seed, "max_tokens": output_len, "stream_options": _RUNNING_USAGE}
            body |= known | {name: output_len if value is ... else value for name, value in exact.items()}
        else:
            # OpenAI's newer models refuse max_tokens in chats.
            body["max_completion_tokens" if self._is_chat else "max_tokens"] = output_len
        body |= self._extra_body
        return {name: value for name, value in body.items() if value is not None}

    def _note(self, output: Output) -> None:
        order = list(CountedBy)
        self._counted_by = max(self._counted_by, output.counted_by, key=order.index)
        if output.num_prompt_tokens:
            self._prompt_tokens.append(output.num_prompt_tokens)


def _models_of(answer: httpx2.Response) -> list[dict[str, Any]]:
    """The models that an answer lists; empty if it is no such list."""
    try:
        listed = msgspec.json.decode(answer.content)
    except msgspec.MsgspecError:
        return []
    models = listed.get("data") if isinstance(listed, dict) else None
    return [each for each in models if isinstance(each, dict) and "id" in each] if isinstance(models, list) else []


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
