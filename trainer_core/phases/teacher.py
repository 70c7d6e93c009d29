"""A frozen model of its own that scores the samples of the policy, for distillation."""

import numpy as np

from trainer_core.batches.micro_batching import BatchLimits
from trainer_core.batches.sequences import Samples, TeacherScores
from trainer_core.config import MemoryConfig, TrainerConfig
from trainer_core.model import rng
from trainer_core.model.mesh import Mesh
from trainer_core.model.model import build_model, read_weights
from trainer_core.model.passes import Passes
from trainer_core.platform.platform import Platform


class Teacher:
    """The teacher over the ranks of the policy. It is on the device while it scores, else in host memory."""

    def __init__(
        self,
        directory: str,
        config: TrainerConfig,
        mesh: Mesh,
        platform: Platform,
        deterministic: bool,
        vocab_size: int,
    ) -> None:
        """Build the model of a Hugging Face directory and read its weights. Collective; raises as `build_model`. The
        policy has the first `vocab_size` tokens of its vocabulary."""
        with rng.undisturbed():
            self._model = build_model(directory, config.of_teacher, platform, deterministic, "frozen")
            read_weights(self._model)
        limits = BatchLimits(config.micro_batch_tokens, config.micro_batch_size)
        top_k = 0 if config.policy.distill is None else config.policy.distill.top_k
        self._passes = Passes(self._model, mesh, limits, top_k=top_k, among=vocab_size)

    def scores(self, samples: Samples, temperature: float) -> TeacherScores:
        """Scores of all response tokens of samples that are usable."""
        with rng.undisturbed():
            found = self._passes.score(samples, np.flatnonzero(samples.usable), temperature)
        self._model.release(MemoryConfig(offload_parameters=True))
        return TeacherScores(found.logprobs, found.top)
