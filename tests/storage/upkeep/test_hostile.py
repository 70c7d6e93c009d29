"""Effects of a careless reward or a hostile record on the commands that look after a root."""

import contextlib
import math

import pytest

from flows.views.history import read_history
from storage import layout
from storage.errors import SchemaMismatch
from storage.manifest import commit, finite_or_null, need
from storage.parts import PartWriter
from storage.records import seal
from storage.unfinished import PieceRecord, find_piece
from storage.upkeep.catalog import contents, summaries
from storage.upkeep.retention import Retention, catch_up, collect, give_up
from storage.upkeep.verify import Problem, verify
from tasks.stages.names import WORKFLOW, Stage
from tests.storage.hostile import forged, forged_part, sealed_again
from tests.storage.runs import make_run


@pytest.mark.slow
def test_a_mean_that_is_not_a_number_blinds_no_run(root):
    for run in ("run", "other"):
        make_run(root, run, 2)
    before = need(root, "run", 2, Stage.REWARD)
    metrics = finite_or_null({**before.metrics, "reward_mean": math.nan})
    commit(root, before.model_copy(update={"iteration": 3, "parts": (), "metrics": metrics}))
    assert [one.iteration for one in summaries(root) if one.run == "run"] == [3]
    assert contents(root, "run").newest[-1].metrics["reward_mean"] is None
    for run in ("run", "other"):
        assert collect(root, WORKFLOW, run, apply=True).garbage == ()
        assert verify(root, run).sound


@pytest.mark.slow
def test_a_run_whose_record_cannot_be_read_hinders_no_other(root):
    for run in ("run", "other"):
        make_run(root, run, 2)
    key = layout.manifest_key("run", 2, Stage.REWARD, 0)
    text = forged(need(root, "run", 2, Stage.REWARD), facts={"mean": "here"})
    root.replace(key, sealed_again(text.replace(b'"here"', b"NaN")))
    assert {one.run: one.damaged is None for one in summaries(root)} == {"run": False, "other": True}
    assert read_history(root, "other")[-1].iteration == 2
    assert verify(root, "other").sound
    old = need(root, "other", 1, Stage.TRAIN).parts[0].key
    assert catch_up(root, WORKFLOW, "other", Retention(newest=1)).unreadable == ()
    assert not root.exists(old)
    assert collect(root, WORKFLOW, "other", apply=True).unreadable == ()


@pytest.mark.slow
@pytest.mark.parametrize("key", ["run/parts/../../victim", "run/parts/000002/train/../../../../victim"])
def test_retention_removes_nothing_outside_of_the_parts(root, tmp_path, key):
    make_run(root, iterations=3)
    victim = tmp_path / "runs" / "victim"
    victim.write_bytes(b"content")
    before = need(root, "run", 1, Stage.TRAIN)
    forgery = forged(before, parts=(forged_part(before.parts[0], key=key),))
    root.replace(before.key, forgery)
    with contextlib.suppress(SchemaMismatch):
        give_up(root, WORKFLOW, "run", Retention(newest=1), served=2)
    with contextlib.suppress(SchemaMismatch):
        collect(root, WORKFLOW, "run", Retention(newest=1), apply=True)
    assert victim.read_bytes() == b"content"
    assert before.key in {one.key for one in verify(root, "run").findings if one.fault is Problem.DAMAGED}


@pytest.mark.parametrize("change", [{"key": "run/parts/../../victim"}, {"name": "../victim"}], ids=["key", "name"])
def test_a_piece_that_leads_elsewhere_is_refused(root, change):
    writer = PartWriter(root, "run", 1, Stage.ROLLOUT)
    part = writer.write_bytes("groups-00000.arrow", b"content", rows=3)
    key = layout.piece_key("run", 1, Stage.ROLLOUT, 0, "00000")
    root.put_if_absent(key, seal(PieceRecord.model_construct(part=forged_part(part, **change)), key))
    with pytest.raises(SchemaMismatch, match=rf"{key} is not a PieceRecord .*victim"):
        find_piece(writer, "00000")


@pytest.mark.slow
def test_a_copied_record_is_found(root):
    make_run(root)
    copied = layout.manifest_key("run", 3, Stage.EVALUATE, 0)
    root.put_if_absent(copied, root.read_bytes(need(root, "run", 3, Stage.TRAIN).key))
    (finding,) = verify(root, "run").findings
    assert (finding.fault, finding.key) == (Problem.DAMAGED, copied)
    assert "copied or renamed" in finding.detail
