"""Both sides of the bench of the trainer: one model, one optimizer, two ways to take a step."""

from pathlib import Path

import psutil
import torch

from infra.bench.plain_loop import PaddedBatch, padded_batches, plain_step
from trainer_core.batches.micro_batching import BatchLimits
from trainer_core.batches.sequences import Samples
from trainer_core.config import FP8_POSITIONS, RankSpec, TrainerConfig
from trainer_core.model import rng
from trainer_core.model.mesh import join, leave
from trainer_core.model.model import build_model
from trainer_core.model.optimizer import Optimizer
from trainer_core.model.passes import Passes
from trainer_core.model.replay import Graphs, Recorders
from trainer_core.phases.policy import PolicyPhase
from trainer_core.platform.platform import Platform, quietly
from trainer_core.state.checkpoint import Saver
from trainer_core.state.facts import StateFacts


class Sides:
    """The model of `model_dir` with its optimizer, on one rank."""

    def __init__(self, model_dir: str, config: TrainerConfig, rank: RankSpec, platform: Platform) -> None:
        mesh = join(rank, config.parallel, platform)
        self._config = config
        rng.seed_rank(config.seed)
        self._model = build_model(model_dir, config, platform, deterministic=False)
        self._saver = Saver(self._model, mesh)
        with self._model.weights("writable"), quietly():
            self._model.bridge.load_hf_weights(list(self._model.chunks))  # pyright: ignore[reportArgumentType]
        self._optimizer = Optimizer(self._model, config.optimizer)
        limits = BatchLimits(config.micro_batch_tokens, config.micro_batch_size)
        passes = Passes(self._model, mesh, limits, Recorders(Graphs(), Graphs()) if self._model.graphs else None)
        self._phase = PolicyPhase(passes, self._optimizer, config.policy, 1.0, (0,))
        self.device = platform.device
        self.transformer_engine = platform.transformer_engine
        self.name = torch.cuda.get_device_name() if platform.device.type == "cuda" else "cpu"

    def ours(self, samples: Samples) -> dict[str, float]:
        """One iteration's training, as `Trainer.train_policy` does it."""
        return self._phase.run(samples, None).report

    def padded(self, samples: Samples, rows: int) -> list[PaddedBatch]:
        """The same samples for the plain side, on the device beforehand."""
        return padded_batches(samples, rows, self.device, FP8_POSITIONS if self._config.fp8 else 1)

    def plain(self, batches: list[PaddedBatch]) -> float:
        """One plain update."""
        return plain_step(self._model, self._optimizer, batches)

    def save(self, directory: Path) -> None:
        """Save the state as `Trainer.save` does."""
        facts = StateFacts(
            step=self._optimizer.updates,
            optimizer_updates=self._optimizer.updates,
            optimizer=self._optimizer.config,
            parallel=self._config.parallel,
            precision=self._config.precision,
            transformer_engine=self.transformer_engine,
        )
        with self._model.weights("readable"):
            self._saver.save(directory, self._optimizer, facts)

    def held_bytes(self) -> int:
        """Memory in use now: of the device, or of the process on CPU."""
        if self.device.type == "cpu":
            return psutil.Process().memory_info().rss
        return torch.cuda.memory_reserved()

    def settle(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def peak_bytes(self) -> int:
        """Most device memory since the last call; 0 on CPU."""
        if self.device.type == "cpu":
            return 0
        most = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return most

    def close(self) -> None:
        """Leave the process groups."""
        leave()
