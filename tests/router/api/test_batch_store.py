"""The directory of files and batches: what a kill between two steps leaves is finished or removed later."""

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from router.api.gateway.batches.records import Batch, Claim, Record
from router.api.gateway.batches.runner import _finish
from router.api.gateway.batches.store import BatchStore, new_id
from router.api.gateway.batches.uploads import Upload
from router.api.gateway.errors import BadRequestError
from router.api.gateway.responses.store import StoreError


def record(**fields: Any) -> Record:
    return Record(
        id=new_id("batch_"),
        tenant="t",
        key_digest="",
        endpoint="/v1/completions",
        input_file_id="",
        completion_window="24h",
        created_at=1,
        expires_at=2,
        metadata=None,
        answers_id=new_id("file-"),
        problems_id=new_id("file-"),
        **fields,
    )


def batch_of(store: BatchStore, made: Record) -> Batch:
    folder = store.batch_folder(made.tenant, made.id)
    assert folder is not None
    batch, content = Batch(folder), store.new_part(made.tenant)
    batch.create(made, content)
    content.unlink()
    return batch


@pytest.mark.parametrize("killed_after", ["nothing", "rename", "one file", "both files"])
def test_to_finish_twice_is_to_finish_once(tmp_path: Path, killed_after: str) -> None:
    store = BatchStore(tmp_path, 2**20)
    made = record(status="finalizing", ends_as="cancelled")
    batch = batch_of(store, made)
    batch.answers.write_bytes(b"answers\n")
    batch.problems.write_bytes(b"problems\n")
    if killed_after == "rename":
        os.replace(batch.answers, store.content("t", made.answers_id))
    if killed_after in ("one file", "both files"):
        store.add_file("t", made.answers_id, batch.answers, "a", "batch_output")
    if killed_after == "both files":
        store.add_file("t", made.problems_id, batch.problems, "p", "batch_output")
    _finish(store, batch, made)
    assert [store.content("t", each).read_bytes() for each in (made.answers_id, made.problems_id)] == [
        b"answers\n",
        b"problems\n",
    ]
    assert len(store.files("t")) == 2
    found = batch.read()
    assert found is not None
    assert found.status == "cancelled"


def test_an_entry_of_the_queue_has_one_holder_and_is_removed_when_its_batch_never_came(tmp_path: Path) -> None:
    store, made = BatchStore(tmp_path, 2**20), record()
    folder = store.batch_folder("t", made.id)
    assert folder is not None
    made_claim = Claim.make(store.entry_of(folder))
    ((entry, found),) = store.queue()
    assert found == folder
    # Nobody takes it while it is made.
    assert Claim.take(entry) is None
    made_claim.release()
    claim = Claim.take(entry)
    assert claim is not None
    assert Claim.take(entry) is None
    assert not claim.is_stale
    os.utime(entry, (time.time() - 100, time.time() - 100))
    assert claim.is_stale
    claim.end()
    claim.release()
    assert not store.queue()
    assert Claim.take(entry) is None


def test_an_upload_comes_in_parts_of_any_size(tmp_path: Path) -> None:
    content = b'{"a": 1}\r\n--edg\n\r\n--edge\xff'
    body = (
        b'--edge\r\nContent-Disposition: form-data; name="other"\r\n\r\n' + b"x" * 3000 + b"\r\n--edge\r\n"
        b'content-disposition: form-data; name="file"; filename="in.jsonl"\r\ncontent-type: text/plain\r\n\r\n'
        + content
        + b'\r\n--edge\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--edge--\r\n'
    )
    for size in (1, 2, 7, 64, len(body)):
        upload = Upload("multipart/form-data; boundary=edge", tmp_path / "file")
        for start in range(0, len(body), size):
            upload.feed(body[start : start + size])
        upload.finish()
        assert (upload.filename, (tmp_path / "file").read_bytes()) == ("in.jsonl", content)
    upload = Upload("multipart/form-data; boundary=edge", tmp_path / "file")
    with pytest.raises(BadRequestError, match="not multipart"):
        upload.feed(b"--edge\r\n" + b"a" * 100_000)
    upload.close()


def test_a_tenant_gets_as_much_as_is_free(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 2**20)
    for tenant in ("a", "b"):
        part = store.new_part(tenant)
        part.write_bytes(b"x" * 300_000)
        store.add_file(tenant, new_id("file-"), part, "f", "batch")
    assert not store.why_full("c", 1.0, 200_000)
    assert "of them this tenant's" in store.why_full("a", 1.0, 200_000)
    assert not store.why_full("a", 4.0, 200_000)
    # Without keys one caller may take everything.
    assert not store.why_full("", 1.0, 400_000)
    assert store.why_full("", 1.0, 500_000)
    # What a killed upload left is removed in time.
    part = store.new_part("a")
    os.utime(part, (1, 1))
    store.why_full("a", 1.0, 0)
    assert not part.exists()


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"batches_dir=.*file"):
        BatchStore(tmp_path / "file", 2**20)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_upload_that_cannot_be_stored_leaves_only_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = BatchStore(tmp_path, 2**20)
    real, num_calls = getattr(os, call), 0

    def fail_second(*arguments: Any) -> Any:
        """The content is there by then, what is told about it is not."""
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    part = store.new_part("t")
    part.write_bytes(b"x")
    monkeypatch.setattr(os, call, fail_second)
    with pytest.raises(OSError, match="No space left"):
        store.add_upload("t", part, "f", "batch")
    monkeypatch.undo()
    part.unlink(missing_ok=True)
    assert not [*part.parent.iterdir()]
    assert store.files("t") == []
