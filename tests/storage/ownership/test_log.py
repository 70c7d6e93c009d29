"""The log of a lease stays short, and no number in it counts twice."""

import errno

import pytest

from storage import layout
from storage.backends.local import LocalFiles
from storage.backends.root import Root
from storage.errors import DigestMismatch, LeaseLost, StorageUnavailable
from storage.ownership import log
from storage.ownership.lease import acquire, unlock
from storage.ownership.log import newest
from tests.storage.clocks import elsewhere

KEPT = 3


class Full(LocalFiles):
    """A disk with room for so many objects."""

    room = 1000

    def put_if_absent(self, key: str, data: memoryview, durable: bool) -> bool:
        if len([*self.stored("")]) >= self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().put_if_absent(key, data, durable)


@pytest.fixture(autouse=True)
def few_entries(monkeypatch):
    monkeypatch.setattr(log, "KEPT_ENTRIES", KEPT)


def test_a_log_does_not_grow(take, any_root):
    lease = take("one")
    for _ in range(2 * KEPT):
        lease.renew()
        lease.prune()
    kept = [layout.lease_number(key) for key in any_root.keys(layout.lease_folder("run"))]
    assert kept == list(range(KEPT + 2, 2 * KEPT + 2))
    lease.check()


@pytest.mark.parametrize("use", ["check", "renew", "acquire", "unlock"])
def test_a_number_that_was_pruned_counts_for_nobody_again(take, moment, any_root, use):
    """An outdated view of the log: that of a holder, or of a process between its look and its append."""
    stale, old = take("one"), newest(any_root, "run")
    holders = [take("two")]

    def a_long_time():
        for _ in range(2 * KEPT):
            holders[0].renew()
            holders[0].prune()
        assert not any_root.exists(layout.lease_key("run", 2))

    a_long_time()
    if use in ("check", "renew"):
        with pytest.raises(LeaseLost, match="taken over by two"):
            getattr(stale, use)()
    else:
        entry = old.model_copy(update={"number": 2, "kind": "acquired" if use == "acquire" else "released"})
        assert log.append(any_root, "run", entry) == newest(any_root, "run") != entry
    holders[0].check()
    assert newest(any_root, "run").number == holders[0].epoch + 2 * KEPT
    holders[0].renew()
    holders[0].prune()
    assert len(any_root.keys(layout.lease_folder("run"))) == KEPT


def test_a_reader_follows_a_log_that_is_pruned_while_it_reads(take, any_root, monkeypatch):
    lease = take("one")
    listed = log.newest_number

    def slow(root, run):
        number = listed(root, run)
        if lease.epoch == number:
            for _ in range(2 * KEPT):
                lease.renew()
                lease.prune()
        return number

    monkeypatch.setattr(log, "newest_number", slow)
    assert newest(any_root, "run").number == 1 + 2 * KEPT


def test_a_damaged_entry_is_named(any_root):
    any_root.put_if_absent(layout.lease_key("run", 1), b"{")
    with pytest.raises(DigestMismatch, match=layout.lease_key("run", 1)):
        newest(any_root, "run")


def test_a_full_disk_keeps_no_run_locked(root):
    disk = Full(root.url)
    full = Root(root.url, disk)
    lease = acquire(full, "run", elsewhere("one"))
    disk.room = 1
    with pytest.raises(StorageUnavailable, match="free space and start the same command again"):
        unlock(full, "run", elsewhere("me"), force=True)
    lease.check()
    disk.room = 1000
    lease.renew()
    disk.room = 2
    assert unlock(full, "run", elsewhere("me"), force=True)[0]
    assert newest(full, "run").kind == "released"
    assert full.keys(layout.lease_folder("run")) == [layout.lease_key("run", number) for number in (2, 3)]
    with pytest.raises(LeaseLost, match="ended by me"):
        lease.check()
