"""Streams that outlive their connections, and what must be the same in two runs of one."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from benchmarks.faults.crowd import Difference, Outcome, Plan, differences, make_plans
from octavo.client.results import Choice, FinishReason, Generation, Usage

GRPC, EVENTS = "gRPC", "server-sent events"
# Longer than any stream is without a reader here.
DETACH_TIMEOUT_S = 120.0

# Fields of a request over HTTP that have the same names in SamplingParams.
_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "seed",
    "n",
    "ignore_eos",
    "stop",
    "repetition_penalty",
    "frequency_penalty",
)


def make_attached_plans(count: int, seed: int, *, mean_tokens: int) -> list[Plan]:
    """Makes plans as `make_plans`, half of them for each protocol, evenly over greedy and sampled ones.

    Those over HTTP have a seed: if its router dies, such a stream is asked for again.
    """
    plans = []
    for plan in make_plans(count, seed, mean_tokens=mean_tokens):
        if plan.number // 2 % 2:
            plans.append(replace(plan, kind=GRPC))
            continue
        sampling = replace(plan.sampling, logprobs=None, prompt_logprobs=None)
        over_http = replace(plan, kind=EVENTS, sampling=sampling)
        plans.append(over_http if over_http.has_seed else over_http.seeded(1000 + plan.number))
    return plans


def body_of(plan: Plan) -> tuple[str, dict[str, Any]]:
    """Returns the path and the body of a plan over HTTP."""
    body: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "detach_timeout": DETACH_TIMEOUT_S,
    }
    for name in _FIELDS:
        if (value := getattr(plan.sampling, name)) not in (None, ()):
            body[name] = value
    if isinstance(plan.prompt, str):
        return "/v1/completions", body | {"prompt": plan.prompt}
    return "/v1/chat/completions", body | {"messages": plan.prompt}


class ChoiceOverHttp:
    """A choice, folded from server-sent events."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.stop: str | int | None = None

    def add(self, piece: dict[str, Any]) -> int:
        """Adds a piece of the choice; returns the number of its tokens."""
        self.text += piece.get("text") or piece.get("delta", {}).get("content") or ""
        token_ids = piece.get("token_ids") or []
        self.token_ids += token_ids
        if piece["finish_reason"]:
            self.finish_reason, self.stop = FinishReason(piece["finish_reason"]), piece["stop_reason"]
        return len(token_ids)

    def begins_as(self, other: "ChoiceOverHttp") -> bool:
        """Returns True if all that the other one holds is here, too."""
        return self.token_ids[: len(other.token_ids)] == other.token_ids and self.text.startswith(other.text)

    def result(self, index: int) -> Choice:
        return Choice(
            index=index,
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop=self.stop,
            logprobs=(),
            exact=True,
        )


def attached_differences(disturbed: Outcome, undisturbed: Outcome) -> list[Difference]:
    """Compares all that a stream's protocol tells: over gRPC everything; over HTTP tokens, text, finish and usage."""
    if disturbed.plan.kind == EVENTS and undisturbed.error is None:
        choices = [replace(each, logprobs=()) for each in undisturbed.generation.choices]
        undisturbed = replace(
            undisturbed, generation=over_http(undisturbed.plan, choices, undisturbed.generation.usage)
        )
    return differences(disturbed, undisturbed)


def over_http(plan: Plan, choices: Iterable[Choice], usage: Usage | None) -> Generation:
    """The state of a stream over HTTP."""
    return Generation(
        request_id="",
        model="",
        seed=plan.sampling.seed or 0,
        prompt_token_ids=(),
        choices=tuple(choices),
        prompt_logprobs=(),
        usage=usage,
        fingerprint="",
        num_resumes=0,
    )
