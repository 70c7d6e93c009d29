"""Hand-made manifests of a run whose figures are known."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from storage.manifest import Manifest
from tasks.stages.names import WORKFLOW, Stage

MINIMAL = """
[run]
iterations = 4
[model.generate]
[data.generate]
[train]
max_length = 128
[train.optimizer]
learning_rate = 1e-3
"""

START = datetime(2026, 11, 20, 12, tzinfo=UTC)
METRICS = {
    Stage.ROLLOUT: {"tokens_per_second": 1000.0, "tokens": 640.0},
    Stage.REWARD: {"reward_mean": 0.25},
    Stage.TRAIN: {"kl": 1e-3, "entropy": 0.9, "grad_norm": 1.5, "loss": 0.1},
    Stage.EVALUATE: {"reward_mean": 0.5},
}

MakeRun = Callable[..., None]


def make_manifest(run: str, iteration: int, stage: Stage, writer: str = "host:1", config_digest: str = "") -> Manifest:
    # iteration n takes 10 s, a second for each stage from its beginning
    index = WORKFLOW.stages_of(iteration).index(stage)
    started = START + timedelta(seconds=10 * iteration + index)
    figures = {name: value * (1 + iteration) for name, value in METRICS.get(stage, {}).items()}
    return Manifest(
        run=run,
        iteration=iteration,
        stage=stage,
        config_digest=config_digest,
        code_version="test",
        metrics={**figures, "seconds": 1.0},
        writer=writer,
        started=started,
        finished=started + timedelta(seconds=1),
    )
