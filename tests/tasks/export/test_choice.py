"""Choice of the iteration to export, and of the folder."""

import pytest

from storage.backends.root import open_root
from storage.errors import InputError, StorageError
from storage.manifest import commit
from storage.ownership.lease import hold
from storage.upkeep.retention import Retention, collect
from tasks.export.order import ExportFolder, choose
from tasks.stages.names import WORKFLOW, Stage
from tests.storage.runs import make_run
from tests.storage.tables import manifest


@pytest.fixture
def root(tmp_path):
    """A run of four iterations: 1 and 3 are equally good, the state of 1 is not kept."""
    store = open_root(str(tmp_path / "runs"))
    make_run(store, "run", 4)
    with hold(store, "run", "test") as fence:
        collect(store, WORKFLOW, "run", Retention(newest=3), apply=True, fence=fence)
    return store


RIGHT = {"scored_by": "one", "asked": {"prompts": 8, "max_tokens": 4}, "pass": "right >= 1"}


def evaluate(root, scores, metric="pass_rate", **facts):
    for iteration, score in scores.items():
        given = {name: fact for name, fact in {**RIGHT, **facts}.items() if fact is not None}
        commit(root, manifest(Stage.EVALUATE, iteration, metrics={metric: score}, facts=given))


def test_the_last_a_given_and_the_best(root):
    evaluate(root, {0: 0.2, 1: 0.9, 2: 0.5, 3: 0.9, 4: None})
    assert choose(root, "run").iteration == 4
    assert choose(root, "run@2").iteration == 2
    best = choose(root, "run@best")
    assert best.iteration == 3
    assert best.why.startswith("the best of [0, 2, 3] by held-out pass rate (right >= 1): 0.9")


@pytest.mark.slow
def test_of_equal_ones_the_first(root):
    evaluate(root, {2: 0.5, 3: 0.9, 4: 0.9})
    assert choose(root, "run@best").iteration == 3


@pytest.mark.parametrize(("measure", "metric"), [("reward", "reward_mean"), ("format", "reward/format")])
def test_the_best_by_another_measure_is_asked_for_by_name(root, measure, metric):
    """A mean reward is not taken for a pass rate, though it is stored."""
    evaluate(root, {2: 0.7, 3: 0.5, 4: 0.6}, metric, **{"pass": None})
    with pytest.raises(InputError, match=r"run 'run' has no pass rate, .* name another measure, as run@best\.reward"):
        choose(root, "run@best")
    best = choose(root, f"run@best.{measure}")
    assert best.iteration == 2
    assert best.why == f"the best of [2, 3, 4] by held-out {metric}: 0.7"
    with pytest.raises(InputError, match="has no other"):
        choose(root, "run@best.other")


@pytest.mark.slow
@pytest.mark.parametrize(
    "other", [{"scored_by": "another"}, {"asked": {"prompts": 9, "max_tokens": 4}}, {"pass": "right >= 0.5"}]
)
def test_values_that_cannot_be_compared_are_left_out(root, other):
    """Only evaluations like the newest are candidates, however high the others are."""
    evaluate(root, {0: 0.9, 2: 0.8}, **other)
    evaluate(root, {3: 0.4, 4: 0.3})
    best = choose(root, "run@best")
    assert best.iteration == 3
    assert best.why.endswith("[0, 2] are judged by another reward function or condition, and not compared")


def test_a_reward_that_was_only_once_0_or_1_has_no_best(root):
    evaluate(root, {2: 0.4}, "reward_mean", **{"pass": None})
    evaluate(root, {3: 0.5, 4: 0.6}, **{"pass": "reward == 1"})
    with pytest.raises(InputError, match="it is not known which answers pass"):
        choose(root, "run@best")


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("run@1", r"iteration 1 of run 'run' is not kept .*those of \[0, 2, 3, 4\] are"),
        ("run@9", "iteration 9 of run 'run' is not there"),
        ("run@newest", "not of the form RUN, RUN@ITERATION or RUN@best"),
        ("run@best", "no evaluation of an iteration whose state is kept"),
        ("other", "there is no run 'other'"),
    ],
)
def test_what_cannot_be_exported(root, which, words):
    with pytest.raises(InputError, match=words):
        choose(root, which)


def test_a_target_may_be_a_url():
    target = ExportFolder.new("memory://exports/one")
    target.begin()
    target.write("model.safetensors", b"whole")
    target.finish(b"{}")
    assert target.names() == ["config.json", "model.safetensors"]
    assert target.digests.keys() == {"config.json", "model.safetensors"}


def test_what_is_not_what_was_written_is_no_model(tmp_path):
    target = ExportFolder.new(str(tmp_path / "out"))
    target.begin()
    target.write("model.safetensors", b"whole")
    (tmp_path / "out" / "model.safetensors").write_bytes(b"other")
    with pytest.raises(StorageError, match=r"model\.safetensors is damaged"):
        target.finish(b"{}")
    assert not (tmp_path / "out" / "config.json").exists()
    ExportFolder.new(str(tmp_path / "out"))  # still unfinished


def test_a_folder_is_a_model_only_when_it_is_whole(tmp_path):
    target = ExportFolder.new(str(tmp_path / "out"))
    target.begin()
    target.write("model-00001-of-00002.safetensors", b"half")
    again = ExportFolder.new(str(tmp_path / "out"))  # after a kill
    again.begin()
    again.write("model.safetensors", b"whole")
    assert not (tmp_path / "out" / "config.json").exists()
    again.finish(b"{}")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(InputError, match=r"is not empty: it holds config\.json"):
        ExportFolder.new(str(tmp_path / "out"))
