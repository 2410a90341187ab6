"""Deliberate bugs, each in one place of the scheduling core, which the random walks must find."""

from tests.properties.mutation import Mutant
from tests.properties.workloads import SPECULATIONS

_ITEMS = {"encoder_cache_size": 9}
_SWAP = {"preemption_mode": "swap", "num_swap_blocks": 12}
_DRAFTS = {"speculation": SPECULATIONS[3]}
_AHEAD = {"max_steps_in_flight": 3, "num_stages": 1, "speculation": None}
_FULL = {"scheduling_policy": "priority", "max_queued_requests": 4, "max_num_seqs": 1}
_PACED = {
    "inter_token_latency_target": 0.02, "least_prefill_tokens": 1, "enable_chunked_prefill": True,
    "max_num_batched_tokens": 64, "max_num_partial_prefills": 1, "max_long_partial_prefills": 1,
    "long_prefill_token_threshold": 0, "num_stages": 1, "encoder_cache_size": 0,
}  # fmt: skip
_PARTIAL = {"enable_chunked_prefill": True, "max_num_partial_prefills": 2, "max_long_partial_prefills": 1}


def _mutant(name: str, module: str, old: str, new: str, why: str, **focus: object) -> Mutant:
    # Steps that are cut short bring scarce resources into play more slowly.
    return Mutant(
        name=name, why=why, module=module, old=old, new=new, focus={"inter_token_latency_target": 0.0, **focus}
    )


MUTANTS = [
    # --- Budget, rows, chunks
    _mutant(
        "budget-one-over", "core.planner",
        "PlanDraft(), settings.max_num_batched_tokens", "PlanDraft(), settings.max_num_batched_tokens + 1",
        "a step has one token more than the workers have room for",
    ),
    _mutant(
        "row-reused-at-once", "core.state.rows", "if last_step:", "if False:",
        "a row is given away while a step that names it is still on its way", **_AHEAD,
    ),
    _mutant(
        "prefills-mixed-with-decodes", "core.planner", "if not draft.chunks:", "if True:",
        "without chunked prefill, decodes share a step with prefills",
        enable_chunked_prefill=False, long_prefill_token_threshold=0, max_num_batched_tokens=40,
    ),
    _mutant(
        "partial-prefills-unbounded", "core.policies",
        "if self._num_partial >= settings.max_num_partial_prefills:", "if False:",
        "too many prefills are left unfinished", enable_chunked_prefill=True, max_num_partial_prefills=1,
        max_long_partial_prefills=1, max_num_batched_tokens=8, long_prefill_token_threshold=5,
    ),
    _mutant(
        "long-prefills-unbounded", "core.policies",
        "count = min(count, settings.long_prefill_token_threshold)", "count = min(count, self.budget)",
        "a long prefill takes the whole step", **_PARTIAL, long_prefill_token_threshold=2,
    ),
    _mutant(
        "long-prefills-always-passed", "core.policies",
        "and self._num_long >= settings.max_long_partial_prefills", "and True",
        "short prompts overtake a long one that could go on: it starves", **_PARTIAL, long_prefill_token_threshold=5,
    ),
    # --- Steps in time
    _mutant(
        "late-steps", "core.pacing.pace",
        "seconds = self.target / num_steps / self._margin - self._prices.seconds(work)", "seconds = self.target",
        "prefills fill a step as if the decodes in it took no time", **_PACED,
    ),
    _mutant(
        "contexts-forgotten", "core.pacing.prices",
        "linear = prices[_TOKEN] + prices[_PAIR] * (start + 0.5)", "linear = prices[_TOKEN]",
        "a chunk at the end of a long prompt counts as one at its beginning", **_PACED,
    ),
    _mutant(
        "starved-by-decodes", "core.pacing.pace", ", self._least - self._num_spent)", ", 0)",
        "no prompt goes on while the decodes alone take too long", **_PACED,
    ),
    _mutant(
        "always-in-a-hurry", "core.pacer",
        "if not len(state.decodes) and not state.running.drafting:", "if False:",
        "prefills are cut although no sequence waits for its next token", **_PACED,
    ),
    # --- Order
    _mutant(
        "head-of-queue-passed", "core.planner",
        "elif not self._admit(sequence, draft, chunking, now):\n                break",
        "elif not self._admit(sequence, draft, chunking, now):\n"
        "                state.waiting.remove(sequence)\n"
        "                passed.append(sequence)",
        "a request that needs less room is admitted before an earlier one that needs more (vllm#45388)",
    ),
    _mutant(
        "priority-ignored", "core.policies", "return request.priority + age, arrival", "return age, arrival",
        "requests run first come, first served, whatever their priority", scheduling_policy="priority",
    ),
    _mutant(
        "waiting-does-not-count", "core.core", "state.admission.age = age_of(now, self.settings)",
        "state.admission.age = 0",
        "a request of low priority waits as long as more urgent ones come",
        scheduling_policy="priority", priority_aging=1.0,
    ),
    _mutant(
        "share-of-the-queue-unbounded", "core.state.queue", "if not tenant or not num_waiting:", "if True:",
        "one tenant fills the queue, and all others are refused", max_queued_requests=4,
    ),
    _mutant(
        "equals-displaced", "core.state.queue", "lowest <= priority", "lowest < priority",
        "requests of equal priority push each other out of a full queue: none makes progress", **_FULL,
    ),
    _mutant(
        "earliest-displaced", "core.state.queue", "= -priority, -arrival", "= -priority, arrival",
        "the request that has waited longest is displaced", **_FULL,
    ),
    _mutant(
        "deadlines-upside-down", "core.policies", "else request.deadline, arrival", "else -request.deadline, arrival",
        "the latest deadline goes first", scheduling_policy="deadline",
    ),
    _mutant(
        "first-preempted-first", "core.policies",
        "        for candidate in running.from_last():\n            if not",
        "        for candidate in reversed(list(running.from_last())):\n            if not",
        "the earliest sequence loses its blocks, so that none is sure to end",
    ),
    # --- Preemption and progress
    _mutant(
        "comes-back-for-a-chunk", "core.policies",
        "        return num_tokens\n", "        return num_in_first_step\n",
        "a preempted sequence returns with blocks for its first chunk only, and loses them again (vllm#25538)",
        enable_chunked_prefill=True, max_num_batched_tokens=3,
    ),
    _mutant(
        "nobody-protected", "core.policies",
        "return known <= sequence.num_tokens_when_preempted", "return False",
        "a sequence is preempted again before it got a token (vllm#52520)",
        speculation=None, preemption_policy="whole_context",
    ),
    _mutant(
        "preempts-itself-for-ever", "core.policies",
        "            if candidate is sequence:\n",
        "            if candidate is sequence:\n                return candidate\n",
        "a sequence that has come back gives up its blocks while its token is in flight", **_AHEAD,
    ),
    _mutant(
        "waits-for-those-behind-it", "core.planner",
        "draft, now):\n                continue\n            self._compute_prefill",
        "draft, now):\n                break\n            self._compute_prefill",
        "a prefill waits for blocks of sequences that it keeps from running: deadlock",
        scheduling_policy="priority", enable_chunked_prefill=True, max_num_partial_prefills=3,
        max_long_partial_prefills=3, max_num_batched_tokens=8, long_prefill_token_threshold=0,
    ),
    # --- Blocks
    _mutant(
        "block-leaked", "core.state.running",
        "self._pool.release(sequence.block_ids)", "self._pool.release(sequence.block_ids[1:])",
        "one block of each sequence is leaked",
    ),
    _mutant(
        "shared-block-held-once", "core.state.blocks",
        "self._num_holders[block] += 1", "self._num_holders[block] = 1",
        "a shared block is freed as soon as one of its readers ends",
    ),
    _mutant(
        "preempted-row-grows", "core.state.plan_draft",
        "            if sequence.generation == generation:\n                plan.grown_rows",
        "            if True:\n                plan.grown_rows",
        "the workers get blocks for a row that was preempted in the same step",
        scheduling_policy="priority", enable_chunked_prefill=True, max_num_batched_tokens=5, block_size=1,
    ),
    _mutant(
        "generations-reused", "core.state.running", "generation, row = self.num_generations, self._rows.take()",
        "row = self._rows.take()\n        generation = row + 1",
        "a sequence reuses the generation of an earlier one and gets its late results", **_AHEAD,
    ),
    # --- Constraints
    _mutant(
        "held-not-held", "core.state.decodes",
        "return self._holds_constrained and", "return False and",
        "a sequence is planned before the token is known on which its mask depends", holds_constrained=True, **_AHEAD,
    ),
    _mutant(
        "forced-tokens-not-waited-for", "core.state.decodes",
        "            self._waits[index] = 1\n            self.num_holding += 1", "            pass",
        "forced tokens never become drafts while steps are in flight", holds_constrained=False, **_AHEAD,
    ),
    _mutant(
        "waits-for-ever", "core.state.decodes", "self._waits[selection] = 0", "self._waits[selection] += 0",
        "a sequence that once waited for forced tokens is held from then on", holds_constrained=False, **_AHEAD,
    ),
    _mutant(
        "drafts-go-on-unverified", "core.planner",
        "return sequence.last_step >=", "return self._holds_one_step_each and sequence.last_step >=",
        "a sequence goes on while its forced tokens are in flight as drafts", holds_constrained=False, **_AHEAD,
    ),
    # --- Prefix cache
    _mutant(
        "full-hit", "core.state.blocks",
        "(sequence.num_tokens - 1) // self._block_size", "sequence.num_tokens // self._block_size",
        "a full prefix hit leaves nothing to compute, so there are no logits to sample from",
    ),
    _mutant(
        "unknown-tokens-named", "core.state.blocks",
        "min(sequence.num_computed_tokens, num_prompt + len(output)) // block_size",
        "sequence.num_computed_tokens // block_size",
        "a block gets its name while some of its tokens are unknown",
        enable_prefix_caching=True, block_size=1, **_AHEAD,
    ),
    _mutant(
        "salt-ignored", "core.state.blocks", "return scope_of(request.cache_salt)", 'return scope_of("")',
        "one tenant reads the blocks of another", enable_prefix_caching=True,
    ),
    _mutant(
        "groups-share", "core.state.blocks", 'request.group.to_bytes(8, "little")', 'b""',
        "requests share blocks although prefix caching is off", enable_prefix_caching=False,
    ),
    _mutant(
        "prompt-logprobs-skipped", "core.state.request",
        "        return not (\n            request.bypass_prefix_cache and",
        "        return not (\n            False and",
        "a request for prompt logprobs skips tokens found in the prefix cache", enable_prefix_caching=True,
    ),
    _mutant(
        "failed-blocks-found", "core.state.state", "            self.pool.unpublish(block)\n", "            pass\n",
        "other sequences read the KV of one whose logits were not finite", enable_prefix_caching=True,
    ),
    _mutant(
        "reset-forgets-one", "core.state.blocks",
        "        self._block_of.clear()\n", "        self._block_of.popitem()\n",
        "blocks are still found after a reset of the prefix cache", enable_prefix_caching=True,
    ),
    _mutant(
        "removal-not-told", "core.state.blocks", "self._events.append(BlockRemoved(block_hash))", "pass",
        "routers send requests to a replica whose blocks are gone", enable_prefix_caching=True,
    ),
    # --- Items
    _mutant(
        "item-dropped-too-early", "core.state.items", "            self._unheld.pop(item.number, None)\n", "",
        "embeddings leave the cache while a sequence is in the middle of their item", **_ITEMS,
    ),
    _mutant(
        "item-let-go-in-its-own-plan", "core.state.items",
        "            self._passed.append(items[sequence.next_item])\n",
        "            self._release(items[sequence.next_item])\n"
        "            self._need_no_more(items[sequence.next_item])\n",
        "a plan drops the embeddings that it needs, for an item of a later sequence", **_ITEMS,
    ),
    _mutant(
        "items-not-named", "core.state.blocks",
        'group.items_by_block.get(num_hashed, b"") if group.items_by_block else b""', 'b""',
        "a prompt with one image finds the blocks of the same prompt with another", **_ITEMS,
        enable_prefix_caching=True,
    ),
    _mutant(
        "encode-missed", "core.state.items", "        self._encoded.append(item.number)\n", "",
        "no plan encodes an item that counts as cached", **_ITEMS,
    ),
    _mutant(
        "item-encoded-unprepared", "core.state.items",
        "                if item.input is not ItemInput.PREPARED:\n                    self._ask",
        "                if item.input is ItemInput.ABSENT:\n                    self._ask",
        "a plan encodes an item that the workers are still decoding", **_ITEMS,
    ),
    _mutant(
        "cache-overfull", "core.state.items",
        "while self._num_cached + item.num_embeddings > self._size:",
        "while self._num_cached + item.num_embeddings > self._size + 2:",
        "more embeddings are kept than the workers have room for", **_ITEMS,
    ),
    _mutant(
        "encoder-budget-ignored", "core.state.items",
        "self._is_full |= bool(before) and num_encoded > self._budget", "pass",
        "one step encodes all images of a prompt",
        **_ITEMS, max_num_encoder_input_tokens=6, enable_chunked_prefill=True,
    ),
    _mutant(
        "forgotten-while-needed", "core.state.items",
        "if not item.num_needing and item.input is ItemInput.PREPARED:", "if item.input is ItemInput.PREPARED:",
        "an item's input is given up although a waiting sequence needs it", **_ITEMS,
    ),
    _mutant(
        "sent-while-being-forgotten", "core.state.items", "if item.number in self._forgotten:", "if False:",
        "the workers get an item anew, and then a plan that says to forget it", **_ITEMS,
    ),
    _mutant(
        "items-survive-their-workers", "core.state.items",
        "item.is_cached, item.input = False, ItemInput.ABSENT", "item.input = ItemInput.ABSENT",
        "embeddings of lost workers count as cached", **_ITEMS,
    ),
    _mutant(
        "preempted-items-not-needed", "core.state.items",
        "            item.num_needing += 1\n        sequence.next_item = 0\n", "            item.num_needing += 1\n",
        "a sequence that comes back computes its items without embeddings", **_ITEMS,
    ),
    # --- Ends
    _mutant(
        "min-tokens-ignored", "core.state.request",
        "if num_output_tokens and num_output_tokens >= stop.min_tokens", "if num_output_tokens",
        "an end-of-sequence token ends a request too early",
    ),
    _mutant(
        "one-token-too-many", "core.state.request",
        "if num_output_tokens >= stop.max_tokens",
        "if num_output_tokens > stop.max_tokens",
        "a sequence gets one token more than max_tokens",
    ),
    _mutant(
        "repetitions-unseen", "core.state.decodes",
        "self.num_watched += sequence.repetition is not None", "self.num_watched += False",
        "an output that repeats itself goes on",
    ),
    _mutant(
        "end-tokens-unseen", "core.state.endings", "            self._mask[token] = True\n", "",
        "an end-of-sequence token ends nothing",
    ),
    _mutant(
        "deadline-missed", "core.state.queue", "self._heap[0][0] <= now", "self._heap[0][0] < now",
        "a request is not cancelled at its deadline",
    ),
    _mutant(
        "queue-leak", "core.state.state", "            self.admission.dequeue(group.number)\n", "",
        "a request cancelled in the queue counts as queued for ever (vllm#40279)",
    ),
    # --- Steps in flight, drafts
    _mutant(
        "two-steps-of-a-pipeline", "core.planner",
        "return self._state.settings.num_stages > 1", "return False",
        "a sequence is in two stages at once, and one needs the token that the other computes",
        num_stages=2, max_steps_in_flight=3, speculation=None,
    ),
    _mutant(
        "planned-past-the-end", "core.state.decodes", "planned < self._limit[:end]", "planned <= self._limit[:end]",
        "a step computes a token past max_tokens", **_AHEAD,
    ),
    _mutant(
        "plans-survive-their-workers", "core.state.state", "        self.in_flight.clear()\n", "",
        "plans of lost workers count as in flight",
    ),
    _mutant(
        "rejected-drafts-count", "core.state.decodes",
        "self._computed[indices], self._planned[indices] = known - 1, known",
        "self._planned[indices] = known",
        "the KV of rejected drafts is taken for that of the tokens sampled instead", **_DRAFTS,
    ),
    _mutant(
        "rejected-forced-tokens-count", "core.results",
        "            sequence.num_computed_tokens = sequence.num_tokens - 1\n", "",
        "the KV of rejected forced tokens is taken for that of the tokens sampled instead", **_DRAFTS,
    ),
    _mutant(
        "accepted-draft-too-many", "core.state.decodes",
        "self._known[indices] = known + counts\n", "self._known[indices] = known + counts + (counts > 1)\n",
        "a draft counts as accepted although another token was drawn", **_DRAFTS,
    ),
    _mutant(
        "position-off-by-one", "core.state.decodes",
        "= known - 1, known", "= known, known + 1",
        "the token after accepted drafts is computed at the next one's position", **_DRAFTS,
    ),
    _mutant(
        "drafts-behind-a-step-in-flight", "core.speculation",
        "decodes.num_missing(indices) - 1) * may_get", "decodes.num_missing(indices) - 1)",
        "drafts are verified before the token in front of them is known", **_DRAFTS, max_steps_in_flight=3,
        num_stages=1,
    ),
    _mutant(
        "drafts-beyond-the-budget", "core.planner",
        "num_left = settings.max_num_batched_tokens - size_of(selection)", "num_left = settings.max_num_batched_tokens",
        "drafts do not count against the token budget", **_DRAFTS,
    ),
    _mutant(
        "drafts-not-bounded", "core.drafting.drafting",
        "== generations_L) * self._most_R[rows_L]", "== generations_L) * self.num_drafts",
        "a request gets more drafts than it allows", **_DRAFTS,
    ),
    _mutant(
        "tokens-behind-the-end", "core.results",
        "kept[i] = len(output) - before", "kept[i] = int(counts[i])",
        "accepted drafts behind an end token are delivered", **_DRAFTS,
    ),
    _mutant(
        "trim-not-told", "core.results",
        "            state.trimmed.append((sequence, sequence.generation, needed))\n", "",
        "the workers keep look-ahead blocks that now belong to other sequences", **_DRAFTS, block_size=1,
    ),
    _mutant(
        "drafts-past-the-end", "core.speculation",
        "decodes.num_missing(indices) - 1) * may_get", "decodes.num_missing(indices) + 1) * may_get",
        "drafts go beyond max_tokens", **_DRAFTS,
    ),
    _mutant(
        "tail-cut", "core.state.decodes", "            output.frombytes(self._tail_bytes[4 * base : 4 * last])\n", "",
        "tokens are lost where the ring of the latest tokens wraps around",
    ),
    # --- Swap
    _mutant(
        "swapped-into-others", "core.planner",
        "zip(sequence.host_blocks, blocks, strict=False))[len(shared) :]",
        "zip(sequence.host_blocks, blocks[len(shared) :], strict=False))",
        "host blocks are restored to the wrong places if some blocks were found in the cache", **_SWAP,
    ),
    _mutant(
        "host-block-leaked", "core.state.state",
        "        self.release_host_blocks(sequence)\n        if group.items:", "        if group.items:",
        "a sequence cancelled while swapped out leaks its host blocks", **_SWAP,
    ),
]  # fmt: skip
