// The phases of a request, from the entries of its timeline. Knows no page: tests run it without a browser.

const PHASE_AFTER = {
  queued: "queued", admitted: "prefill", resumed: "prefill", decoding: "decode", preempted: "preempted",
};

// Returns the spans of one choice: [{phase, begin, end, reason}], in seconds since the first entry.
export function spansOf(timeline, choice) {
  const spans = [];
  for (const entry of timeline.entries) {
    if (entry.choice !== choice) continue;
    const last = spans.at(-1);
    if (entry.moment === "finished") {
      if (last) last.end = entry.time;
      return spans;
    }
    const phase = PHASE_AFTER[entry.moment];
    if (!phase || last?.phase === phase) continue;
    if (last) last.end = entry.time;
    spans.push({ phase, begin: entry.time, end: timeline.now, reason: entry.reason });
  }
  return spans;
}

export function choicesOf(timeline) {
  return [...new Set(timeline.entries.map((entry) => entry.choice))].sort((a, b) => a - b);
}

// Seconds in each phase.
export function secondsByPhase(spans) {
  const sums = {};
  for (const { phase, begin, end } of spans) sums[phase] = (sums[phase] ?? 0) + end - begin;
  return sums;
}
