"""Ways in which a flow run of `train` over small workers fails, as a person meets, reads and repairs each."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.backends.root import Root
from storage.manifest import find, need
from tasks.stages.names import WORKFLOW, Stage
from tests.small.config import PIECES


@dataclass(frozen=True)
class Kind:
    """A way to fail."""

    breaks: Callable[[Path], object]
    repairs: Callable[[Path], object]
    words: tuple[str, ...]
    """Parts of the message."""
    stage: Stage
    """The stage that fails."""
    settings: tuple[str, ...] = ()

    @property
    def during(self) -> str:
        return f"the storing of {self.stage}" if self.breaks is in_the_way else str(self.stage)


def file(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def gone(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


_GOOD = "def score(record, response):\n    return float(len(response))\n"
_BAD = "def score(record, response):\n    return record['solution']\n"


def in_the_way(folder: Path) -> None:
    place = folder / "runs" / "a" / "parts" / "000001" / "train"
    place.parent.mkdir(parents=True)  # of a run that has begun
    place.write_text("a file where the store needs a folder")


KINDS = {
    "reward": Kind(
        file("my_reward.py", _BAD), file("my_reward.py", _GOOD), ("KeyError", "have no score"),
        Stage.REWARD, ("reward.function=my_reward.py:score", "reward.processes=1", "reward.try=false"),
    ),
    "engine": Kind(
        file("fail-rollout", "WorkerLost|engine 0 died during generate|1"), gone("fail-rollout"),
        ("engine 0 died", "more often than Ratchet replaces it"), Stage.ROLLOUT, ("run.retries=1",),
    ),
    "storage": Kind(
        in_the_way, gone("runs/a/parts/000001/train"), ("Not a directory", "The store refuses"), Stage.TRAIN
    ),
}  # fmt: skip


def check_explained(kind: Kind, state: Any, store: Root) -> dict[Stage, Any]:
    """Check that the message says what a person needs; returns the committed results, all before the failed stage."""
    assert state.is_failed(), state
    for words in (*kind.words, f"{kind.during} of iteration 1", f"kept in {store.folder}/a", "Retry repeats only the"):
        assert words in state.message
    order = [one for one in WORKFLOW.stages_of(1) if one != Stage.EVALUATE]
    made = {stage: need(store, "a", 1, stage) for stage in order if find(store, "a", 1, stage)}
    assert list(made) == order[: order.index(kind.stage)]
    return made


def check_resumed(kind: Kind, state: Any, store: Root, made: dict[Stage, Any], folder: Path) -> None:
    """Check that each committed stage is kept, and that the failed one was resumed."""
    assert state.is_completed(), state
    assert {stage: need(store, "a", 1, stage) for stage in made} == made
    assert need(store, "a", 1, kind.stage).attempt >= 1
    # each piece once: resumed inside the stage; one is sampled again to compare it with the stored one
    answered = PIECES + (kind.stage == Stage.ROLLOUT)
    assert (folder / "calls-rollout").read_text() == "x" * answered
