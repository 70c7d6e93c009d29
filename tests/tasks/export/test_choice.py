"""Which iteration is exported, and into what folder."""

import pytest

from storage.backends.root import open_root
from storage.errors import InputError, StorageError
from storage.manifest import commit
from storage.ownership.lease import hold
from storage.upkeep.retention import Retention, collect
from tasks.export.choice import choose
from tasks.export.target import Target
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


def evaluate(root, scores):
    for iteration, accuracy in scores.items():
        commit(root, manifest(Stage.EVALUATE, iteration, metrics={"accuracy": accuracy}))


def test_the_last_a_given_and_the_best(root):
    evaluate(root, {0: 0.2, 1: 0.9, 2: 0.5, 3: 0.9, 4: None})
    assert choose(root, "run").iteration == 4
    assert choose(root, "run@2").iteration == 2
    assert choose(root, "run@best").iteration == 3


def test_of_equal_ones_the_first(root):
    evaluate(root, {2: 0.5, 3: 0.9, 4: 0.9})
    assert choose(root, "run@best").iteration == 3


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("run@1", r"iteration 1 of run 'run' is not kept: .* those of \[0, 2, 3, 4\] are"),
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
    target = Target.new("memory://exports/one")
    target.begin()
    target.write("model.safetensors", b"whole")
    target.finish(b"{}")
    assert target.names() == ["config.json", "model.safetensors"]
    assert target.digests.keys() == {"config.json", "model.safetensors"}


def test_what_is_not_what_was_written_is_no_model(tmp_path):
    target = Target.new(str(tmp_path / "out"))
    target.begin()
    target.write("model.safetensors", b"whole")
    (tmp_path / "out" / "model.safetensors").write_bytes(b"other")
    with pytest.raises(StorageError, match=r"model\.safetensors is damaged"):
        target.finish(b"{}")
    assert not (tmp_path / "out" / "config.json").exists()
    Target.new(str(tmp_path / "out"))  # still unfinished


def test_a_folder_is_a_model_only_when_it_is_whole(tmp_path):
    target = Target.new(str(tmp_path / "out"))
    target.begin()
    target.write("model-00001-of-00002.safetensors", b"half")
    again = Target.new(str(tmp_path / "out"))  # after a kill
    again.begin()
    again.write("model.safetensors", b"whole")
    assert not (tmp_path / "out" / "config.json").exists()
    again.finish(b"{}")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(InputError, match=r"is not empty: it holds config\.json"):
        Target.new(str(tmp_path / "out"))
