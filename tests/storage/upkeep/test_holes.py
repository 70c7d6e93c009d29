"""Holes are found by names: nothing is read of a whole past, and nothing that is right is called one."""

import shutil

import pytest

from storage import layout
from storage.backends.root import Root, open_root
from storage.errors import WrongRecord
from storage.manifest import Manifest, commit, need
from storage.unfinished import begin
from storage.upkeep.catalog import names
from storage.upkeep.holes import check_whole, hole
from tasks.stages.names import WORKFLOW, Stage
from tests.storage.counting import counting
from tests.storage.runs import make_run

RUN, LAST = "run", 8


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> str:
    """The root of a whole run; only copies of it are changed."""
    root = open_root(str(tmp_path_factory.mktemp("made") / "runs"))
    make_run(root, RUN, LAST)
    return root.folder


@pytest.fixture
def whole(root: Root, made: str) -> Root:
    shutil.copytree(made, root.folder)
    return root


def found(root: Root) -> tuple[int, str] | None:
    return hole(root, WORKFLOW, RUN, names(root, RUN))


def unscored(root: Root, iterations: range) -> None:
    """Make iterations as if their training needs no rewards."""
    for at in iterations:
        one = need(root, RUN, at, Stage.TRAIN)
        inputs = {role: digest for role, digest in one.inputs.items() if role != "reward"}
        root.remove(one.key)
        commit(root, Manifest.model_validate({**one.model_dump(), "inputs": inputs}))
        root.remove(layout.manifest_key(RUN, at, Stage.REWARD, 0))


def test_a_whole_past_is_not_read(whole: Root):
    counted, recorded = counting(whole), names(whole, RUN)
    assert hole(counted, WORKFLOW, RUN, recorded) is None
    assert not counted.asked
    unscored(whole, range(1, LAST + 1))
    recorded = names(whole, RUN)
    assert hole(counted, WORKFLOW, RUN, recorded) is None
    assert {*counted.asked} == {f"read {layout.manifest_key(RUN, at, Stage.TRAIN, 0)}" for at in (1, LAST)}


@pytest.mark.parametrize("lost", [1, 5, LAST])
@pytest.mark.parametrize("without", [range(0), range(2, 5)], ids=str)
def test_lost_scores_are_told_from_those_that_were_not_needed(whole: Root, without: range, lost: int):
    """As in a fork with another objective: some of its iterations have no rewards."""
    unscored(whole, without)
    assert found(whole) is None
    whole.remove(layout.manifest_key(RUN, lost, Stage.REWARD, 0))
    assert (found(whole) or ())[:1] == (lost,)
    with pytest.raises(WrongRecord, match=rf"reward\.r0\.json is lost: .* made from reward of iteration {lost}\."):
        check_whole(whole, WORKFLOW, RUN, names(whole, RUN))
    check_whole(whole, WORKFLOW, RUN, names(whole, RUN), last=lost - 1)


def test_scores_that_are_lost_within_a_stretch_without_any_are_found_where_they_were_begun(whole: Root):
    unscored(whole, range(1, 4))
    unscored(whole, range(5, LAST + 1))
    whole.remove(layout.manifest_key(RUN, 4, Stage.REWARD, 0))
    for at in (2, 4):  # that of 2 was begun under an objective that needs rewards, and done under another
        begin(whole, RUN, at, Stage.REWARD, "tests")
    assert (found(whole) or ())[:1] == (4,)


def test_what_another_process_commits_meanwhile_is_not_lost(whole: Root):
    key = layout.manifest_key(RUN, 2, Stage.WEIGHT_SYNC, 0)
    before = names(whole, RUN).only(lambda one: one != key)  # as a listing shows it that saw the folder of 2 first
    assert hole(whole, WORKFLOW, RUN, before) is None
    whole.remove(key)
    assert (hole(whole, WORKFLOW, RUN, before) or ())[:1] == (2,)
