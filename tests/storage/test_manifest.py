"""The commit point: identity, adoption, conflict, fence, and a reader's refusals."""

import json
import math
from datetime import timedelta

import pytest

from storage import layout, records
from storage.digest import bytes_digest
from storage.errors import (
    CommitConflict,
    DigestMismatch,
    LeaseLost,
    NotCommitted,
    Overtaken,
    SchemaMismatch,
    StageFailed,
    StorageError,
    WrongRecord,
)
from storage.manifest import Manifest, Origin, Part, commit, find, finite_or_null, load, need, revisions
from storage.parts import PartWriter
from storage.records import seal, unseal
from storage.revisions import read_revisions, record_choice, record_rerun
from tasks.stages.names import Stage
from tests.storage.flaky import flaky_root
from tests.storage.hostile import forged, forged_part, sealed_again
from tests.storage.revised import choice, rerun
from tests.storage.tables import TIME, manifest

DIGEST = bytes_digest(b"content")
PART = Part(
    name="groups.arrow",
    key=layout.part_key("run", 1, Stage.ROLLOUT, "groups.arrow", DIGEST),
    bytes=7,
    digest=DIGEST,
    rows=3,
)
KEY = layout.manifest_key("run", 1, Stage.ROLLOUT, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"metrics": {"seconds": 2.0}},
        {"attempt": 3},
        {"writer": "elsewhere:1"},
        {"started": TIME + timedelta(1), "finished": TIME + timedelta(2)},
        {"code_version": "2"},
        {"revision": 1},
        {"epoch": 7},
        {"origin": Origin(run="parent", digest="d", config_digest="c")},
        {"parts": (*manifest().parts, PART.model_copy(update={"measured": True}))},
    ],
    ids=lambda change: next(iter(change)),
)
def test_how_a_result_came_about_is_not_its_identity(change):
    assert manifest(**change).digest == manifest().digest


@pytest.mark.parametrize(
    "change",
    [
        {"run": "other"},
        {"iteration": 2},
        {"stage": Stage.REWARD},
        {"schema_fingerprint": "f"},
        {"parts": (PART,)},
        {"inputs": {"weights": "d"}},
        {"config_digest": "c1"},
        {"facts": {"cursor": 1}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_a_result_is_and_was_made_from_is_its_identity(change):
    assert manifest(**change).digest != manifest().digest


def test_the_identity_of_stored_runs_is_for_ever():
    # a literal: if it changed, new manifests of every stored run would not match its old ones
    fields = {"inputs": {"weights": "d"}, "facts": {"cursor": 1, "digest": None}, "schema_fingerprint": "f"}
    part = Part.model_construct(name="groups.arrow", key="run/parts/groups-00.arrow", bytes=10, digest="00", rows=3)
    stored = manifest(**fields).model_copy(update={"parts": (part,)})  # this key is refused now
    assert stored.digest == "9d1ba1c3bac568eb1521b7a87ed2f373"


OF_CONTENT = {"content": "state", "facts": {"state": {"scheme": 1, "tensors": "t"}, "cursor": 3}}


def test_where_a_fact_identifies_the_content_the_parts_do_not_count():
    one = manifest(**OF_CONTENT)
    assert one.digest == manifest(parts=(PART,), **OF_CONTENT).digest
    other = {**OF_CONTENT, "facts": {"state": {"scheme": 1, "tensors": "u"}, "cursor": 3}}
    assert len({one.digest, manifest(**other).digest, manifest(facts=OF_CONTENT["facts"]).digest}) == 3
    assert one.digest == "336444752c0e851af0c2007a72388c00"  # for ever


def test_a_content_that_no_fact_identifies_is_refused():
    with pytest.raises(ValueError, match=r"its content is in the fact 'state', and its facts are \['cursor'\]"):
        manifest(**{**OF_CONTENT, "facts": {"cursor": 3}})


def test_other_files_with_the_same_content_are_adopted(any_root):
    winner = commit(any_root, manifest(parts=(PART,), **OF_CONTENT))
    assert commit(any_root, manifest(**OF_CONTENT)) == winner
    assert load(any_root, KEY).parts == (PART,)


def test_a_committed_manifest_is_found_as_it_was(any_root):
    published = commit(any_root, manifest(parts=(PART,), facts={"cursor": 3}, metrics={"seconds": 0.1}))
    assert find(any_root, "run", 1, Stage.ROLLOUT) == published
    assert need(any_root, "run", 1, Stage.ROLLOUT).part("groups.arrow") == PART
    with pytest.raises(StorageError, match=r"no part 'other'.*groups.arrow"):
        published.part("other")


def test_what_was_not_committed_is_not_there(any_root):
    assert find(any_root, "run", 1, Stage.ROLLOUT) is None
    with pytest.raises(NotCommitted, match="run run has no rollout of iteration 1"):
        need(any_root, "run", 1, Stage.ROLLOUT)


def test_a_revision_counts_once_it_is_the_head(any_root):
    first = commit(any_root, manifest(facts={"cursor": 0}))
    again = commit(any_root, manifest(facts={"cursor": 1}, revision=1))
    assert find(any_root, "run", 1, Stage.ROLLOUT) == first
    record_rerun(any_root, "run", rerun(1, Stage.ROLLOUT, 1))
    assert find(any_root, "run", 1, Stage.ROLLOUT) == first
    record_choice(any_root, "run", choice(1), 1)
    assert find(any_root, "run", 1, Stage.ROLLOUT) == again
    assert find(any_root, "run", 1, Stage.ROLLOUT, read_revisions(any_root, "run").seen(0)) == first
    assert list(revisions(any_root, "run", 1, Stage.ROLLOUT)) == [first, again]
    assert list(revisions(any_root, "run", 2, Stage.ROLLOUT)) == []


def test_a_part_of_another_stage_or_run_is_refused_also_with_an_origin(root):
    writer = PartWriter(root, "parent", 2, Stage.TRAIN)
    state = writer.write_bytes("state/0.distcp", b"state")
    for run, iteration, stage in (("child", 2, Stage.TRAIN), ("parent", 0, Stage.TRAIN), ("parent", 2, Stage.ROLLOUT)):
        for origin in (None, Origin(run="parent", digest="d", config_digest="c0")):
            foreign = manifest(stage, iteration, (state,), run=run, origin=origin)
            with pytest.raises(StorageError, match=r"names parent/parts/000002/train/state/0.*a run is closed"):
                commit(root, foreign)
            assert find(root, run, iteration, stage) is None
            records.publish(root, foreign.key, foreign)
            with pytest.raises(SchemaMismatch, match=r"names parent/parts/000002/train/state/0"):
                find(root, run, iteration, stage)
            root.remove(foreign.key)
    commit(root, manifest(Stage.TRAIN, 2, (state,), run="parent"))


def test_the_second_of_two_equal_results_adopts_the_first(any_root):
    first = commit(any_root, manifest(writer="one"))
    assert commit(any_root, manifest(writer="two")) == first


def test_the_second_of_two_different_results_is_refused(any_root):
    first = commit(any_root, manifest(writer="one", facts={"cursor": 0}))
    with pytest.raises(CommitConflict, match="committed by one with other content"):
        commit(any_root, manifest(writer="two", facts={"cursor": 1}))
    assert find(any_root, "run", 1, Stage.ROLLOUT) == first


@pytest.mark.parametrize("script", [["lost server error"], ["busy", "lost timeout"], ["reset", "slow"]])
def test_a_commit_whose_answer_was_lost_is_a_commit(script):
    root = flaky_root(script)
    published = commit(root, manifest(writer="one"))
    assert find(root, "run", 1, Stage.ROLLOUT) == published


class Fencing:
    """A fence with a scripted answer."""

    def __init__(self, epoch, lost=False):
        self.epoch, self.lost = epoch, lost

    def check(self):
        if self.lost:
            raise LeaseLost("taken over")


def test_a_fence_is_asked_before_anything_is_written(any_root):
    with pytest.raises(LeaseLost):
        commit(any_root, manifest(), Fencing(1, lost=True))
    assert find(any_root, "run", 1, Stage.ROLLOUT) is None
    assert commit(any_root, manifest(), Fencing(4)).epoch == 4


def test_who_took_over_is_told_that_the_earlier_holder_published(any_root):
    commit(any_root, manifest(writer="one", facts={"cursor": 0}), Fencing(1))
    with pytest.raises(Overtaken, match="until this process took over, so its result counts: start again"):
        commit(any_root, manifest(writer="two", facts={"cursor": 1}), Fencing(2))


class NewerManifest(Manifest):
    """A manifest as a later version might write it."""

    format_version: int = 2
    shards: tuple[str, ...] = ()


def test_another_format_is_refused_with_the_number(root):
    root.put_if_absent(KEY, seal(NewerManifest(**manifest().model_dump(exclude={"format_version"}))))
    with pytest.raises(SchemaMismatch, match=r"format_version: Input should be 1.* Ratchet that wrote it") as refusal:
        find(root, "run", 1, Stage.ROLLOUT)
    assert KEY in str(refusal.value)


def test_every_flipped_bit_of_a_manifest_is_refused(root):
    commit(root, manifest(parts=(PART,), metrics={"loss": 0.1}))
    good = root.read_bytes(KEY)
    for position in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            with pytest.raises(DigestMismatch, match="damaged"):
                unseal(bytes(bad), KEY)


@pytest.mark.parametrize("data", [b"{", b"[]", b"{}", b"\xff\xfe", b'{"format_version": 1}'])
def test_a_damaged_manifest_is_refused_with_its_key(root, data):
    root.put_if_absent(KEY, data)
    with pytest.raises(DigestMismatch, match=KEY):
        load(root, KEY)


def test_another_record_is_not_taken_for_a_manifest(root):
    root.put_if_absent(KEY, seal(PART))
    with pytest.raises(SchemaMismatch, match=f"{KEY} is not a Manifest"):
        load(root, KEY)


def test_a_manifest_survives_its_json():
    given = manifest(parts=(PART,), inputs={"a": "b"}, facts={"n": 1, "x": [None, 0.1]}, metrics={"loss": 1e-300})
    assert Manifest.model_validate_json(given.model_dump_json()) == given


NOT_FINITE = {"reward_mean": math.nan, "high": math.inf, "low": -math.inf, "loss": 0.1}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_never_written(any_root, value):
    with pytest.raises(ValueError, match="finite number"):
        manifest(metrics={"loss": value})
    unchecked = manifest().model_copy(update={"metrics": {"loss": value}})
    with pytest.raises(StageFailed, match=rf"{KEY} is not committed: metric 'loss' is {value}"):
        commit(any_root, unchecked)
    assert any_root.keys("") == []


def test_a_missing_number_is_null_for_any_tool_that_reads_json(any_root):
    commit(any_root, manifest(metrics=finite_or_null(NOT_FINITE)))
    stored = json.loads(any_root.read_bytes(KEY), parse_constant=pytest.fail)["metrics"]
    assert stored == find(any_root, "run", 1, Stage.ROLLOUT).metrics == {**dict.fromkeys(NOT_FINITE), "loss": 0.1}


@pytest.mark.parametrize("value", [math.nan, -math.inf, [1.0, {"deep": math.inf}]])
def test_a_fact_that_is_not_finite_is_not_committed(root, value):
    with pytest.raises(StageFailed, match=r"rollout of iteration 1 of run run is not committed: fact 'scale' is "):
        commit(root, manifest(facts={"cursor": 1, "scale": value}))
    assert root.keys("") == []


def test_a_fact_that_is_not_finite_is_not_read(root):
    text = forged(manifest(facts={"scale": "here"}))
    root.put_if_absent(KEY, sealed_again(text.replace(b'"here"', b"NaN")))
    with pytest.raises(SchemaMismatch, match=f"{KEY} .*fact 'scale' is nan"):
        load(root, KEY)


@pytest.mark.parametrize(
    "place",
    [("other", 1, Stage.ROLLOUT, 0), ("run", 2, Stage.ROLLOUT, 0), ("run", 1, Stage.REWARD, 0),
     ("run", 1, Stage.ROLLOUT, 1)],
    ids=["run", "iteration", "stage", "revision"],
)  # fmt: skip
def test_a_manifest_in_the_place_of_another_is_refused(root, place):
    commit(root, manifest())
    other = layout.manifest_key(*place)
    root.put_if_absent(other, root.read_bytes(KEY))
    with pytest.raises(WrongRecord, match=f"{other} holds the manifest of {KEY}"):
        load(root, other)


@pytest.mark.parametrize(
    ("field", "value"),
    [("run", "../other"), ("run", "/"), ("run", "a\n"), ("run", ""), ("iteration", -1), ("revision", -1),
     ("stage", "../x"), ("origin", Origin.model_construct(run="../x", digest="d", config_digest="c"))],
)  # fmt: skip
def test_a_manifest_of_no_place_is_refused(root, field, value):
    root.put_if_absent(KEY, forged(manifest(), **{field: value}))
    with pytest.raises(SchemaMismatch, match=rf"{KEY} is not a Manifest .*{field}"):
        load(root, KEY)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "../x", "state/../../home/x", "state/..", ".", "state/./x", "state//x", "state/", "a\\b",
     "a\0b", "a\nb", ".tmp-x", "state/.tmp-x"],
)  # fmt: skip
def test_a_part_whose_name_leaves_its_folder_is_refused(root, name):
    root.put_if_absent(KEY, forged(manifest(), parts=(forged_part(PART, name=name),)))
    with pytest.raises(SchemaMismatch, match=rf"(?s){KEY} .*parts\.0: .*the name .* cannot be a part's") as refusal:
        load(root, KEY)
    assert repr(name) in str(refusal.value)


@pytest.mark.parametrize(
    "key",
    ["", "/etc/passwd", "../outside", "run/parts/../../outside", "run/run.json", "run/parts/000001/rollout/../x",
     "run/lease/000000001.json", "run/manifests/000001/train.r0.json", "run/parts/000001/rollout/groups.arrow",
     "../run/parts/000001/rollout/groups-DIGEST.arrow", "/run/parts/000001/rollout/groups-DIGEST.arrow",
     "run/parts/1/rollout/groups-DIGEST.arrow", "run/parts/000001/../rollout/groups-DIGEST.arrow",
     "run/parts/000001/rollout/../groups-DIGEST.arrow", "Run/parts/000001/rollout/groups-DIGEST.arrow",
     "run/parts/000001/rollout/groups-DIGEST.arrow/x", "run/parts/000001/rollout//groups-DIGEST.arrow",
     "run/parts/000001/rollout/groups-0123456789abcdef.arrow", "run/parts/000001/rollout/a\n-DIGEST.arrow"],
)  # fmt: skip
def test_a_part_that_is_none_of_a_run_is_refused(root, key):
    part = forged_part(PART, key=key.replace("DIGEST", DIGEST[: layout.DIGEST_CHARACTERS]))
    root.put_if_absent(KEY, forged(manifest(), parts=(part,)))
    with pytest.raises(SchemaMismatch, match=rf"(?s){KEY} .*parts\.0: .*the key .* cannot be a part's") as refusal:
        load(root, KEY)
    assert repr(part.key) in str(refusal.value)
