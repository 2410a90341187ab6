"""Who loses its blocks when they run out, and when it may come back."""

from typing import Protocol

from scheduler.request import Sequence
from scheduler.running import Running


class PreemptionPolicy(Protocol):
    def victim(self, sequence: Sequence, running: Running) -> Sequence | None:
        """Who is preempted so that `sequence`, which runs, can go on; None: nobody, `sequence` sits this step out, and
        somebody else makes progress meanwhile."""
        ...

    def num_tokens_on_return(self, num_tokens: int, num_in_first_step: int) -> int:
        """Tokens for which one that comes back takes blocks at once: of its num_tokens, num_in_first_step are computed
        by its first step or are there already."""
        ...

    def headroom(self, running: Running) -> int:
        """Blocks that must stay free when one comes in."""
        ...


class WholeContext:
    """One that comes back takes blocks for its whole context, and is left alone until it has got a token.

    Otherwise it may lose them on its way, time after time (vllm#25538, vllm#52520). And whoever comes in leaves a block
    for each running sequence that will need one more, which it does within block_size steps; without, the last to come
    is the next to go. benchmarks/preemption_rules.py has both rules side by side: a sixth of FirstChunk's preemptions.
    """

    def victim(self, sequence: Sequence, running: Running) -> Sequence | None:
        somebody_protected = False
        for candidate in running.from_last():
            if not _is_protected(candidate, running):
                # Its own turn comes last: those behind it are all protected, and one of them makes progress.
                return None if candidate is sequence and somebody_protected else candidate
            somebody_protected = True
            if candidate is sequence:
                # The token that it came back for is in flight.
                return None
        raise AssertionError("the sequence does not run")

    def num_tokens_on_return(self, num_tokens: int, num_in_first_step: int) -> int:
        return num_tokens

    def headroom(self, running: Running) -> int:
        return running.num_growing


class FirstChunk:
    """vLLM V1's rule, to compare with: the last in order is preempted whatever it has done since it came back, and
    comes back as soon as there are blocks for its first chunk."""

    def victim(self, sequence: Sequence, running: Running) -> Sequence | None:
        return next(running.from_last())

    def num_tokens_on_return(self, num_tokens: int, num_in_first_step: int) -> int:
        return num_in_first_step

    def headroom(self, running: Running) -> int:
        return 0


def _is_protected(sequence: Sequence, running: Running) -> bool:
    """Has been preempted and has got no token since. It needs no more blocks than it has to get one."""
    if sequence.num_tokens_when_preempted < 0:
        return False
    known = running.decodes.num_known(sequence) if sequence.is_decoding else sequence.num_tokens
    return known <= sequence.num_tokens_when_preempted


PREEMPTION_POLICIES: dict[str, PreemptionPolicy] = {"whole_context": WholeContext(), "first_chunk": FirstChunk()}
