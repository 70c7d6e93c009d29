"""Revisions of stages."""

import pytest

from storage import layout
from storage.backends.root import Root
from storage.errors import DigestMismatch, InputError, WrongRecord
from storage.manifest import find
from storage.revisions import FIRST, Revisions, read_revisions, record_choice, record_rerun
from tasks.stages.names import LOOP, Stage
from tests.storage.revised import choice, rerun

ROLLOUT, REWARD, TRAIN, SYNC, EVALUATE = LOOP[1:]


def of(revisions: Revisions, *places: tuple[int, Stage]) -> list[int]:
    return [revisions.of(*place) for place in places]


def test_without_reruns_all_is_revision_0():
    assert of(FIRST, (0, Stage.PREPARE), (7, TRAIN)) == [0, 0]
    assert (FIRST.head, [*FIRST.numbers], FIRST.pending) == (0, [0], None)


def test_a_rerun_takes_what_is_made_from_it_along_and_nothing_else():
    revisions = Revisions((rerun(2, REWARD, 1),), (choice(1),))
    assert of(revisions, (2, REWARD), (2, TRAIN), (2, SYNC), (2, EVALUATE), (3, ROLLOUT), (9, EVALUATE)) == [1] * 6
    assert of(revisions, (0, TRAIN), (1, SYNC), (1, EVALUATE), (2, ROLLOUT)) == [0] * 4
    assert of(revisions.seen(0), (2, REWARD), (3, ROLLOUT)) == [0, 0]


def test_nothing_follows_an_evaluation():
    revisions = Revisions((rerun(2, EVALUATE, 1),), (choice(1),))
    assert of(revisions, (2, EVALUATE), (2, SYNC), (3, ROLLOUT), (3, EVALUATE)) == [1, 0, 0, 0]


def test_reruns_of_reruns_keep_what_lies_before_them():
    reruns = (rerun(2, REWARD, 1), rerun(4, TRAIN, 2, parent=1), rerun(3, EVALUATE, 3, parent=2))
    revisions = Revisions(reruns, (choice(1), choice(2), choice(3)))
    assert of(revisions, (1, SYNC), (2, TRAIN), (3, SYNC), (4, REWARD)) == [0, 1, 1, 1]
    assert of(revisions, (4, TRAIN), (5, ROLLOUT), (3, EVALUATE)) == [2, 2, 3]
    assert of(revisions.seen(2), (3, EVALUATE), (5, ROLLOUT)) == [1, 2]


def test_behind_a_result_that_was_there_before_its_own_end_follows():
    # revision 2 gets the digest of revision 0 again
    reruns = (rerun(2, REWARD, 1), rerun(2, REWARD, 2, parent=1))
    revisions = Revisions(reruns, (choice(1), choice(2, goes_on=0)))
    assert of(revisions, (2, REWARD), (2, TRAIN), (3, ROLLOUT), (2, ROLLOUT)) == [2, 0, 0, 0]


def test_the_last_choice_is_the_head(root: Root):
    for number in (1, 2):
        assert record_rerun(root, "run", rerun(number, TRAIN, number))
    for number, revision in enumerate([2, 1, 0, 1], 1):
        assert record_choice(root, "run", choice(revision), number)
        assert read_revisions(root, "run").head == revision
    assert not record_choice(root, "run", choice(2), 4)
    assert not record_rerun(root, "run", rerun(3, TRAIN, 2))
    assert read_revisions(root, "run").head == 1


def test_a_revision_that_is_not_there_is_refused():
    with pytest.raises(InputError, match=r"there is no revision 1, only \[0\]"):
        FIRST.seen(1)


def test_a_damaged_record_is_not_passed_over(root: Root):
    record_rerun(root, "run", rerun(1, TRAIN, 1))
    record_choice(root, "run", choice(1), 1)
    root.replace(layout.choice_key("run", 1), b"{}")
    with pytest.raises(DigestMismatch, match="head-000001"):
        find(root, "run", 1, TRAIN)


def test_a_record_that_is_gone_is_noticed(root: Root):
    record_rerun(root, "run", rerun(1, TRAIN, 1))
    record_choice(root, "run", choice(1), 1)
    root.remove(layout.rerun_key("run", 1))
    with pytest.raises(WrongRecord, match=r"lacks records: run/revisions/rerun-000001.json"):
        read_revisions(root, "run")


def test_settings_add_up_along_the_parents():
    reruns = (
        rerun(2, TRAIN, 1, settings={"train.a": 1, "train.b": 1}),
        rerun(3, TRAIN, 2, parent=1, settings={"train.b": 2}),
        rerun(3, TRAIN, 3, settings={"train.c": 3}),
        rerun(2, REWARD, 4, parent=3, settings={"train.d": 4}),  # a continuation of revision 1 has its settings
    )
    revisions = Revisions(reruns, (choice(4, goes_on=1),))
    assert [revisions.seen(number).settings() for number in revisions.numbers] == [
        {},
        {"train.a": 1, "train.b": 1},
        {"train.a": 1, "train.b": 2},
        {"train.c": 3},
        {"train.a": 1, "train.b": 1},
    ]
