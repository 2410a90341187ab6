"""Field numbers of vLLM's and SGLang's services are the published ones: clients are compiled against those.

The tables are from the files that vLLM 0.33 publishes for its services Inference and Control, and from smg-grpc-proto
0.4.28 for SGLang's. A field that is not here has no use on this side; a number may not move.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FileDescriptor

from router.compat.protos import sglang_pb2, vllm_pb2

VLLM = """
GenerateRequest request_id 1 model 2 text 3 token_ids 4 temperature 5 sampling 6 decoding 7 stopping 8 response 9 kv 10
 truncate_prompt_tokens 11 priority 12 session_id 13 media 14 lora_name 15
RandomSampling num_sequences 1 top_k 2 top_p 3 min_p 4 seed 5
DecodingParameters presence_penalty 1 frequency_penalty 2 repetition_penalty 3 logit_bias 4 allowed_token_ids 5 json 6
 regex 7 choice 8 grammar 9 json_object 10 structural_tag 11
DecodingParameters.StringChoices choices 1
StoppingCriteria max_new_tokens 1 min_new_tokens 2 stop_token_ids 3 stop_strings 4 include_stop_strings 5 ignore_eos 6
ResponseOptions prompt_token_ids 1 prompt_logprobs 2 prompt_candidates 3 output_text 4 output_token_ids 5
 output_logprobs 6 output_candidates 7 skip_special_tokens 8
KVCacheParameters bypass_prefix_cache 1 cache_salt 2 kv_transfer_params 3 ec_transfer_params 4
CandidateTokens top_n 1 token_ids 2 all 3
TokenIds ids 1
GenerateResponse prompt_info 1 outputs 2
SequenceOutput index 1 text 2 num_tokens 3 token_ids 4 logprobs 5 ranks 6 candidate_tokens 7 finish_info 8
PromptInfo num_prompt_tokens 1 token_ids 2 logprobs 3 ranks 4 candidate_tokens 5
FinishInfo num_output_tokens 1 finish_reason 2 stop_token_id 3 eos_token_id 4 stop_string 5 kv_transfer_params 6
 ec_transfer_params 8
CandidateTokenInfo tokens 1
CandidateTokenInfo.TokenInfo id 1 logprob 2 rank 3
MediaItem modality 1 url 2 data_uri 3 raw_bytes 4 mime_type 5 uuid 6 features 7
GetServerInfoRequest
ServerInfo engine_version 1 api_version 2 instance_id 3 parallelism 4 max_model_len 5 kv_block_size 6 total_kv_blocks 7
 max_running_requests 8 max_batched_tokens 9 max_loras 10 rl_capabilities 11 effective_attention_block_size 14
ParallelismInfo tensor_parallel_size 1 pipeline_parallel_size 2 data_parallel_size 3 data_parallel_rank 4
 decode_context_parallel_size 5 world_size 6 data_parallel_size_local 7
GetModelInfoRequest
ModelInfo model_id 1 served_model_name 2 served_model_aliases 3 supports_text_input 20 supports_token_ids_input 21
 supports_lora 22 supports_multimodal 23 reasoning_parser 24 tool_call_parser 25
AbortRequest request_ids 1
AbortResponse
ListLorasRequest
ListLorasResponse adapters 1
GetKvEventSourcesRequest
GetKvEventSourcesResponse sources 1
KvEventSource transport 1 endpoint 2 topic 3 replay_endpoint 4 data_parallel_rank 5 encoding 6 schema_version 7
 buffer_steps 8 hwm 9 max_queue_size 10
PauseGenerationRequest mode 1 clear_cache 2
PauseGenerationResponse
ResumeGenerationRequest
ResumeGenerationResponse
IsPausedRequest
IsPausedResponse paused 1
IsSleepingRequest
IsSleepingResponse sleeping 1
"""

SGLANG = """
SamplingParams temperature 1 top_p 2 top_k 3 min_p 4 frequency_penalty 5 presence_penalty 6 repetition_penalty 7
 max_new_tokens 8 stop 9 stop_token_ids 10 skip_special_tokens 11 spaces_between_special_tokens 12 regex 13
 json_schema 14 ebnf_grammar 15 structural_tag 16 n 17 min_new_tokens 18 ignore_eos 19 no_stop_trim 20
 stream_interval 21 logit_bias 22 custom_params 23
DisaggregatedParams bootstrap_host 1 bootstrap_port 2 bootstrap_room 3
MultimodalInputs
GenerateRequest request_id 1 tokenized 2 mm_inputs 3 sampling_params 4 return_logprob 5 logprob_start_len 6
 top_logprobs_num 7 token_ids_logprob 8 return_hidden_states 9 disaggregated_params 10 custom_logit_processor 11
 timestamp 12 log_metrics 13 input_embeds 14 lora_id 15 data_parallel_rank 16 stream 17 require_reasoning 18
TokenizedInput original_text 1 input_ids 2
GenerateResponse request_id 1 chunk 2 complete 3
GenerateStreamChunk token_ids 1 prompt_tokens 2 completion_tokens 3 cached_tokens 4 output_logprobs 5 input_logprobs 7
 index 8
GenerateComplete output_ids 1 finish_reason 2 prompt_tokens 3 completion_tokens 4 cached_tokens 5 output_logprobs 6
 matched_token_id 8 matched_stop_str 9 input_logprobs 10 index 11
OutputLogProbs token_logprobs 1 token_ids 2 top_logprobs 3 token_ids_logprobs 4
InputLogProbs token_logprobs 1 token_ids 2 top_logprobs 3
InputTokenLogProb value 1
TopLogProbs values 1 token_ids 2
HealthCheckRequest
HealthCheckResponse healthy 1 message 2
AbortRequest request_id 1 reason 2
AbortResponse success 1 message 2
GetModelInfoRequest
GetModelInfoResponse model_path 1 tokenizer_path 2 is_generation 3 preferred_sampling_params 4 weight_version 5
 served_model_name 6 max_context_length 7 vocab_size 8 supports_vision 9 model_type 10 eos_token_ids 11
 max_req_input_len 14 architectures 15 default_sampling_params_json 20
GetServerInfoRequest
GetServerInfoResponse server_args 1 active_requests 3 is_paused 4 last_receive_timestamp 5 uptime_seconds 6
 sglang_version 7 server_type 8 max_total_num_tokens 10
GetLoadsRequest dp_rank 1 include 2
GetLoadsResponse timestamp 1 version 2 dp_rank_count 3 loads 4
SchedulerLoad dp_rank 1 num_running_reqs 2 num_waiting_reqs 3 num_total_reqs 4 num_used_tokens 5 max_total_num_tokens 6
 token_usage 7 gen_throughput 8 cache_hit_rate 9 utilization 10 max_running_requests 11 num_waiting_uncached_tokens 17
GetTokenizerRequest
TokenizerChunk data 1 sha256 2
"""

METHODS = {
    "vllm.Inference": "Generate GenerateStream",
    "vllm.Control": (
        "GetServerInfo GetModelInfo Shutdown Abort LoadLora UnloadLora ListLoras GetKvEventSources PauseGeneration "
        "ResumeGeneration IsPaused Sleep WakeUp IsSleeping InitWeightTransferEngine StartWeightUpdate "
        "StartDraftWeightUpdate UpdateWeights FinishWeightUpdate UpdateWeightVersion GetWeightVersion"
    ),
    "sglang.grpc.scheduler.SglangScheduler": (
        "Generate Embed HealthCheck Abort GetModelInfo GetServerInfo GetLoads GetTokenizer SubscribeKvEvents "
        "FlushCache StartProfile StopProfile LoadLoRAAdapter UnloadLoRAAdapter ListLoadedLoRAAdapters"
    ),
}
# Takes any request that is refused whatever it says.
UNREAD = "Unread"


def table(text: str) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for line in text.strip().replace("\n ", " ").splitlines():
        message, *fields = line.split()
        found[message] = {name: int(number) for name, number in zip(fields[::2], fields[1::2], strict=True)}
    return found


def messages_of(file: FileDescriptor) -> Iterator[Descriptor]:
    waiting = list(file.message_types_by_name.values())
    while waiting:
        message = waiting.pop()
        waiting += message.nested_types
        if not message.GetOptions().map_entry:
            yield message


@pytest.mark.parametrize(("module", "published"), [(vllm_pb2, VLLM), (sglang_pb2, SGLANG)], ids=["vllm", "sglang"])
def test_each_field_has_the_published_number(module: Any, published: str) -> None:
    file = module.DESCRIPTOR
    numbers = table(published)
    for message in messages_of(file):
        name = message.full_name.removeprefix(f"{file.package}.")
        own = {field.name: field.number for field in message.fields}
        if name == UNREAD:
            assert not own
            continue
        assert own.items() <= numbers.pop(name).items(), name
    assert not numbers, "messages that are not there"


def test_each_service_has_the_published_methods() -> None:
    for file in (vllm_pb2.DESCRIPTOR, sglang_pb2.DESCRIPTOR):
        for service in file.services_by_name.values():
            assert {method.name for method in service.methods} == set(METHODS[service.full_name].split())


def test_enumerators_have_the_published_numbers() -> None:
    modes = vllm_pb2.DESCRIPTOR.enum_types_by_name["PauseMode"].values_by_number
    assert [modes[number].name for number in range(4)] == [
        "PAUSE_MODE_UNSPECIFIED",
        "PAUSE_MODE_ABORT",
        "PAUSE_MODE_WAIT",
        "PAUSE_MODE_KEEP",
    ]
    finish: Any = vllm_pb2.FinishInfo
    assert [finish.FinishReason.Name(number) for number in range(4)] == ["NOT_FINISHED", "LENGTH", "STOP", "ABORTED"]
