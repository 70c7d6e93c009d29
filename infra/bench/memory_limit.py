"""The rate at which a card's memory could feed a rollout, and that memory's bandwidth.

    python -m infra.bench.memory_limit

prints the bandwidth of the first card in bytes a second, as it copies.
"""

import subprocess
import sys

import numpy as np
from numpy.typing import NDArray

from storage.errors import WorkerLost
from tasks.config.environment import Settings, child_python_path, engine_environment
from tasks.config.model import GeneratedModel
from trainer_core.config import Precision

_WIDTH: dict[Precision, int] = {"fp32": 4, "bf16": 2}
_BYTES, _COPIES = 2 << 30, 20


def bandwidth(settings: Settings) -> float:
    """Bytes a second of the last card, measured in a process of its own, which then gives its memory back.

    Raises:
        WorkerLost: it failed.
    """
    environment = {**child_python_path(), **engine_environment("cuda", settings.gpus[-1:], local=True)}
    done = subprocess.run(
        [sys.executable, "-m", "infra.bench.memory_limit"], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise WorkerLost(f"the bandwidth of the card's memory could not be measured: {done.stderr[-500:]}")
    return float(done.stdout)


def bytes_read(model: GeneratedModel, precision: Precision, prompt: int, lengths: NDArray[np.int64]) -> float:
    """Bytes of weights and of keys and values that the steps of responses of these lengths, all sampled together,
    cannot but read.
    """
    heads, hidden = model.head_dim * (2 * model.heads + 2 * model.kv_heads), model.hidden
    weights = model.layers * hidden * (heads + 3 * model.intermediate) + model.vocabulary * hidden
    cached = 2 * model.layers * model.kv_heads * model.head_dim  # numbers of one token
    tokens = (lengths * prompt + lengths * (lengths - 1) // 2).sum()
    return _WIDTH[precision] * (float(lengths.max()) * weights + float(tokens) * cached)


def main() -> None:
    """Print the bandwidth."""
    import torch

    source, target = (torch.empty(_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    begin.record()
    for _ in range(_COPIES):
        target.copy_(source)
    end.record()
    end.synchronize()
    sys.stdout.write(f"{2 * _BYTES * _COPIES / begin.elapsed_time(end) * 1e3}\n")


if __name__ == "__main__":
    main()
