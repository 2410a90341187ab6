"""The drafters of a core: what they propose for each row, and how likely it is right.

All of it follows from the tokens of the rows, the drafts of the workers' drafter and the costs that the core is told.
"""

import numpy as np

from scheduler.core.drafting.choice import (
    MOST_RATE,
    CostTable,
    DraftingPause,
    DraftTrust,
    Rates,
    choose_counts,
    choose_depth,
)
from scheduler.core.drafting.lookup import Lookup
from scheduler.core.drafting.outputs import MOST_SCOPES, OutputLengths, RecentOutputs, Scope
from scheduler.core.drafting.texts import Backlog, NewTokens, Texts
from scheduler.core.messages import CoreSettings, Speculation, StepCosts

# Tokens of the contexts of SuffixDecoding's tree (Oliaro and others, 2024, arXiv 2411.04975) that are tried here: the
# longest that came before decides. More of them make a step dearer and no draft better.
_SUFFIX_ORDERS = (2, 3, 5, 8, 16)
# Outputs of recent requests are kept in texts of at least this many tokens.
_LEAST_RECENT_TOKENS = 1 << 14
# The workers' drafter computes tokens that it lacks if its drafts should save so many times that: a sequence may end at
# any token.
_LEAST_REPAID = 2.0


class Drafting:
    """Arrays have one entry a row of the core (R), a row of a call (L), or a draft (K)."""

    def __init__(self, settings: CoreSettings, speculation: Speculation) -> None:
        num_rows, self.num_drafts = settings.max_num_seqs, speculation.num_speculative_tokens
        keeps_outputs = speculation.max_cached_outputs > 0 and "suffix" in speculation.drafters
        num_lanes = num_rows + (MOST_SCOPES if keeps_outputs else 0)
        max_len = max(settings.max_model_len, _LEAST_RECENT_TOKENS if keeps_outputs else 0)
        self._texts = Texts(num_lanes if speculation.drafters else 0, max_len if speculation.drafters else 1)
        ngram_orders = tuple(range(speculation.prompt_lookup_min, speculation.prompt_lookup_max + 1))
        self._lookups = {
            name: Lookup(self._texts, num_lanes, _SUFFIX_ORDERS if name == "suffix" else ngram_orders)
            for name in speculation.drafters
        }
        self._names = [*speculation.drafters, *(["workers"] if speculation.workers_draft else [])]
        # Index of the workers' drafter; -1: they have none.
        self.workers = len(speculation.drafters) if speculation.workers_draft else -1
        self._recent: RecentOutputs | None = None
        if keeps_outputs:
            self._recent = RecentOutputs(self._texts, self._lookups["suffix"], num_rows, speculation.max_cached_outputs)
        num_drafters = len(self._names)
        num_levels = max((lookup.num_orders for lookup in self._lookups.values()), default=1)
        self.rates, self.costs = Rates(num_drafters, num_rows, num_levels), CostTable()
        self.worth = DraftTrust()
        # Pauses of the core's drafters while no step has drafts, and of questions to the workers' while they are for
        # nothing.
        self._pause, self._silence = DraftingPause(), DraftingPause()
        # None where nothing depends on them.
        self.lengths = OutputLengths() if speculation.workers_catch_up else None
        # By drafter and row: what it proposes for the next tokens, how many of them, and the level of its context.
        self._proposed_DRK = np.zeros((num_drafters, num_rows, self.num_drafts), np.int32)
        self._num_proposed_DR = np.zeros((num_drafters, num_rows), np.int64)
        self._level_DR = np.zeros((num_drafters, num_rows), np.int64)
        # Generation of the sequence whose tokens a row's text holds, the same or -1 if it gets no drafts, and the upper
        # bound of its drafts.
        self._generation_R = np.zeros(num_rows, np.int64)
        self._served_R = np.full(num_rows, -1, np.int64)
        self._most_R = np.zeros(num_rows, np.int64)
        # Lane of the recent outputs of its scope; -1: none.
        self._recent_R = np.full(num_rows, -1, np.int64)
        # Tokens before this position of a row's text are known to the workers' drafter, if it drafts for the row.
        self._drafted_R = np.zeros(num_rows, np.int64)
        # True from when it is asked for drafts of a row of which it lacks tokens, until it proposes some: it may take
        # several steps to catch up.
        self._is_behind_R = np.zeros(num_rows, np.bool_)
        self._rests, self._backlog = False, Backlog()

    # --- Tokens

    @property
    def rests(self) -> bool:
        return self._rests

    def rest(self, num_rows: int, num_tokens: int) -> bool:
        """Returns True if the drafters rest in a step of so many rows and tokens: no draft could pay in it, or they
        pause as none did lately. They take tokens later then, many at once, and propose nothing."""
        rests = self._pause.covers() or not self.costs.could_pay(
            num_rows, num_tokens, self.num_drafts, by_workers=not self._lookups
        )
        if self._rests and not rests:
            rows_L = self._take_backlog()
            if len(rows_L) and self._lookups:
                self._propose(rows_L)
        self._rests = rests
        return rests

    def note_step(self, *, has_drafts: bool) -> None:
        """Takes a step in which the drafters did not rest: it begins a pause if it has no drafts."""
        # The workers' drafter does not pause: while it lacks tokens, its drafts are still to come.
        if self.workers < 0:
            self._pause.note(in_vain=not has_drafts)
            self._rests = self._pause.is_on

    def unknown(self, rows_L: np.ndarray, generations_L: np.ndarray) -> np.ndarray:
        """Indices of the rows whose tokens are not known here: `begin` must tell them, with all tokens so far. None
        while the drafters rest."""
        if self._rests:
            return np.zeros(0, np.int64)
        return (self._generation_R[rows_L] != generations_L).nonzero()[0]

    def begin(self, row: int, generation: int, token_ids: np.ndarray, *, max_drafts: int | None, scope: Scope) -> None:
        """Begins with a sequence that has this row, and these tokens (int32). max_drafts: None: no bound of its own."""
        self._generation_R[row] = generation
        most = self.num_drafts if max_drafts is None else min(max_drafts, self.num_drafts)
        self._most_R[row], self._served_R[row] = most, generation if most else -1
        self.rates.begin(row)
        self._num_proposed_DR[:, row] = 0
        self._drafted_R[row] = 0
        self._is_behind_R[row] = False
        if not most or not self._lookups:
            return
        if self._recent is not None:
            self._recent_R[row] = self._recent.lane_of(scope)
        positions = self._texts.begin(row, token_ids)
        for lookup in self._lookups.values():
            lookup.begin(row, positions)
        self._propose(np.array([row]))

    def extend(
        self, rows_L: np.ndarray, generations_L: np.ndarray, token_ids: np.ndarray, counts_L: np.ndarray | None
    ) -> None:
        """Takes the tokens (int32) that rows got in a step: counts_L[i] each, None: one. Ignores rows that are not
        known."""
        if self._rests:
            if self._lookups:
                self._backlog.add(rows_L, generations_L, token_ids, counts_L)
                if self._backlog.is_full:
                    self._take_backlog()
            return
        new = self._known(rows_L, generations_L, token_ids, counts_L)
        if not len(new):
            return
        for drafter in range(len(self._names)):
            self._compare(drafter, new)
        if self._lookups:
            self._append(new)
            self._propose(new.rows_L)

    def _known(
        self, rows_L: np.ndarray, generations_L: np.ndarray, token_ids: np.ndarray, counts_L: np.ndarray | None
    ) -> NewTokens:
        """Without the rows that are not known or get no drafts."""
        new = NewTokens(rows_L.astype(np.int64, copy=False), token_ids, counts_L)
        are_served_L = self._served_R[rows_L] == generations_L
        return new if np.count_nonzero(are_served_L) == len(new) else new.only(are_served_L)

    def _append(self, new: NewTokens) -> None:
        positions_T = self._texts.append(new)
        for lookup in self._lookups.values():
            lookup.extend(new, positions_T)

    def _take_backlog(self) -> np.ndarray:
        """Takes the tokens that came while the drafters rested. Returns the rows that got some: nothing is proposed for
        them."""
        new = self._known(*self._backlog.take())
        if len(new):
            for drafter in range(len(self._lookups)):
                self._compare(drafter, new)
            self._num_proposed_DR[:, new.rows_L] = 0
            self._append(new)
        return new.rows_L

    def _propose(self, rows_L: np.ndarray) -> None:
        for drafter, lookup in enumerate(self._lookups.values()):
            others_L = self._recent_R[rows_L] if self._names[drafter] == "suffix" and self._recent is not None else None
            lanes_L, positions_L, levels_L = lookup.find(rows_L, others_L)
            proposed_LK = self._texts.copies(lanes_L, np.maximum(positions_L, 0), self.num_drafts)
            num_L = (positions_L >= 0) * self.num_drafts
            if others_L is not None:
                # The end of a recent output.
                is_end_LK = proposed_LK < 0
                num_L = np.where(is_end_LK.any(axis=1), np.minimum(num_L, is_end_LK.argmax(axis=1)), num_L)
            self._proposed_DRK[drafter][rows_L] = proposed_LK
            self._num_proposed_DR[drafter][rows_L] = num_L
            self._level_DR[drafter][rows_L] = levels_L

    def _compare(self, drafter: int, new: NewTokens) -> None:
        """Compares what was proposed for the next tokens with them."""
        rows_L, proposed_RK = new.rows_L, self._proposed_DRK[drafter]
        num_L = self._num_proposed_DR[drafter][rows_L]
        if not np.count_nonzero(num_L):
            return
        if new.counts_L is None:
            tries_L = np.minimum(num_L, 1)
            hits_L = tries_L * (proposed_RK[rows_L, 0] == new.token_ids_T)
        else:
            same_T = proposed_RK[new.rows_T, np.minimum(new.offsets_T, self.num_drafts - 1)] == new.token_ids_T
            wrong_L = np.minimum.reduceat(np.where(same_T, self.num_drafts, new.offsets_T), new.firsts_L)
            compared_L = np.minimum(num_L, new.counts_L)
            hits_L = np.minimum(wrong_L, compared_L)
            # The first wrong one was tried as well, those behind it were not.
            tries_L = np.minimum(hits_L + 1, compared_L)
        self.rates.note(drafter, rows_L, self._level_DR[drafter][rows_L], hits_L, tries_L)
        if drafter == self.workers:
            self._num_proposed_DR[drafter][rows_L] = 0

    def take_workers(self, row: int, token_ids: tuple[int, ...]) -> None:
        """Takes what the workers' drafter proposes after the tokens known so far. Call it after `extend`."""
        if self._rests:
            return
        count = min(len(token_ids), int(self._most_R[row]))
        self._proposed_DRK[self.workers, row, :count] = token_ids[:count]
        self._num_proposed_DR[self.workers, row] = count
        self._level_DR[self.workers, row] = 0
        self._is_behind_R[row] = False

    def end_output(self, scope: Scope, token_ids: np.ndarray) -> None:
        """Takes the output (int32) of a sequence that has ended."""
        if self.lengths is not None:
            self.lengths.add(len(token_ids))
        if self._recent is not None:
            self._recent.add(scope, token_ids)

    # --- Drafts

    def propose_any(self, rows_L: np.ndarray) -> bool:
        """True if a drafter proposes something for one of these rows. None does while they rest."""
        return not self._rests and any(np.count_nonzero(num_R[rows_L]) for num_R in self._num_proposed_DR)

    def best(self, rows_L: np.ndarray, generations_L: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each row the proposals of the drafter that is right most often: tokens [L, K], how many of them, and the
        probability that one is right."""
        bounds_L = self.bounds(rows_L, generations_L)
        if len(self._names) == 1:
            rates_L = self.rates.of(0, rows_L, self._level_DR[0][rows_L])
            return self._proposed_DRK[0][rows_L], np.minimum(self._num_proposed_DR[0][rows_L], bounds_L), rates_L
        index, rates_DL = np.arange(len(rows_L)), self._rates(rows_L)
        best_L = rates_DL.argmax(axis=0)
        num_L = np.minimum(self._num_proposed_DR[best_L, rows_L], bounds_L)
        return self._proposed_DRK[best_L, rows_L], num_L, np.maximum(rates_DL[best_L, index], 0.0)

    def _rates(self, rows_L: np.ndarray) -> np.ndarray:
        """float64 [D, L]: -1 where a drafter proposes nothing."""
        rates_DL = np.empty((len(self._names), len(rows_L)))
        for drafter in range(len(self._names)):
            rates_L = self.rates.of(drafter, rows_L, self._level_DR[drafter][rows_L])
            rates_DL[drafter] = np.where(self._num_proposed_DR[drafter][rows_L] > 0, rates_L, -1.0)
        return rates_DL

    def choose(
        self, rates_L: np.ndarray, most_L: np.ndarray, *, num_rows: int, num_tokens: int, budget: int
    ) -> np.ndarray:
        """The number of drafts of each row: see `choose_counts`."""
        return choose_counts(
            rates_L,
            most_L,
            num_rows=num_rows,
            num_tokens=num_tokens,
            budget=budget,
            costs=self.costs,
            trust=self.worth.trust,
        )

    def bounds(self, rows_L: np.ndarray, generations_L: np.ndarray) -> np.ndarray:
        """The most drafts of each row that its request allows; 0 for rows that are not known."""
        return (self._served_R[rows_L] == generations_L) * self._most_R[rows_L]

    def could_repay(self, rows_L: np.ndarray, positions_L: np.ndarray, coming_L: np.ndarray) -> np.ndarray:
        """Mask of the rows for which it would pay that the workers' drafter catches up, if nearly all of its drafts
        were right. Arguments: see `choose_wanted`."""
        num_rows = len(rows_L)
        values_K = num_rows * MOST_RATE ** np.arange(1, self.num_drafts + 1)
        depth, saved = choose_depth(values_K, num_rows, num_rows, self.costs)
        return self._repays(rows_L, positions_L, coming_L, saved) if depth else np.zeros(num_rows, np.bool_)

    def _repays(
        self, rows_L: np.ndarray, positions_L: np.ndarray, coming_L: np.ndarray, saved: float | np.ndarray
    ) -> np.ndarray:
        """Mask of the rows where `saved` seconds a token repay those in which the drafter computes what it lacks."""
        lacking_L = self._num_lacking(rows_L, positions_L)
        return _LEAST_REPAID * lacking_L * self.costs.catch_up_seconds() <= saved * coming_L

    def _num_lacking(self, rows_L: np.ndarray, positions_L: np.ndarray) -> np.ndarray:
        """The number of tokens before these positions that the workers' drafter lacks. It computes those of the last
        step with its first draft anyway."""
        return np.maximum(positions_L - self._drafted_R[rows_L] - self.num_drafts - 1, 0)

    def choose_wanted(
        self, rows_L: np.ndarray, most_L: np.ndarray, positions_L: np.ndarray, coming_L: np.ndarray | None
    ) -> np.ndarray:
        """int64 [L]: the number of drafts that the workers' drafter should propose for each row: as many for all rows
        for which it is better than the other drafters, or none.

        most_L: upper bounds. positions_L: those of the tokens before the drafts. coming_L: the tokens that each row
        should still get, None if the drafter never has to catch up: what that costs must be saved by then.
        """
        counts_L = np.zeros(len(rows_L), np.int64)
        rates_L = self.rates.of(self.workers, rows_L, np.zeros(len(rows_L), np.int64))
        wanted_L = most_L > 0
        if self._lookups:
            # The workers' drafter is the last one.
            wanted_L &= rates_L > self._rates(rows_L)[: self.workers].max(axis=0)
        # Without the rows that do not repay it, the others may not be worth a draft either: a pass of the drafter costs
        # nearly as much for fewer rows.
        while num_wanted := int(np.count_nonzero(wanted_L)):
            values = np.multiply.accumulate(np.repeat(rates_L[wanted_L][:, None], self.num_drafts, axis=1), axis=1)
            depth, saved = choose_depth(values.sum(axis=0), len(rows_L), num_wanted, self.costs)
            if not depth:
                break
            if coming_L is not None:
                wanted_L &= self._repays(rows_L, positions_L, coming_L, saved)
            if np.count_nonzero(wanted_L) == num_wanted:
                counts_L[wanted_L] = depth
                break
        return np.minimum(counts_L, most_L)

    @property
    def num_unasked(self) -> int:
        """The number of steps since the workers' drafter could last be asked: those of a pause."""
        return self._silence.length

    def is_silent(self) -> bool:
        """Counts a step. Returns True if the workers' drafter is not to be asked in it: lately it was asked for
        nothing."""
        return self._silence.covers()

    def note_asked(self, *, for_any: bool) -> None:
        """Takes a step in which the workers' drafter could be asked."""
        self._silence.note(in_vain=not for_any)

    def ask_for(self, rows_L: np.ndarray, positions_L: np.ndarray) -> int | None:
        """Notes that the workers' drafter is asked for drafts after these positions. Returns how many tokens it lacks
        and computes first; None: unknown."""
        lacking_L, are_behind_L = self._num_lacking(rows_L, positions_L), self._is_behind_R[rows_L]
        self._is_behind_R[rows_L] |= lacking_L > 0
        self._drafted_R[rows_L] = positions_L
        if self.lengths is None:
            return 0
        return None if are_behind_L.any() else int(lacking_L.sum())

    # --- Snapshots

    def save(
        self,
    ) -> tuple[
        StepCosts | None,
        list[list[float]],
        list[list[float]],
        list[tuple[str, str, list[list[int]]]],
        list[int],
        tuple[float, float],
    ]:
        """Returns costs, hits and tries by kind, recent outputs, lengths of outputs, and expected and accepted drafts,
        for `restore`. Forgets the rows: their tokens are told again, as to the core that is restored."""
        self._generation_R[:] = 0
        self._served_R[:] = -1
        self._num_proposed_DR[:] = 0
        self._rests = False
        self._pause.end()
        self._silence.end()
        self._backlog.clear()
        self.rates.forget_rows()
        hits, tries = self.rates.save()
        recent_outputs = [] if self._recent is None else self._recent.save()
        lengths = [] if self.lengths is None else self.lengths.save()
        return self.costs.costs, hits, tries, recent_outputs, lengths, self.worth.save()

    def restore(
        self,
        costs: StepCosts | None,
        hits: list[list[float]],
        tries: list[list[float]],
        recent_outputs: list[tuple[str, str, list[list[int]]]],
        output_lengths: list[int],
        worth: tuple[float, float] | None,
    ) -> None:
        """Takes what `save` returned. worth: None: it was not kept then."""
        self.costs.set(costs)
        self.rates.restore(hits, tries)
        if self._recent is not None:
            self._recent.restore(recent_outputs)
        if self.lengths is not None:
            self.lengths.restore(output_lengths)
        if worth is not None:
            self.worth.restore(*worth)
