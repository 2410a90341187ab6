"""The workloads of speculation are the same in every run, and loops and copies in outputs are found."""

from benchmarks.speculation.workloads import MAX_TOKENS, NUM_PROMPTS, copied_share, loop_length, workloads


def test_each_workload_has_a_prompt_for_every_stream() -> None:
    found = workloads()
    assert list(found) == list(MAX_TOKENS)
    for workload in found.values():
        prompts = workload.prompts()
        assert len({tuple(prompt) for prompt in prompts}) == NUM_PROMPTS
        assert all(16 <= len(prompt) <= 512 for prompt in prompts)
    assert "teh" in found["edit"].messages[0]


def test_a_loop_at_the_end_is_found() -> None:
    text = list(range(100))
    assert loop_length(text) == 0
    assert loop_length([*text, *[7, 8, 9] * 8]) == 24
    assert loop_length([*text, *[7, 8, 9] * 8, 7]) == 25
    # Too short, or only twice.
    assert loop_length([*text, *[7, 8, 9] * 7]) == 0
    assert loop_length([*text, *range(200, 230), *range(200, 230)]) == 0


def test_copies_of_the_prompt_are_found() -> None:
    prompt = list(range(50))
    assert copied_share(prompt, [99, *range(10, 18), 98]) == 0.8
    assert copied_share(prompt, [*range(5), *range(20, 25)]) == 0.0
