"""A failure before anything was made from it is corrected in place: the run continues, and nothing is redone."""

from pathlib import Path

import pytest

from storage.backends.root import Root, open_root
from storage.errors import InputError, StageFailed
from storage.kill_points import Point
from storage.manifest import find, need
from storage.revisions import read_revisions
from storage.upkeep.verify import verify
from tasks.config.stored import check_record, corrections, documents, forked_config, read_config, record_config
from tasks.stages.names import Stage
from tests.small.config import small_config
from tests.small.driving import RUN, Killed, driver, killing

OWN = "def score(record, response):\n    return {'right': response == record['answer'], 'brief': 1.0}\n"
MISSPELT, CORRECT = "reward.weights.rihgt=0.5", "reward.weights.right=0.5"


@pytest.fixture
def root(tmp_path) -> Root:
    (tmp_path / "own.py").write_text(OWN)
    return open_root(str(tmp_path / "runs"))


def config(tmp_path: Path, *settings: str):
    return small_config([f"reward.function={tmp_path}/own.py:score", "run.iterations=1", *settings])


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 1])
def test_a_misspelt_weight_is_corrected_and_nothing_is_done_again(root, tmp_path, every):
    evaluated = f"evaluate.every={every}"
    failing, right = config(tmp_path, MISSPELT, evaluated), config(tmp_path, CORRECT, evaluated)
    with pytest.raises(StageFailed, match="there is a weight for rihgt"):
        driver(root, failing, tmp_path / "first").drive()
    done = {stage: manifest for stage in Stage if (manifest := find(root, RUN, 0, stage)) is not None}
    first = read_config(root, RUN).first
    assert [line.partition(":")[0] for line in corrections(root, RUN, right)] == [
        "reward.weights.right",
        "reward.weights.rihgt",
    ]
    check_record(root, RUN, right)
    driver(root, right, tmp_path / "second").drive()
    assert need(root, RUN, 1, Stage.REWARD).config_digest == read_config(root, RUN).first != first
    assert read_config(root, RUN).former == (first,)
    assert {stage: find(root, RUN, 0, stage) for stage in done} == done
    assert first in documents(root, RUN, read_revisions(root, RUN))
    assert verify(root, RUN).sound
    ran = driver(root, right, tmp_path / "third")
    ran.drive()
    assert ran.done == []


@pytest.mark.parametrize(("overlong", "corrected"), [("refuse", 1), ("drop", 0)])
def test_limits_by_which_prompts_were_dropped_are_not_corrected(root, tmp_path, overlong, corrected):
    settings = ("evaluate.every=0", f'data.overlong="{overlong}"')
    first = driver(root, config(tmp_path, *settings), tmp_path / "first", at=killing(Stage.TRAIN, 0, Point.STARTED))
    with pytest.raises(Killed):
        first.drive()
    again = config(tmp_path, *settings, "rollout.max_tokens=3")
    assert len(corrections(root, RUN, again)) == corrected
    if not corrected:
        with pytest.raises(InputError, match=r"rollout.max_tokens: the run was started with \d+, but is now given 3"):
            check_record(root, RUN, again)
        with pytest.raises(InputError, match=r"iteration 0 .* has fixed cannot be changed in a fork"):
            forked_config(root, RUN, "fork", ["rollout.max_tokens=3"])


def test_what_was_read_is_not_corrected(root, tmp_path):
    with pytest.raises(StageFailed, match="there is a weight for rihgt"):
        driver(root, config(tmp_path, MISSPELT, "evaluate.every=0"), tmp_path / "first").drive()
    before = read_config(root, RUN)
    for given in ("rollout.samples=4", "run.seed=7", "train.max_length=30"):
        other = config(tmp_path, CORRECT, "evaluate.every=0", given)
        assert corrections(root, RUN, other) == []
        with pytest.raises(InputError, match="was started with different settings"):
            check_record(root, RUN, other)
        with pytest.raises(InputError, match="was started with different settings"):
            record_config(root, RUN, other)
    right = config(tmp_path, CORRECT, "evaluate.every=0")
    with pytest.raises(InputError, match="was started with different settings"):
        record_config(root, RUN, right)  # without the lease
    assert read_config(root, RUN) == before
    driver(root, right, tmp_path / "second").drive()
    for given in (MISSPELT, "reward.weights.right=0.75"):
        with pytest.raises(InputError, match="was started with different settings"):
            check_record(root, RUN, config(tmp_path, given, "evaluate.every=0"))
