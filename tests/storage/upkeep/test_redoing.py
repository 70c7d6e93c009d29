"""Records that are kept, deleted, shared and shown once stages were redone."""

from dataclasses import dataclass, field

import pytest

from storage import layout
from storage.backends.root import Root, Stored, open_root
from storage.errors import InputError, LeaseLost
from storage.manifest import Manifest, commit, find, need
from storage.ownership.lease import acquire, hold, unlock
from storage.ownership.process import this_process
from storage.parts import PartWriter
from storage.revisions import read_revisions
from storage.upkeep.catalog import contents, names_of, summaries
from storage.upkeep.fork import fork
from storage.upkeep.lineage import of_sample, of_weights
from storage.upkeep.redoing import Wanted, ask, choose
from storage.upkeep.retention import Retention, catch_up, collect, give_up
from storage.upkeep.verify import Problem, verify
from tasks.stages.names import WORKFLOW, Stage
from tests.storage.runs import DOCUMENT, age, make_run

RUN = "run"


def again(root: Root, iteration: int, stage: Stage, data: bytes | None = None, run: str = RUN) -> Manifest:
    """Redo a stage, with other content, or with `data` as its only part; it becomes the head."""
    with hold(root, run, "test") as lease:
        rerun = ask(root, WORKFLOW, run, Wanted(iteration, stage, "a test", "tests"), lease)
        made = publish(root, run, iteration, stage, rerun.revision, data)
        choose(root, WORKFLOW, run, rerun.revision, "a test", "tests", lease)
    return made


def publish(root: Root, run: str, iteration: int, stage: Stage, revision: int, data: bytes | None) -> Manifest:
    """The stage as revision 0 has it, under another number."""
    before = need(root, run, iteration, stage, read_revisions(root, run).seen(0))
    changes = {"revision": revision, "facts": {**before.facts, "again": revision}, "origin": None}
    if data is not None:
        writer = PartWriter(root, run, iteration, stage, revision)
        changes["parts"] = (writer.write_bytes("state/0.distcp", data),)
    return commit(root, before.model_copy(update=changes))


def after(root: Root, iteration: int, stage: Stage, made: Manifest, role: str, data: bytes | None = None) -> Manifest:
    """The stage of the head that is made from `made`."""
    before = need(root, RUN, iteration, stage, read_revisions(root, RUN).seen(0))
    parts = before.parts
    if data is not None:
        parts = (PartWriter(root, RUN, iteration, stage, made.revision).write_bytes("state/0.distcp", data),)
    changes = {"revision": made.revision, "inputs": {**before.inputs, role: made.digest}, "parts": parts}
    return commit(root, before.model_copy(update=changes))


def test_a_part_is_kept_as_long_as_one_revision_names_it(root: Root):
    first = make_run(root)[3, Stage.TRAIN]
    (part,) = first.parts
    data = root.read_bytes(part.key)
    same = again(root, 3, Stage.TRAIN, data)
    assert same.parts == first.parts  # shared by content
    after(root, 3, Stage.WEIGHT_SYNC, same, "train")
    retired = collect(root, WORKFLOW, RUN, Retention(newest=1), apply=True)
    assert part.key not in {one.key for one in retired.garbage}
    assert root.exists(part.key)
    assert verify(root, RUN).sound


@pytest.mark.slow
def test_each_revision_keeps_what_it_is_continued_from(root: Root):
    done = make_run(root)
    made = again(root, 2, Stage.TRAIN, b"another state")
    after(root, 2, Stage.WEIGHT_SYNC, made, "train")
    found = collect(root, WORKFLOW, RUN, Retention(newest=1), apply=True)
    # of revision 0 the newest is 3, of revision 1 it is 2
    kept = {key for key in layout_states(root) if not root.exists(layout.retired_key(key))}
    assert kept == {done[0, Stage.TRAIN].key, made.key, done[3, Stage.TRAIN].key}
    assert {one.key for one in found.garbage} == {part.key for n in (1, 2) for part in done[n, Stage.TRAIN].parts}
    assert verify(root, RUN).sound


def layout_states(root: Root) -> list[str]:
    return [key for key in root.keys(layout.manifest_folder(RUN)) if layout.is_manifest(key) and "/train." in key]


def test_parts_of_a_revision_that_is_not_the_head_are_no_garbage(root: Root):
    make_run(root)
    with hold(root, RUN, "test") as lease:
        ask(root, WORKFLOW, RUN, Wanted(2, Stage.TRAIN, "a test", "tests", cascade=False), lease)
    made = publish(root, RUN, 2, Stage.TRAIN, 1, b"beside")
    age(root, made.parts[0].key)
    assert collect(root, WORKFLOW, RUN, apply=True).garbage == ()
    assert root.exists(made.parts[0].key)


@pytest.mark.slow
def test_a_revision_is_forked_as_it_was(root: Root):
    make_run(root)
    made = again(root, 2, Stage.TRAIN, b"another state")
    after(root, 2, Stage.WEIGHT_SYNC, made, "train")
    for name, revision, parts in (("head", None, made.parts), ("first", 0, make_first(root))):
        forked = fork(root, WORKFLOW, RUN, 2, name, "c" * 32, DOCUMENT, revision)
        assert forked.manifests == 3 + 2 * 4
        state = need(root, name, 2, Stage.TRAIN)
        assert ([one.digest for one in state.parts], state.revision) == ([one.digest for one in parts], 0)
        assert verify(root, name).sound
    with pytest.raises(InputError, match="iteration 3 of run 'run' is not complete; iterations 0 to 2 are"):
        fork(root, WORKFLOW, RUN, 3, "third", "c" * 32, DOCUMENT)
    assert fork(root, WORKFLOW, RUN, 3, "third", "c" * 32, DOCUMENT, 0).iteration == 3


def make_first(root: Root):
    return need(root, RUN, 2, Stage.TRAIN, read_revisions(root, RUN).seen(0)).parts


def test_a_stage_that_a_fork_has_taken_over_is_done_again_in_the_fork_alone(root: Root):
    make_run(root)
    fork(root, WORKFLOW, RUN, 2, "child", "c" * 32, DOCUMENT)
    before = {key: root.read_bytes(key) for key in root.keys(RUN)}
    made = again(root, 2, Stage.TRAIN, b"of the child", run="child")
    assert made.parts[0].key.startswith("child/parts/")
    assert need(root, "child", 2, Stage.TRAIN) == made
    assert {key: root.read_bytes(key) for key in root.keys(RUN)} == before | {
        key: root.read_bytes(key) for key in root.keys(RUN) if "/lease/" in key
    }
    # the fork keeps its parent's results, though its head does not name them
    collect(root, WORKFLOW, RUN, Retention(newest=1), apply=True)
    collect(root, WORKFLOW, "child", apply=True)
    assert verify(root, "child").findings == ()


@pytest.mark.slow
def test_lineage_of_weights_follows_one_revision(root: Root):
    make_run(root)
    made = again(root, 2, Stage.TRAIN, b"another state")
    after(root, 2, Stage.WEIGHT_SYNC, made, "train")
    head, first = of_weights(root, WORKFLOW, RUN, 2), of_weights(root, WORKFLOW, RUN, 2, revision=0)
    assert head.steps[-1].digest == made.digest != first.steps[-1].digest
    assert head.steps[:-1] == first.steps[:-1]
    used = of_sample(root, WORKFLOW, RUN, 2, "p0", 0).used_by
    assert {step.digest for step in used} == {made.digest, first.steps[-1].digest}
    assert contents(root, RUN, names_of(root, RUN, 0)).newest[-1].iteration == 3
    assert summaries(root)[0].iteration == 2


@pytest.mark.slow
def test_a_damaged_choice_is_named(root: Root):
    make_run(root)
    again(root, 2, Stage.TRAIN, b"another state")
    root.replace(layout.choice_key(RUN, 1), b"{}")
    (found,) = [one for one in verify(root, RUN).findings if one.fault is Problem.DAMAGED]
    assert "head-000001.json is damaged" in found.detail


@pytest.mark.slow
def test_a_choice_names_what_is_done(root: Root):
    make_run(root)
    with hold(root, RUN, "test") as lease:
        ask(root, WORKFLOW, RUN, Wanted(2, Stage.TRAIN, "a test", "tests"), lease)
        with pytest.raises(InputError, match=r"revision 1 of run 'run' has no train of iteration 2 yet"):
            choose(root, WORKFLOW, RUN, 1, "early", "tests", lease)
    assert find(root, RUN, 2, Stage.TRAIN) is not None


def test_a_revision_that_cannot_go_on_is_not_chosen(root: Root):
    make_run(root)
    collect(root, WORKFLOW, RUN, Retention(newest=1), apply=True)
    with hold(root, RUN, "test") as lease:
        ask(root, WORKFLOW, RUN, Wanted(2, Stage.REWARD, "a test", "tests", cascade=False), lease)
        publish(root, RUN, 2, Stage.REWARD, 1, None)
        with pytest.raises(InputError, match=r"the train state of iteration 1 .* those of \[0\] are kept"):
            choose(root, WORKFLOW, RUN, 1, "late", "tests", lease)
    assert read_revisions(root, RUN).head == 0


def test_the_same_result_again_leads_on_to_what_the_parent_has(root: Root):
    make_run(root)
    first = again(root, 2, Stage.TRAIN, b"another state")
    after(root, 2, Stage.WEIGHT_SYNC, first, "train")
    with hold(root, RUN, "test") as lease:
        ask(root, WORKFLOW, RUN, Wanted(2, Stage.REWARD, "a test", "tests"), lease)
        publish_same(root, 2, Stage.REWARD, 2)
        assert choose(root, WORKFLOW, RUN, 2, "a test", "tests", lease).goes_on == 1
    assert need(root, RUN, 2, Stage.REWARD).revision == 2
    assert need(root, RUN, 2, Stage.TRAIN) == first
    assert find(root, RUN, 3, Stage.ROLLOUT) is None


def publish_same(root: Root, iteration: int, stage: Stage, revision: int) -> Manifest:
    return commit(root, need(root, RUN, iteration, stage).model_copy(update={"revision": revision}))


def test_the_end_of_an_iteration_leaves_states_of_other_revisions(root: Root):
    done = make_run(root)
    made = again(root, 2, Stage.TRAIN, b"another state")
    synced = after(root, 2, Stage.WEIGHT_SYNC, made, "train")
    keep = Retention(newest=1)
    with hold(root, RUN, "test") as lease:
        choose(root, WORKFLOW, RUN, 0, "back", "tests", lease)
        give_up(root, WORKFLOW, RUN, keep, 3, fence=lease)  # evicts iteration 2 of revision 0
    assert not root.exists(done[2, Stage.TRAIN].parts[0].key)
    assert root.exists(made.parts[0].key)
    assert read_revisions(root, RUN).seen(1).of(2, Stage.WEIGHT_SYNC) == synced.revision


def test_an_evaluation_of_weights_that_were_done_again_is_not_forked(root: Root):
    made = make_run(root, iterations=2)
    for iteration in (1, 2):
        trained = made[iteration, Stage.TRAIN]
        changes = {"stage": "evaluation-ab", "parts": (), "inputs": {"train": trained.digest}}
        commit(root, trained.model_copy(update=changes))
    mine = again(root, 2, Stage.TRAIN, b"another state")
    after(root, 2, Stage.WEIGHT_SYNC, mine, "train")
    fork(root, WORKFLOW, RUN, 2, "child", "c1", DOCUMENT)
    assert find(root, "child", 1, "evaluation-ab") is not None
    assert find(root, "child", 2, "evaluation-ab") is None
    assert verify(root, "child").findings == ()


@pytest.mark.parametrize("use", ["ask", "choose"])
def test_a_process_that_lost_its_lease_asks_for_nothing_and_chooses_nothing(root: Root, use: str):
    make_run(root)
    lease = acquire(root, RUN, this_process("test"))
    unlock(root, RUN, this_process("another"), force=True)
    with pytest.raises(LeaseLost):
        if use == "ask":
            ask(root, WORKFLOW, RUN, Wanted(2, Stage.TRAIN, "a test", "tests"), lease)
        else:
            choose(root, WORKFLOW, RUN, 0, "a test", "tests", lease)
    assert root.keys(layout.revision_folder(RUN)) == []


@dataclass(frozen=True)
class Weighing(Root):
    """Notes each request with the number of objects that it names."""

    asked: list[tuple[str, int]] = field(default_factory=list)

    def stored(self, prefix: str) -> list[Stored]:
        found = super().stored(prefix)
        self.asked.append(("list", len(found)))
        return found

    def read_bytes(self, key: str) -> bytes:
        self.asked.append(("read", 1))
        return super().read_bytes(key)


def the_end(root: Root, iterations: int, reruns: int) -> Weighing:
    """The end of iteration 3 of a run with that many iterations, and that many reruns of its last one."""
    make_run(root, RUN, iterations)
    for number in range(reruns):
        again(root, iterations, Stage.TRAIN, f"{number}".encode())
    weighing = Weighing(root.url, root.backend)
    give_up(weighing, WORKFLOW, RUN, Retention(newest=1), 3, revisions=read_revisions(root, RUN))
    assert root.exists(layout.retired_key(layout.manifest_key(RUN, 2, Stage.TRAIN, 0)))
    return weighing


@pytest.mark.slow
def test_the_end_of_an_iteration_costs_the_same_however_much_came_before(tmp_path):
    costs = [
        the_end(open_root(str(tmp_path / f"{iterations}-{reruns}")), iterations, reruns).asked
        for iterations, reruns in ((4, 1), (12, 1), (12, 2))
    ]
    assert costs[0] == costs[1] == costs[2]
    assert sum(names for _, names in costs[0]) < 40


@pytest.mark.slow
@pytest.mark.parametrize("served", [1, 2, 3, 4])
@pytest.mark.parametrize("newest", [1, 2])
def test_the_end_of_an_iteration_gives_up_what_a_start_would(tmp_path, served, newest):
    """Revision 1 has iterations 0 to 2, revision 2 of it has 0 to 3 again, and revision 0 is the head."""
    roots = [open_root(str(tmp_path / name)) for name in ("start", "end")]
    for root in roots:
        make_run(root, RUN, served)
        if served > 1:
            made = again(root, 2, Stage.TRAIN, b"another state")
            after(root, 2, Stage.WEIGHT_SYNC, made, "train")
        with hold(root, RUN, "test") as lease:
            choose(root, WORKFLOW, RUN, 0, "back", "tests", lease)
    keep = Retention(newest=newest)
    catch_up(roots[0], WORKFLOW, RUN, keep)
    for iteration in range(served + 1):
        give_up(roots[1], WORKFLOW, RUN, keep, iteration)
    kept = [[key for key in layout_states(root) if not root.exists(layout.retired_key(key))] for root in roots]
    assert kept[0] == kept[1]
    assert len(kept[0]) <= newest + 3
