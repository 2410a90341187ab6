"""How the next token is chosen, as users write it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from octavo.errors import InvalidRequest
from protos import inference_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The fields and ranges of `SamplingParams` in protos/inference.proto; the names are vLLM's.

    None leaves a field to the model's generation_config.json, then to the server's default. The server checks ranges.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None

    def to_proto(self) -> pb.SamplingParams:
        """Raises InvalidRequest for a value that the wire cannot carry, such as a negative count."""
        message = pb.SamplingParams()
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None:
                continue
            try:
                if each.name == "logit_bias":
                    message.logit_bias.update(value)
                elif each.name == "stop":
                    message.stop.extend([value] if isinstance(value, str) else value)
                elif each.name == "stop_token_ids":
                    message.stop_token_ids.extend(value)
                else:
                    setattr(message, each.name, value)
            except (TypeError, ValueError) as error:
                raise InvalidRequest(f"{each.name}={value!r}: {error}") from None
        return message

    @classmethod
    def from_proto(cls, message: pb.SamplingParams) -> "SamplingParams":
        """The fields that are set; the others stay None."""
        values: dict[str, object] = {}
        for each in fields(cls):
            described = message.DESCRIPTOR.fields_by_name[each.name]
            if described.has_presence and not message.HasField(each.name):  # type: ignore[arg-type]
                continue
            value = getattr(message, each.name)
            if each.name == "logit_bias":
                value = dict(value)
            elif each.name in ("stop", "stop_token_ids"):
                value = tuple(value)
            values[each.name] = value
        return cls(**values)  # type: ignore[arg-type]
