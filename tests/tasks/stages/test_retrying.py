"""A stage is tried again when a process was lost, as often as the run allows, and for no other reason."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.views.progress import Progress
from storage import errors
from storage.backends.root import Root, open_root
from storage.manifest import find, need
from storage.parts import PartWriter, read_table
from storage.schema import ROLLOUT
from tasks.stages import context as retrying
from tasks.stages.names import Stage
from tests.small.config import small_config
from tests.small.driving import RUN, driver
from tests.small.here import WorkersHere
from tests.small.workers import SmallEngine, SmallTrainer


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses before further attempts, none of which is made."""
    made: list[float] = []
    monkeypatch.setattr(retrying, "time", SimpleNamespace(sleep=made.append, monotonic=time.monotonic))
    return made


def drive(folder: Path, failures: int, error: type[errors.RatchetError], retries: int) -> tuple[Root, WorkersHere]:
    """A run whose engine fails that often, and its end."""
    left = [failures]

    class Failing(SmallEngine):
        def generate(self, *given):
            if left[0]:
                left[0] -= 1
                raise error("the engine failed")
            return super().generate(*given)

    config = small_config(["run.iterations=1", "evaluate.every=0", f"run.retries={retries}"])
    workers = WorkersHere(config, Failing)
    root = open_root(str(folder / "root"))
    driver(root, config, folder / "scratch", workers=workers).drive()
    return root, workers


@pytest.mark.slow
@pytest.mark.parametrize(("failures", "retries", "waits"), [(1, 1, [1.0]), (2, 2, [1.0, 10.0]), (0, 0, [])])
def test_a_lost_process_costs_an_attempt(failures, retries, waits, tmp_path: Path, pauses):
    root, workers = drive(tmp_path, failures, errors.WorkerLost, retries)
    assert need(root, RUN, 1, Stage.ROLLOUT).attempt == failures
    assert need(root, RUN, 1, Stage.WEIGHT_SYNC).attempt == 0
    assert pauses == waits
    assert workers.calls.count("train_policy") == 1


@pytest.mark.parametrize("retries", [0, 2])
def test_after_the_last_attempt_the_loss_ends_the_run(retries, tmp_path: Path, pauses):
    with pytest.raises(errors.WorkerLost, match="the engine failed"):
        drive(tmp_path, retries + 1, errors.WorkerLost, retries)
    assert len(pauses) == retries
    assert find(open_root(str(tmp_path / "root")), RUN, 1, Stage.ROLLOUT) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["InputError", "StageFailed", "NumericsError", "SyncMismatch", "StorageUnavailable", "CommitConflict"]
)
def test_what_would_fail_again_is_not_tried_again(kind, tmp_path: Path, pauses):
    error = vars(errors)[kind]
    with pytest.raises(error):
        drive(tmp_path, 1, error, 2)
    assert pauses == []


def drive_storing(folder: Path, failures: int, error: type[Exception], retries: int) -> list[str]:
    """A run in which storing of states fails that often behind the stages; returns the messages to people."""
    left, store = [failures], PartWriter.store_files

    def failing(self: Any, *given: Any) -> Any:
        if self.stage == Stage.TRAIN and self.iteration == 1 and left[0]:
            left[0] -= 1
            raise error("the state could not be stored")
        return store(self, *given)

    config = small_config(["run.iterations=2", "evaluate.every=0", f"run.retries={retries}"])
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartWriter, "store_files", failing)
        patch.setattr(Progress, "say", lambda _, text: told.append(text))
        patch.setattr(retrying, "BACK_OFF_S", (0.0,))
        root = open_root(str(folder / "root"))
        reported: list[Any] = []
        driver(root, config, folder / "scratch", listener=reported.append).drive()
    assert [record.iteration for record in reported] == [0, 1, 2]
    return told


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["WorkerLost", "StorageInterrupted"])
def test_what_could_not_be_stored_behind_the_stages_is_stored_again(kind, tmp_path: Path):
    told = drive_storing(tmp_path, 2, vars(errors)[kind], 2)
    root = open_root(str(tmp_path / "root"))
    assert need(root, RUN, 1, Stage.TRAIN).attempt == 0  # nothing was trained twice
    assert need(root, RUN, 2, Stage.WEIGHT_SYNC)
    assert [line.partition("Attempt ")[2][:6] for line in told if "storing behind" in line] == ["2 of 3", "3 of 3"]


@pytest.mark.parametrize(("kind", "failures"), [("WorkerLost", 2), ("StorageUnavailable", 1)])
def test_what_cannot_be_stored_ends_the_run(kind, failures, tmp_path: Path):
    with pytest.raises(vars(errors)[kind], match="could not be stored"):
        drive_storing(tmp_path, failures, vars(errors)[kind], 1)
    assert find(open_root(str(tmp_path / "root")), RUN, 1, Stage.TRAIN) is None


@pytest.mark.slow
def test_a_stage_that_had_handed_over_its_result_is_not_done_again(tmp_path: Path):
    """The rank is lost when it is told which state it holds: by then the state is being stored."""
    lost = [True]

    class Dying(SmallTrainer):
        def adopt(self, identity):
            if self._lessons and lost[0]:
                lost[0] = False
                raise errors.WorkerLost("rank 0 died during adopt")
            super().adopt(identity)

    config = small_config(["run.iterations=1", "run.retries=1", "train.parallel.pipeline=1"])
    workers = WorkersHere(config, trainer=Dying)
    root = open_root(str(tmp_path / "root"))
    driver(root, config, tmp_path / "scratch", workers=workers).drive()
    assert not lost[0]
    assert workers.calls.count("train_policy") == 1
    assert need(root, RUN, 1, Stage.TRAIN).attempt == 0
    assert retrying.BACK_OFF_S[0] < retrying.BACK_OFF_S[-1]


@pytest.mark.slow
def test_while_another_engine_is_left_a_lost_one_costs_no_attempt(tmp_path: Path, pauses):
    """The run gives the same samples as one whose engines live."""
    config = small_config(["run.iterations=1", "engine.count=2", "rollout.groups_per_part=1"])

    class Dying(SmallEngine):
        made = 0

        def __init__(self, model_dir: str) -> None:
            super().__init__(model_dir)
            self._dies, Dying.made = Dying.made == 0, Dying.made + 1

        def generate(self, *given):
            if self._dies:
                raise errors.WorkerLost("engine 0 died during collect")
            return super().generate(*given)

    rows = []
    for engine in (Dying, SmallEngine):
        root = open_root(str(tmp_path / engine.__name__ / "root"))
        workers = WorkersHere(config, engine)
        driver(root, config, tmp_path / engine.__name__ / "scratch", workers=workers).drive()
        rollout = need(root, RUN, 1, Stage.ROLLOUT)
        assert rollout.attempt == 0
        rows.append(read_table(root, rollout, ROLLOUT))
    assert Dying.made == 2
    assert rows[0].equals(rows[1])
    assert pauses == []
