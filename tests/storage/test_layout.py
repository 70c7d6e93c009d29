"""Names and keys: every accepted one stays below its folder, and all those that the code writes are accepted."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import layout
from storage.digest import bytes_digest
from storage.errors import InputError
from storage.ids import check_run_name
from tasks.stages.names import Stage

DIGEST = bytes_digest(b"content")
SEGMENTS = st.one_of(st.sampled_from(["", ".", "..", "state", "~", ".tmp-1", "a.b", "C:"]), st.text(max_size=8))
NAMES = st.one_of(st.text(), st.lists(SEGMENTS, max_size=5).map("/".join))


@pytest.mark.slow
@given(NAMES)
def test_an_accepted_name_stays_below_its_folder(name):
    if layout.name_flaw(name) is None:
        assert os.path.normpath(f"/folder/{name}") == f"/folder/{name}"
        assert os.path.join("/folder", name) == f"/folder/{name}"


@pytest.mark.slow
@given(NAMES, st.sampled_from(Stage), st.integers(0, 10**7))
def test_the_key_of_an_accepted_name_is_accepted(name, stage, iteration):
    key = layout.part_key("run", iteration, stage, name, DIGEST)
    assert layout.key_flaw(key, DIGEST) is None or layout.name_flaw(name) is not None


@given(st.one_of(NAMES, NAMES.map(lambda name: layout.part_key("run", 1, Stage.TRAIN, name, DIGEST))))
def test_an_accepted_key_is_below_the_parts_of_a_run(key):
    if layout.key_flaw(key, DIGEST) is None:
        run, folder, *_ = key.split("/")
        assert (check_run_name(run), folder) == (run, "parts")
        assert os.path.normpath(f"/root/{key}") == f"/root/{key}"


@given(st.text())
def test_runs_in_keys_are_those_that_can_be_started(run):
    accepted = layout.key_flaw(layout.part_key(run, 1, Stage.TRAIN, "x", DIGEST), DIGEST) is None
    try:
        check_run_name(run)
    except InputError:
        assert not accepted
    else:
        assert accepted


@pytest.mark.parametrize(
    "name",
    [
        "groups-00000.arrow", "rewards.arrow", "answers.arrow", "train.arrow", "held_out.arrow", "state/.metadata",
        "state/__0_0.distcp", "state/optimizer.__0_1.distcp", "state/metadata.json", "state/trainer.json",
        "state/common.pt", "model/config.json", "model/model-00001-of-00002.safetensors",
        "model/model.safetensors.index.json", "part", "model/my model (1).safetensors",
    ],
)  # fmt: skip
def test_names_that_are_written_are_accepted(name):
    plain = name.rpartition("/")[2]
    assert layout.name_flaw(name) is None
    assert layout.key_flaw(layout.part_key("run", 0, Stage.TRAIN, plain, DIGEST), DIGEST) is None


def test_the_keys_of_stored_parts_are_for_ever():
    given = {"groups-00000.arrow": "groups-00000-D.arrow", ".metadata": "-D.metadata", "part": "part-D"}
    given |= {"optimizer.__0_1.distcp": "optimizer.__0_1-D.distcp", "state/0.distcp": "state/0-D.distcp"}
    for name, last in given.items():
        key = layout.part_key("run", 12, Stage.WEIGHT_SYNC, name, DIGEST)
        assert key == f"run/parts/000012/weight-sync/{last.replace('D', DIGEST[:16])}"
