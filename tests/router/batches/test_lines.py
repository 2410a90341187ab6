"""A batch is read line by line: nothing that a line holds keeps others from being read."""

from pathlib import Path

from router.batches.lines import LineReader, summary_of

GOOD = b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}'


def test_a_line_that_is_too_long_is_skipped_and_never_held(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD % 1 + b"\r\n\n" + b"x" * 3_000_000 + b"\n" + GOOD % 2 + b"\n \n" + GOOD % 3)
    with LineReader(path, most_bytes=200) as reader:
        lines = []
        while (line := reader.next()) is not None:
            lines.append(line)
    assert [(line.number, line.problem and line.problem.code) for line in lines] == [
        (1, None), (3, "line_too_long"), (4, None), (6, None)
    ]  # fmt: skip
    assert [line.custom_id for line in lines] == ["1", None, "2", "3"]
    assert lines[0].body == b'{"prompt":"x"}'
    assert summary_of(path).num_lines == 4


def test_a_file_without_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    for text in (b"", b"\n \n\t"):
        path.write_bytes(text)
        assert summary_of(path).num_lines == 0
        with LineReader(path, 100) as reader:
            assert reader.next() is None
