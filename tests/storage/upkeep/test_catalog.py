"""Content of a root, found in linear time, even if single records are damaged."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import pytest

from storage import layout
from storage.backends.root import Root, Stored
from storage.manifest import commit
from storage.revisions import record_choice, record_rerun
from storage.upkeep.catalog import contents, in_order, names, summaries, survey
from storage.upkeep.fork import fork
from storage.upkeep.lineage import of_weights
from storage.upkeep.retention import Retention, collect
from storage.upkeep.verify import verify
from tasks.stages.names import WORKFLOW, Stage
from tests.storage.revised import choice, rerun
from tests.storage.runs import DOCUMENT, make_run
from tests.storage.stepping import SharedStore
from tests.storage.tables import manifest


class Key(str):
    """A key whose uses in sets are counted by its own hash function."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(str(self))


@dataclass(frozen=True)
class CountableRoot(Root):
    """Lists such keys."""

    def stored(self, prefix: str) -> list[Stored]:
        return [one._replace(key=Key(one.key)) for one in super().stored(prefix)]


def steps_of(call: Callable[[], object]) -> int:
    """Count the functions that `call` calls in this thread, without those of its threads and of the store."""
    count = 0

    def on_event(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event in ("call", "c_call") and "fsspec" not in frame.f_code.co_filename

    sys.setprofile(on_event)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def last(root: Root) -> int:
    return max(iteration for iteration, _ in names(root, "run").newest)


WORK = {
    "contents": lambda root: contents(root, "run"),
    "verify": lambda root: verify(root, "run"),
    "collect": lambda root: collect(root, WORKFLOW, "run", Retention(newest=1)),
    "collect, applied": lambda root: collect(root, WORKFLOW, "run", Retention(newest=1), apply=True),
    "lineage": lambda root: of_weights(root, WORKFLOW, "run", last(root)),
    "fork": lambda root: fork(root, WORKFLOW, "run", last(root), "child", "c1", DOCUMENT),
}


@pytest.mark.slow
@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_a_run_twice_as_long_takes_twice_as_many_steps(work):
    steps = []
    for iterations in (20, 40):
        root = SharedStore().root()
        make_run(root, "run", iterations)
        countable = CountableRoot(root.url, root.backend)
        steps.append(steps_of(lambda at=countable: work(at)))
    # fixed costs make it less than 2, sorting a little more
    assert steps[1] < 2.2 * steps[0]


def test_what_cannot_be_read_is_left_out_and_named(root):
    make_run(root, iterations=1)
    key = layout.manifest_key("run", 1, Stage.REWARD, 0)
    root.replace(key, b"{}")
    stored, (unreadable,) = survey(root, "run")
    assert (unreadable.run, unreadable.key) == ("run", key)
    assert key not in stored.manifests
    assert len(stored.manifests) == 7 - 1


def test_names_tell_which_manifests_belong_to_the_head(root):
    for revision in range(3):
        commit(root, manifest(Stage.ROLLOUT, 1, revision=revision))
        if revision:
            record_rerun(root, "run", rerun(1, Stage.ROLLOUT, revision))
    commit(root, manifest(Stage.EVALUATE, 1))
    record_choice(root, "run", choice(2), 1)
    commit(root, manifest(Stage.ROLLOUT, 2, revision=2))
    found = names(root, "run")
    assert found.newest == {
        (1, "rollout"): layout.manifest_key("run", 1, Stage.ROLLOUT, 2),
        (2, "rollout"): layout.manifest_key("run", 2, Stage.ROLLOUT, 2),
    }
    assert len(found.manifests) == 5
    assert names(root, "run", 2).manifests == (layout.manifest_key("run", 2, Stage.ROLLOUT, 2),)
    assert found.of_stage("rollout") == {
        key: 2 if "000002" in key else 1 for key in found.manifests if "rollout" in key
    }
    assert found.of_stage("train") == {}


def test_stages_are_in_the_order_of_work():
    rolled = manifest(Stage.ROLLOUT, 1)
    trained = manifest(Stage.TRAIN, 1, inputs={"rollout": rolled.digest})
    again = trained.model_copy(update={"revision": 1})
    prepared = manifest(Stage.PREPARE, 0)
    some = {"r1": again, "r0": trained, "rolled": rolled, "prepared": prepared}
    assert list(in_order(some)) == ["prepared", "rolled", "r0", "r1"]


@pytest.mark.parametrize("iteration", [0, 2])
def test_a_damaged_run_is_listed_as_damaged_among_the_others(root, iteration):
    make_run(root, "good", 1)
    make_run(root, "bad", 2)
    key = layout.manifest_key("bad", iteration, Stage.ROLLOUT if iteration else Stage.PREPARE, 0)
    root.replace(key, b"{}")
    bad, good = summaries(root)
    assert (bad.run, bad.iteration, bad.stage) == ("bad", 2, None)
    assert key in bad.damaged
    assert (good.run, good.iteration, good.damaged) == ("good", 1, None)


def test_folders_of_something_else_are_not_listed(root):
    make_run(root, "run", 0)
    root.put_if_absent("notes/manifests/000000/train.r0.json", b"of something else")
    root.put_if_absent("My Notes/run.json", b"{}")
    assert [one.run for one in summaries(root)] == ["run"]
