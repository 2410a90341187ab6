"""A tuning run, from the memory to the winner.

1. The most memory with which the largest setting starts.
2. A few probes: clusters that answer the load while their steps are recorded.
3. Every setting is predicted: the scheduler's core plans the load under it, with the costs of the recorded steps.
4. Successive halving: those that can still win are measured on clusters of their own, with a part of the load first.
   The request rate starts at infinity and comes down until the bounds hold.
5. Predictions learn from these measurements. Skipped settings that are then predicted to win are measured as well.
6. The finalists are measured in turns, the first one last in the next round, so that a machine's slow minutes meet all.
   Two turns are enough where one of them is clearly better in both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.options import Options
from octavo.lab.bounds import Bounds
from octavo.lab.errors import PlanError, TuningError
from octavo.lab.journal import Journal
from octavo.lab.settings import Setting
from octavo.plan.recorded import read_recording
from octavo.tune.progress import Progress
from octavo.tune.rates import CLOSE, highest_rate
from octavo.tune.search.choosing import choose, size_of, to_probe
from octavo.tune.search.predictions import Predictor, Probe
from octavo.tune.search.results import Found, Row, Status
from octavo.tune.trials.clusters import Clusters, TrialFailed
from octavo.tune.trials.memory import MemoryRange, highest_that_works
from octavo.tune.trials.trials import Trials
from octavo.tune.workload import TuneWorkload

_NUM_FINALISTS = 2
# A final ends early once a finalist has been better by this share in each of so many turns.
_CLEARLY, _TURNS_TO_DECIDE = 0.1, 2
# Skipped settings that are measured after all, at most, and by which share they must be predicted to be better.
_NUM_LATE, _LATE_GAIN = 2, 0.05
_NUM_PROBES = 2
# The part of the load of a first measurement.
LEAST_SHARE = 0.5
# How often, and by which factor, finalists are slowed down if none keeps the bounds again.
_LOWER_RATES, _LOWER = 3, 0.8
# A search with a part of the load needs no exact rate; finalists must not be told apart by where their searches stop.
_RUNS, _FINAL_RUNS = 4, 6
_FINAL_CLOSE = 1.04
# As a share of what all at once give: a part of the load's rates below it do not come near what all of it can.
_FAR = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured. margin: settings predicted to be worse than the best by more than this share are skipped.
    max_measured: most settings that are measured, but for those that measurements make likely. rounds: measurements of
    each finalist, two if they decide. is_exhaustive: all settings are measured with the whole load."""

    margin: float = 0.15
    max_measured: int = 4
    rounds: int = 3
    is_exhaustive: bool = False


class Tuner:
    def __init__(
        self,
        settings: Sequence[Setting],
        workload: TuneWorkload,
        bounds: Bounds,
        effort: Effort,
        *,
        clusters: Clusters,
        journal: Journal,
        traces: Path,
        watcher: Progress,
    ) -> None:
        """traces: a folder for the probes' recordings."""
        self._workload, self._bounds, self._effort = workload, bounds, effort
        self._clusters, self._traces = clusters, traces
        self._watch = watcher
        self._trials = Trials(clusters, journal, workload)
        self._rows = [Row(setting=setting) for setting in settings]
        self._notes: list[str] = []
        self._predictors: dict[tuple, Predictor] = {}

    def run(self, memory: MemoryRange | None) -> Found:
        """memory: None if it is given with the options. Raises TuningError if no setting works at all."""
        try:
            if memory is not None:
                self._find_memory(memory)
            rows = self._valid()
            best = self._exhaust(rows) if self._effort.is_exhaustive else self._search(rows)
        finally:
            self._trials.close()
        if best is None and all(row.status is Status.FAILED for row in self._rows):
            raise TuningError(f"no setting works; the first: {self._rows[0].reason}")
        return Found(rows=self._rows, best=best, memory=self._trials.memory, notes=self._notes)

    def _exhaust(self, rows: Sequence[Row]) -> Row | None:
        for number, row in enumerate(rows):
            self._watch.expect(len(rows) - number + _NUM_FINALISTS * self._effort.rounds)
            self._measure(row, "whole", share=1.0, max_runs=_FINAL_RUNS, close=_FINAL_CLOSE)
        # Afterwards: no measurement knows of a prediction.
        self._predict(rows)
        for row in rows:
            self._expect(row)
        return self._final(rows)

    def _search(self, rows: Sequence[Row]) -> Row | None:
        self._predict(rows)
        while True:
            chosen = self._halve(choose(rows, margin=self._effort.margin, most=self._effort.max_measured))
            best = self._final(self._whole(chosen))
            if best is not None or not chosen or any(row.status is not Status.FAILED for row in chosen):
                return best
            # Those that were to win do not work: the next ones.

    def _valid(self) -> list[Row]:
        """The rows whose options go together."""
        found = []
        for row in self._rows:
            try:
                self._options(row.setting)
                found.append(row)
            except ValueError as error:
                row.status, row.reason = Status.FAILED, str(error)
        return found

    def _find_memory(self, memory: MemoryRange) -> None:
        largest = max(self._rows, key=lambda row: [v for _, v in row.setting.values if isinstance(v, int)]).setting

        def works(value: float) -> str:
            self._watch.begin(f"{memory.option} {value:g} with {largest.label}")
            return self._trials.starts(largest, {memory.option: value})

        value, reasons = highest_that_works(memory.values, works)
        self._trials.memory = {memory.option: value}
        for tried, reason in reasons.items():
            self._say(f"{memory.option}={tried:g} does not work: {reason}")
        if not reasons:
            self._say(f"{memory.option}={value:g}: {memory.why}")

    # --- Predictions

    def _predict(self, rows: Sequence[Row]) -> None:
        engines: dict[tuple, list[Row]] = {}
        for row in rows:
            engines.setdefault(row.setting.engine, []).append(row)
        for number, of_engine in enumerate(engines.values()):
            self._watch.expect(2 * (len(engines) - number) + self._effort.max_measured + 2 * self._effort.rounds)
            self._predict_engine(of_engine, number)

    def _predict_engine(self, rows: Sequence[Row], number: int) -> None:
        probes: list[Probe] = []
        # By the fewest probes: the largest setting and one with the smallest budget have steps of all sizes between.
        left = to_probe([row.setting for row in rows])
        while left and len(probes) < _NUM_PROBES:
            probed = left.pop(0) if not probes else min(left, key=lambda each: (size_of(each)[0], -size_of(each)[1]))
            left = [each for each in left if each != probed]
            trace = self._traces / f"probe{number}_{len(probes)}.trace"
            self._watch.begin(f"probe {probed.label}")
            try:
                measured = self._trials.record(probed, trace)
                recording = read_recording(self._clusters.traces(trace))
            except (TrialFailed, PlanError) as error:
                self._say(f"the probe {probed.label} fails: {error}")
                for row in rows:
                    if row.setting == probed and not row.measured:
                        row.status, row.reason = Status.FAILED, str(error)
                continue
            options = self._options(probed)
            probes.append(Probe(options=options, recording=recording, measured=measured))
            left = [each for each in left if size_of(each)[0] < size_of(probed)[0]]
        if not probes:
            self._say("no probe works, so nothing is predicted")
            return
        try:
            predictor = Predictor(probes, self._workload, self._bounds)
        except PlanError as error:
            self._say(f"nothing is predicted: {error}")
            return
        fitted = predictor.cost
        self._say(
            f"costs fitted to {fitted.num_samples} samples of steps (median error {fitted.median_error:.1%}); clients "
            f"wait {fitted.factor:.2f} times as long, "
            + ", ".join(f"{factor:.2f} for {key[:-4]}" for key, factor in predictor.factors.items())
        )
        for row in rows:
            self._predictors[row.setting.engine] = predictor
            row.prediction = predictor.predict(self._options(row.setting))

    # --- Measurements

    def _halve(self, rows: list[Row]) -> list[Row]:
        """Measures with a part of the load, and keeps the better half, until the finalists are left."""
        stage = 0
        while len(rows) > _NUM_FINALISTS:
            stage += 1
            left = len(rows)
            for row in rows:
                self._watch.expect(left + self._effort.rounds * _NUM_FINALISTS)
                self._measure(row, f"round {stage}", share=LEAST_SHARE, max_runs=_RUNS)
                left -= 1
            alive = sorted((row for row in rows if row.status is Status.MEASURED), key=lambda row: -row.value)
            kept = max(_NUM_FINALISTS, len(rows) // 2)
            for row in alive[kept:]:
                row.reason = row.reason or f"{1 - row.value / alive[0].value:.0%} below the best in round {stage}"
            if len(alive) <= _NUM_FINALISTS:
                return alive
            rows = alive[:kept]
        return rows

    def _measure(self, row: Row, stage: str, *, share: float, max_runs: int, close: float = CLOSE) -> None:
        self._watch.begin(f"{stage}: {row.setting.label}")
        hint = row.prediction.rate if row.prediction else None
        start = ceiling = math.inf
        if row.rate is not None and row.rate < _FAR * row.ceiling:
            # A part of the load broke the bounds at infinity: all of it does, too.
            start, ceiling = row.rate, row.ceiling
        try:
            found = highest_rate(
                lambda rate: self._trials.measure(row.setting, stage, rate, share=share),
                self._bounds,
                start=start,
                hint=hint,
                ceiling=ceiling,
                max_runs=max_runs,
                close=close,
            )
        except TrialFailed as error:
            row.status, row.reason = Status.FAILED, str(error)
            self._say(f"{row.setting.label} fails: {error}")
            return
        row.rate, row.at, row.measured, row.ceiling = found.rate, found.at, found.measured, found.ceiling
        row.status, row.reason, row.share = Status.MEASURED, "", share
        self._expect(row)
        if row.rate is None:
            row.reason = "; ".join(self._bounds.broken_by(row.measured))
        at = "no rate keeps the bounds" if row.rate is None else f"rate {row.rate:g}"
        self._say(f"{row.setting.label}: {row.value:,.4g} output tokens/s ({at})")

    def _expect(self, row: Row) -> None:
        """Predicts what was measured, at the rate and with the load of the measurement; then predictions learn from
        it."""
        row.expected = {}
        predictor = self._predictors.get(row.setting.engine)
        if predictor is None or row.prediction is None or not row.measured:
            return
        options = self._options(row.setting)
        try:
            row.expected = predictor.at(options, row.at, row.share)
            if not self._effort.is_exhaustive:
                predictor.learn(options, row.at, row.share, row.measured)
        except PlanError as error:
            self._say(f"{row.setting.label} can't be predicted: {error}")

    def _whole(self, rows: Sequence[Row]) -> list[Row]:
        """Measures with the whole load; then settings that are predicted to be better, now that predictions have
        learned. Returns all of them."""
        measured: list[Row] = []
        late: list[Row] = []
        for row in rows:
            self._watch.expect(len(rows) - len(measured) + (self._effort.rounds - 1) * _NUM_FINALISTS)
            self._measure(row, "final", share=1.0, max_runs=_FINAL_RUNS, close=_FINAL_CLOSE)
            measured.append(row)
        while len(late) < _NUM_LATE and (row := self._overlooked(measured)) is not None:
            self._say(f"{row.setting.label} is measured as well: predictions have learned that it may be better")
            self._measure(row, "final", share=1.0, max_runs=_FINAL_RUNS, close=_FINAL_CLOSE)
            late.append(row)
            measured.append(row)
        return measured

    def _overlooked(self, measured: Sequence[Row]) -> Row | None:
        """The skipped setting that is predicted to be better than the best of those measured, by the same predictor:
        how fast the machine is now is the same for both."""
        best = max(measured, key=lambda row: row.value, default=None)
        if best is None or best.status is Status.FAILED:
            return None
        predictor = self._predictors.get(best.setting.engine)
        if predictor is None or best.prediction is None:
            return None
        again = {
            id(row): predictor.predict(self._options(row.setting))
            for row in self._rows
            if row.status is not Status.FAILED and row.setting.engine == best.setting.engine
        }
        values = {key: each.value for key, each in again.items() if each is not None}
        skipped = [row for row in self._rows if row.status is Status.SKIPPED and id(row) in values]
        row = max(skipped, key=lambda each: values[id(each)], default=None)
        limit = (1.0 + _LATE_GAIN) * values.get(id(best), math.inf)
        return row if row is not None and values[id(row)] > limit else None

    def _final(self, rows: Sequence[Row]) -> Row | None:
        """Measures the best two in turns with the whole load; returns the better one."""
        alive = [row for row in rows if row.rate is not None and row.status is not Status.FAILED]
        finalists = sorted(alive, key=lambda row: -row.value)[:_NUM_FINALISTS]
        for row in finalists:
            row.status, row.repeats = Status.FINALIST, [row.measured]
        for number in range(1, self._effort.rounds):
            if not finalists or self._is_decided(finalists):
                break
            for done, row in enumerate(finalists if number % 2 == 0 else reversed(finalists)):
                self._watch.expect((self._effort.rounds - number) * len(finalists) - done)
                self._watch.begin(f"final, turn {number + 1}: {row.setting.label}")
                assert row.rate is not None
                try:
                    row.repeats.append(self._trials.measure(row.setting, f"final {number}", row.rate))
                except TrialFailed as error:
                    row.status, row.reason = Status.FAILED, f"in the final, turn {number + 1}: {error}"
        lasting = [row for row in finalists if row.status is Status.FINALIST and self._keeps_bounds(row)]
        for lower in range(1, _LOWER_RATES + 1):
            if not lasting:
                lasting = [row for row in finalists if row.status is Status.FINALIST and self._slower(row, lower)]
        if not lasting:
            return None
        best = max(lasting, key=lambda row: row.value)
        best.status = Status.BEST
        for row in rows:
            if row.status in (Status.FINALIST, Status.MEASURED) and not row.reason:
                row.reason = f"{1 - row.value / best.value:.1%} below the best in the final"
        return best

    def _is_decided(self, finalists: Sequence[Row]) -> bool:
        """True if the best finalist has kept the bounds in all turns, and was clearly better than others in each."""
        best, *others = sorted(finalists, key=lambda row: -row.value)
        if len(best.repeats) < _TURNS_TO_DECIDE or any(self._bounds.broken_by(each) for each in best.repeats):
            return False
        return all(max(row.values) < (1 - _CLEARLY) * min(best.values) for row in others)

    def _slower(self, row: Row, number: int) -> bool:
        """Measures a finalist at a lower rate, if its own one kept the bounds by luck. Returns True if that holds."""
        assert row.rate is not None
        rate = row.rate if math.isfinite(row.rate) else row.measured["requests_s"]
        rate = float(f"{_LOWER * rate:.4g}")
        self._watch.begin(f"final, slower: {row.setting.label}")
        try:
            measured = self._trials.measure(row.setting, f"slower {number}", rate)
        except TrialFailed as error:
            row.status, row.reason = Status.FAILED, f"in the final, slower: {error}"
            return False
        row.rate, row.at, row.measured, row.repeats, row.reason = rate, rate, measured, [measured], ""
        self._expect(row)
        return self._keeps_bounds(row)

    def _keeps_bounds(self, row: Row) -> bool:
        broken = [reasons for each in row.repeats if (reasons := self._bounds.broken_by(each))]
        if 2 * len(broken) >= len(row.repeats) and broken:
            row.reason = f"in {len(broken)} of {len(row.repeats)} measurements: {'; '.join(broken[0])}"
            return False
        return True

    def _options(self, setting: Setting) -> Options:
        return self._clusters.options(setting, self._trials.memory)

    def _say(self, text: str) -> None:
        self._notes.append(text)
        self._watch.say(text)
