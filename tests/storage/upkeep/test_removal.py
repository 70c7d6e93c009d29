"""Removing a run: nothing of it is left, other runs are untouched, and after a kill a repetition finishes it."""

from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from storage import layout, records
from storage.backends.root import Root
from storage.errors import InputError, LeaseHeld, LeaseLost, StorageError
from storage.ownership.lease import acquire, hold, unlock
from storage.ownership.process import this_process
from storage.upkeep.catalog import Removal, require_run, runs, summaries
from storage.upkeep.fork import branch, check_unused, fork
from storage.upkeep.removal import forget, remove, what_is_there
from storage.upkeep.verify import verify
from tasks.stages.names import WORKFLOW
from tests.storage.runs import DOCUMENT, make_run
from tests.storage.stepping import SharedStore, Stepper


class KilledError(BaseException):
    pass


@dataclass(frozen=True)
class Killing(Root):
    """Dies after some removals."""

    left: list[int] | None = None

    def remove(self, key):
        assert self.left is not None
        if not self.left[0]:
            raise KilledError
        self.left[0] -= 1
        super().remove(key)


def removed(root: Root, run: str):
    with hold(root, run, "ratchet rm") as lease:
        found = remove(root, run, lease)
    forget(root, run)
    return found


@pytest.mark.slow
def test_nothing_of_it_is_left_and_nothing_of_others_is_touched(any_root):
    make_run(any_root, "run", 2)
    make_run(any_root, "runner", 1)
    before = any_root.keys("runner")
    found = removed(any_root, "run")
    assert found.objects > 15
    assert any_root.keys("run") == []
    assert any_root.folders() == ["runner"]
    assert any_root.keys("runner") == before
    assert verify(any_root, "runner").sound
    check_unused(any_root, "run")
    make_run(any_root, "run", 1)
    assert verify(any_root, "run").sound


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 2, 5, 20, 24])
def test_a_removal_that_was_killed_is_known_and_finished(root, after):
    make_run(root, "run", 2)
    killing = Killing(root.url, root.backend, left=[after])
    with pytest.raises(KilledError), hold(root, "run", "ratchet rm") as lease:
        remove(killing, "run", lease)
        forget(killing, "run")
    assert (runs(root) == ["run"]) == (not after)
    (listed,) = summaries(root)
    assert not after or "its removal was begun and is not finished: `ratchet rm run`" in str(listed.damaged)
    for refused in (check_unused, require_run):
        with pytest.raises(InputError, match=r"is being removed: finish that with `ratchet rm run`"):
            refused(root, "run")
    removed(root, "run")
    assert root.keys("") == []


def test_forks_of_a_removed_run_stay_as_they_are(any_root):
    make_run(any_root, "run", 2)
    fork(any_root, WORKFLOW, "run", 1, "child", "c1", DOCUMENT)
    fork(any_root, WORKFLOW, "child", 1, "grandchild", "c2", DOCUMENT)
    removed(any_root, "run")
    removed(any_root, "child")
    assert runs(any_root) == ["grandchild"]
    assert verify(any_root, "grandchild").findings == ()


def forked(root: Root):
    return fork(root, WORKFLOW, "run", 1, "child", "c1", DOCUMENT)


def branched(root: Root):
    return branch(root, WORKFLOW, "run", 1, root, "child", "c1", DOCUMENT)


@pytest.mark.parametrize("make", [forked, branched])
@pytest.mark.parametrize("going", ["run", "child"])
def test_a_fork_beside_a_removal_ends_or_needs_nothing_of_it(root, make, going):
    make_run(root, "run", 1)

    @dataclass(frozen=True)
    class Removing(Root):
        """The removal of a run begins when the first manifest of the new one is published."""

        def put_if_absent(self, key, data, durable=True):
            if key.startswith("child/manifests"):
                records.publish(root, layout.removal_key(going), Removal(time=datetime.now(UTC)))
            return super().put_if_absent(key, data, durable)

    removing = Removing(root.url, root.backend)
    if going == "run":  # it has all parts already
        make(removing)
        removed(root, "run")
        assert verify(root, "child").findings == ()
        return
    with pytest.raises(InputError, match="'child' is being removed"):
        make(removing)
    assert runs(root) == ["run"]
    removed(root, "child")  # the rest of the fork


@pytest.mark.slow
@pytest.mark.parametrize("make", [forked, branched])
def test_a_fork_ends_whose_parent_is_removed_after_each_of_its_operations(make):
    outcomes = set()
    for steps in range(1000):
        store = SharedStore()
        root, refused = store.root(), []
        make_run(root, "run", 1)
        gated = store.root(lambda: stepper)  # noqa: B023 - the stepper of this round

        def begin(at=gated, refused=refused):
            try:
                make(at)
            except StorageError as error:
                refused.append(error)
            except InputError as error:
                refused.append(error)

        stepper = Stepper(begin)
        for _ in range(steps):
            stepper.step()
        finished = stepper.ended
        removed(root, "run")
        while not stepper.ended:
            stepper.step()
        assert stepper.error is None, steps
        assert refused or verify(root, "child").findings == ()
        assert not refused or runs(root) == []
        outcomes.add(bool(refused))
        if finished:
            break
    assert outcomes == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("make", [forked, branched])
@pytest.mark.parametrize("after", [1, 5, 20])
def test_nothing_is_made_where_a_removal_was_killed(root, make, after):
    for run in ("run", "child"):
        make_run(root, run, 2)
    killing = Killing(root.url, root.backend, left=[after])
    with pytest.raises(KilledError), hold(root, "child", "ratchet rm") as lease:
        remove(killing, "child", lease)
    before = {key: root.read_bytes(key) for key in root.keys("")}
    with pytest.raises(InputError, match=r"'child' is being removed: finish that with `ratchet rm child`"):
        make(root)
    assert {key: root.read_bytes(key) for key in root.keys("")} == before
    removed(root, "child")
    make(root)
    assert verify(root, "child").findings == ()


def test_while_a_run_is_removed_its_lease_and_the_record_stay_until_the_end(root):
    make_run(root, "run", 1)
    with hold(root, "run", "ratchet rm") as lease:
        remove(root, "run", lease)
        assert root.keys("run") == [layout.lease_key("run", lease.epoch), layout.removal_key("run")]
        with pytest.raises(LeaseHeld):
            acquire(root, "run", this_process("another"))
    entries = len(root.keys(layout.lease_folder("run")))
    for _ in range(entries):
        with pytest.raises(KilledError):
            forget(Killing(root.url, root.backend, left=[1]), "run")
        assert root.exists(layout.removal_key("run"))
    assert root.keys("run") == [layout.removal_key("run")]


@pytest.mark.slow
def test_a_removal_that_loses_its_lease_stops(root):
    make_run(root, "run", 30)

    @dataclass(frozen=True)
    class Losing(Root):
        def remove(self, key):
            super().remove(key)
            if "/parts/" in key:
                unlock(self, "run", this_process("another"), force=True)

    losing = Losing(root.url, root.backend)
    with pytest.raises(LeaseLost), hold(root, "run", "ratchet rm") as lease:
        remove(losing, "run", lease)
    assert len(root.keys("run/parts")) > 60


def test_a_run_that_is_driven_stays(root):
    make_run(root, "run", 1)
    acquire(root, "run", this_process("ratchet run"))
    with pytest.raises(LeaseHeld, match="driven by ratchet run"):
        removed(root, "run")
    assert verify(root, "run").sound


def test_a_process_that_lost_the_lease_removes_nothing_more(root):
    make_run(root, "run", 1)
    with pytest.raises(LeaseLost), hold(root, "run", "ratchet rm") as lease:
        unlock(root, "run", this_process("another"), force=True)
        remove(root, "run", lease)
    assert root.exists(layout.run_config_key("run"))


def test_what_is_not_there_is_said(root):
    with pytest.raises(InputError, match="nothing under the name 'nobody'"):
        what_is_there(root, "nobody")


def test_what_a_failed_start_has_left_is_removed(root):
    with hold(root, "run", "ratchet run"):
        pass
    removed(root, "run")
    assert root.keys("") == []


def test_what_a_fork_shares_by_hard_links_is_not_freed(root):
    make_run(root, "parent", 1)
    alone = what_is_there(root, "parent").bytes
    fork(root, WORKFLOW, "parent", 1, "child", "c1", DOCUMENT)
    own = sum(one.bytes for one in root.stored("child") if "/parts/" not in one.key)
    assert 0 < own == what_is_there(root, "child").bytes < alone
    removed(root, "child")
    assert what_is_there(root, "parent").bytes == alone
