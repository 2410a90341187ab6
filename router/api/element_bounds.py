"""How many elements a client's message may have: of each repeated field and each map, and in all.

A message of 16 MiB has room for 8 million elements of two bytes. Parsed, each takes up to 120 bytes, and each check of
it a microsecond of the event loop. So they are counted on the wire (router/api/elements.py), and what is beyond a bound
is never parsed. The bounds are those of the checks behind, or so wide that no real request comes near them. Bodies over
HTTP have bounds of their own (router/api/gateway/reading/parsing.py) and these.
"""

from configs.sampling import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKENS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
)
from router.request.chat import MAX_CHAT_MESSAGES
from router.request.features.tools import MAX_TOOLS
from router.request.values import MAX_TOKENIZED

# Fields of a message on the wire, those of its parts included, known or not: a chat of 16,384 messages has 65,536 of
# them. They take 30 ms to count and 10 ms to parse.
MAX_FIELDS = 2**16
# Numbers in packed fields, such as token ids, in all: 25 ms to parse. No model takes as many tokens.
MAX_NUMBERS = 2**21
# Messages within messages, as deep as protobuf reads them.
MAX_DEPTH = 100

# In all messages of a chat; each may have asked.MAX_PARTS.
_MAX_ALL_PARTS, _MAX_ALL_CALLS = 32_768, 16_384
# Images and videos; how many a model takes is checked when they are read.
_MAX_ITEMS, _MAX_FRAMES = 16_384, 16_384
# Keys and values of a template's arguments.
_MAX_ARGUMENTS = 16_384
# Fields that nothing reads, or of which one or two elements have a meaning.
_FEW = 1_024

# By the field's full name: the elements in one message of a client, wherever in it they are.
MAX_ELEMENTS = {
    "octavo.v1.GenerateRequest.items": _MAX_ITEMS,
    "octavo.v1.Video.frames": _MAX_FRAMES,
    "octavo.v1.ChatPrompt.messages": MAX_CHAT_MESSAGES,
    "octavo.v1.ChatPrompt.tools": MAX_TOOLS,
    "octavo.v1.ChatPrompt.allowed_tool_names": MAX_TOOLS,
    "octavo.v1.ChatMessage.tool_calls": _MAX_ALL_CALLS,
    "octavo.v1.ChatMessage.parts": _MAX_ALL_PARTS,
    "octavo.v1.TokenIds.ids": MAX_NUMBERS,
    "octavo.v1.SamplingParams.logit_bias": MAX_LOGIT_BIAS,
    "octavo.v1.SamplingParams.stop": MAX_STOP_STRINGS,
    "octavo.v1.SamplingParams.stop_token_ids": MAX_STOP_TOKENS,
    "octavo.v1.SamplingParams.allowed_token_ids": MAX_ALLOWED_TOKENS,
    "octavo.v1.SamplingParams.bad_words": MAX_BAD_WORDS,
    "octavo.v1.SamplingParams.bad_word_token_ids": MAX_BAD_WORDS,
    "octavo.v1.SamplingParams.logprob_token_ids": MAX_LOGPROB_TOKENS,
    "octavo.v1.ReasoningMarks.begins": 16,
    "octavo.v1.ReasoningMarks.ends": 16,
    "octavo.v1.ReasoningMarks.end_token_ids": 64,
    "octavo.v1.Alternatives.texts": 1_024,
    "octavo.v1.Resume.prompt_token_ids": MAX_NUMBERS,
    "octavo.v1.Resume.choices": MAX_CHOICES,
    "octavo.v1.Resume.items": _MAX_ITEMS,
    "octavo.v1.ResumeChoice.output_token_ids": MAX_NUMBERS,
    # Three for each.
    "octavo.v1.ItemSpan.grid": 4 * _MAX_ITEMS,
    "octavo.v1.DetokenizeRequest.token_ids": MAX_TOKENIZED,
    "octavo.v1.AttachRequest.choices": MAX_CHOICES,
    "google.protobuf.Struct.fields": _MAX_ARGUMENTS,
    "google.protobuf.ListValue.values": _MAX_ARGUMENTS,
    "vllm.GenerateRequest.media": _FEW,
    "vllm.DecodingParameters.logit_bias": MAX_LOGIT_BIAS,
    "vllm.DecodingParameters.allowed_token_ids": MAX_ALLOWED_TOKENS,
    "vllm.DecodingParameters.StringChoices.choices": 1_024,
    "vllm.StoppingCriteria.stop_token_ids": MAX_STOP_TOKENS,
    "vllm.StoppingCriteria.stop_strings": MAX_STOP_STRINGS,
    "vllm.TokenIds.ids": MAX_NUMBERS,
    # Other routers and all replicas are asked for each that is not here.
    "vllm.AbortRequest.request_ids": 1_024,
    "vllm.grpc.engine.AbortRequest.request_ids": 1_024,
    "vllm.grpc.engine.TokenizedInput.input_ids": MAX_NUMBERS,
    "vllm.grpc.engine.SamplingParams.stop": MAX_STOP_STRINGS,
    "vllm.grpc.engine.SamplingParams.stop_token_ids": MAX_STOP_TOKENS,
    "vllm.grpc.engine.SamplingParams.logit_bias": MAX_LOGIT_BIAS,
    "vllm.grpc.engine.ChoiceConstraint.choices": 1_024,
    "vllm.grpc.engine.GenerateRequest.extra_mm_inputs": _FEW,
    "vllm.grpc.engine.MultimodalInputs.model_specific_tensors": _FEW,
    "vllm.grpc.engine.MultimodalInputs.mm_placeholders": _FEW,
    "vllm.grpc.engine.MultimodalInputs.mm_hashes": _FEW,
    "vllm.grpc.engine.MultimodalInputs.batched_keys": _FEW,
    "vllm.grpc.engine.MultimodalInputs.flat_keys": _FEW,
    "vllm.grpc.engine.MultimodalInputs.keep_on_cpu_keys": _FEW,
    "vllm.grpc.engine.TensorData.shape": _FEW,
    "vllm.grpc.engine.MediaRefs.items": _FEW,
    "vllm.grpc.engine.GetLoadsRequest.include": _FEW,
    "smg.grpc.common.StartProfileRequest.activities": _FEW,
    "sglang.grpc.scheduler.SamplingParams.stop": MAX_STOP_STRINGS,
    "sglang.grpc.scheduler.SamplingParams.stop_token_ids": MAX_STOP_TOKENS,
    "sglang.grpc.scheduler.SamplingParams.logit_bias": MAX_LOGIT_BIAS,
    "sglang.grpc.scheduler.GenerateRequest.token_ids_logprob": MAX_LOGPROB_TOKENS,
    "sglang.grpc.scheduler.GenerateRequest.input_embeds": MAX_NUMBERS,
    "sglang.grpc.scheduler.TokenizedInput.input_ids": MAX_NUMBERS,
    "sglang.grpc.scheduler.GetLoadsRequest.include": _FEW,
    "inference.ModelInferRequest.parameters": _FEW,
    "inference.ModelInferRequest.inputs": _FEW,
    "inference.ModelInferRequest.outputs": _FEW,
    "inference.ModelInferRequest.raw_input_contents": _FEW,
    "inference.ModelInferRequest.InferInputTensor.shape": _FEW,
    "inference.ModelInferRequest.InferInputTensor.parameters": _FEW,
    "inference.ModelInferRequest.InferRequestedOutputTensor.parameters": _FEW,
    "inference.InferTensorContents.bool_contents": _FEW,
    "inference.InferTensorContents.int_contents": _FEW,
    "inference.InferTensorContents.int64_contents": _FEW,
    "inference.InferTensorContents.uint_contents": _FEW,
    "inference.InferTensorContents.uint64_contents": _FEW,
    "inference.InferTensorContents.fp32_contents": _FEW,
    "inference.InferTensorContents.fp64_contents": _FEW,
    "inference.InferTensorContents.bytes_contents": _FEW,
}

# Messages that carry a prompt; others have at most MAX_OTHER_BYTES, for some are held as long as a stream lives.
WITH_PROMPT = frozenset(
    {
        "octavo.v1.GenerateRequest",
        "octavo.v1.TokenizeRequest",
        "octavo.v1.DetokenizeRequest",
        "vllm.GenerateRequest",
        "vllm.grpc.engine.GenerateRequest",
        "sglang.grpc.scheduler.GenerateRequest",
        "inference.ModelInferRequest",
    }
)
MAX_OTHER_BYTES = 65_536
