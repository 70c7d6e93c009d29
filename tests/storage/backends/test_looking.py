"""Objects of a root as it shows them: their age, listings, and unfinished uploads."""

import time
from datetime import UTC, datetime, timedelta

import pytest

from storage.errors import NotCommitted, StorageUnavailable

KEY = "run/parts/000001/rollout/groups-0123456789abcdef.arrow"


def requests_of(s3, call) -> list[str]:
    """The server's requests during `call`."""
    before = len(s3.faults.requests)
    call()
    return s3.faults.requests[before:]


@pytest.mark.slow
def test_an_object_is_made_young_and_stays_as_it_is(any_root):
    any_root.put_if_absent(KEY, b"content")
    before = any_root.info(KEY)
    time.sleep(1.1)  # the resolution of S3's clock
    assert any_root.touch(KEY)
    after = any_root.info(KEY)
    assert after.modified > before.modified
    assert any_root.stored("run") == [after]
    assert (after.bytes, any_root.read_bytes(KEY)) == (7, b"content")


def test_what_is_not_there_has_no_age(any_root):
    assert any_root.info(KEY) is None
    assert not any_root.touch(KEY)
    assert any_root.info("run") is None


def test_a_record_is_one_request_and_so_is_a_listing(s3, s3_root):
    s3_root.put_if_absent(KEY, b"content")
    assert len(requests_of(s3, lambda: s3_root.read_bytes(KEY))) == 1
    assert len(requests_of(s3, lambda: s3_root.stored("run"))) == 1
    assert len(requests_of(s3, lambda: s3_root.stored("nothing"))) == 1

    def read_nothing():
        with pytest.raises(NotCommitted):
            s3_root.read_bytes("run/nothing")

    assert len(requests_of(s3, read_nothing)) == 1


def test_a_listing_holds_what_is_below_the_folder_alone(any_root):
    for key in ("run/a", "run/b/c", "run2/a", "ru"):
        any_root.put_if_absent(key, b"content")
    assert any_root.keys("run") == ["run/a", "run/b/c"]
    assert any_root.keys("run/b") == ["run/b/c"]
    assert any_root.keys("") == ["ru", "run/a", "run/b/c", "run2/a"]


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(root):
    root.put_if_absent("run/manifests", b"a file where a folder should be")
    with pytest.raises(StorageUnavailable, match="run/manifests"):
        root.keys("run/manifests")


def test_a_run_on_another_disk_counts(root, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    root.put_if_absent("run/run.json", b"{}")
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "elsewhere")
    root.put_if_absent("linked/run.json", b"{}")
    assert root.folders() == ["linked", "run"]
    assert root.keys("linked") == ["linked/run.json"]


def test_an_upload_that_was_never_finished_is_found_and_aborted(s3, s3_root):
    bucket, _, prefix = s3_root.backend.path.partition("/")
    for key in (KEY, "run2/other"):
        s3_root.backend.fs.call_s3("create_multipart_upload", Bucket=bucket, Key=f"{prefix}/{key}")
    (found,) = s3_root.uploads("run")
    assert found.key == KEY
    assert found.started < datetime.now(UTC) + timedelta(minutes=1)
    s3_root.abort_upload(found.key, found.id)
    s3_root.abort_upload(found.key, found.id)
    assert s3_root.uploads("run") == []
    assert [one.key for one in s3_root.uploads("run2")] == ["run2/other"]


def test_other_stores_know_no_uploads(root):
    assert root.uploads("run") == []
