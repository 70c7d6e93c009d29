"""The critic of a small trainer: an array that begins with the weights or a folder, and changes with each lesson."""

from pathlib import Path

import numpy as np

from storage.digest import bytes_digest, value_digest
from trainer_core.config import TrainerConfig
from trainer_core.state.facts import CRITIC, FACTS_FILE, check_critic


class SmallCritic:
    """One rank's copy; each rank writes its share. Without a critic in the configuration it holds nothing."""

    def __init__(self, config: TrainerConfig, rank: int) -> None:
        self._rank, self._ranks, self._used = rank, config.parallel.world_size, config.critic is not None
        self._source = None if config.critic is None else config.critic.source
        self._begins = config.policy.loss.trains_critic  # with the weights of any state
        self._values = np.zeros(0, np.float32)

    @property
    def digest(self) -> str | None:
        """Identity of what it holds; None if it holds nothing."""
        return bytes_digest(self._values.tobytes()) if self._used else None

    def begin(self, weights: np.ndarray) -> None:
        """Take the weights, or as many numbers that those of its source decide."""
        self._values = weights * self._used
        if self._source is not None:
            seed = int(bytes_digest(Path(self._source, "model.safetensors").read_bytes()), 16)
            self._values = np.random.default_rng(seed).random(len(weights), np.float32)

    def learn(self, lesson: str) -> None:
        """Change with all that is held and all that is given."""
        seed = int(value_digest([lesson, self.digest]), 16)
        self._values = 0.5 * self._values + np.random.default_rng(seed).random(len(self._values), np.float32)

    def save(self, folder: Path) -> tuple[str, ...]:
        """Write this rank's share over the last one; returns the names of its files."""
        if not self._used:
            return ()
        files = {f"{CRITIC}/weights-{self._rank}.bin": np.array_split(self._values, self._ranks)[self._rank].tobytes()}
        if self._rank == 0:
            files[f"{CRITIC}/{FACTS_FILE}"] = b"{}"
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_bytes(content)
        return tuple(files)

    def load(self, folder: Path, ranks: int, weights: np.ndarray) -> str | None:
        """Take what `ranks` have saved, or else the weights; the identity of what they have saved."""
        if not check_critic(folder, self._used, self._begins):
            self.begin(weights)
            return None
        files = [folder / CRITIC / f"weights-{rank}.bin" for rank in range(ranks if self._used else 0)]
        self._values = np.frombuffer(b"".join(file.read_bytes() for file in files), np.float32)
        return self.digest
