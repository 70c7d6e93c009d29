"""Shapes of models and samples of the trainer's bench. Imports no torch."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tasks.config.model import GeneratedModel
from trainer_core.batches.sequences import Samples
from trainer_core.config import Frozen, Precision

CaseName = Literal["tiny", "0.75b", "4b"]
LayoutName = Literal["shared", "own", "ahead"]
LAYOUTS: tuple[LayoutName, ...] = ("shared", "own", "ahead")
"""Layouts of the loop's bench."""
Speaker = Literal["client", "environment"]
"""Side that asks in conversations."""
SideName = Literal["undisturbed", "everything", "apart", "standby"]
SIDES: tuple[SideName, ...] = ("undisturbed", "everything", "apart", "standby")
"""Runs of the bench of failures."""
KillName = Literal["rank", "engine"]
"""Victims of that bench."""
SyncCaseName = Literal[
    "cpu",
    "cpu-tied",
    "cpu-experts",
    "0.75b",
    "0.75b-pp2",
    "0.75b-own",
    "experts",
    "4b",
    "4b-pp2",
    "4b-pp2-tp2",
    "4b-own",
    "moonlight",
]

_GROUP = 8  # samples of a prompt


class Case(Frozen):
    """A model with random weights and the samples of one iteration."""

    model: GeneratedModel
    """Shape of the model."""
    precision: Precision
    """Type of weights and activations."""
    samples: int
    """Samples of an iteration."""
    prompt: int
    """Tokens of each prompt."""
    response: int
    """Most tokens of a response."""
    rows: int
    """Samples in a micro-batch of samples that all have the most tokens."""

    @property
    def length(self) -> int:
        """Most tokens of a sample."""
        return self.prompt + self.response


CASES: dict[CaseName, Case] = {
    "tiny": Case(
        model=GeneratedModel(layers=2, hidden=128, intermediate=256, vocabulary=512, max_positions=128),
        precision="fp32",
        samples=64,
        prompt=8,
        response=56,
        rows=8,
    ),
    "0.75b": Case(
        model=GeneratedModel(
            layers=28, hidden=1024, intermediate=3072, heads=16, kv_heads=8, head_dim=128, vocabulary=151_936,
            max_positions=2048,
        ),
        precision="bf16",
        samples=128,
        prompt=48,
        response=1024,
        rows=4,
    ),
    "4b": Case(
        model=GeneratedModel(
            layers=36, hidden=2560, intermediate=9728, heads=32, kv_heads=8, head_dim=128, vocabulary=151_936,
            max_positions=2048, tied_embeddings=True,
        ),
        precision="bf16",
        samples=56,
        prompt=48,
        response=1024,
        rows=4,
    ),
}  # fmt: skip


def draw_samples(case: Case, mixed: bool, seed: int = 0) -> Samples:
    """Random samples with random rewards: all of the most tokens, or lengths as responses of a model have them.

    Mixed lengths are log-normal: a median of a quarter of the longest, and some that are cut off there.
    """
    generator = np.random.default_rng(seed)
    count = case.samples
    responses = np.full(count, case.response)
    if mixed:
        drawn = generator.lognormal(np.log(case.response / 4), 0.8, count)
        responses = np.clip(drawn.astype(np.int64), 1, case.response)
    prompts = np.full(count, case.prompt)
    tokens = int((prompts + responses).sum())
    return Samples(
        tokens=generator.integers(3, case.model.vocabulary, tokens, dtype=np.int32),
        prompt_lengths=prompts,
        response_lengths=responses,
        engine_logprobs=np.zeros(int(responses.sum()), dtype=np.float32),
        rewards=generator.random(count).astype(np.float32),
        groups=(np.arange(count) // _GROUP).astype(np.int32),
        usable=np.ones(count, dtype=bool),
    )


def floating_point_operations(case: Case, positions: NDArray[np.int64], predicted: int) -> float:
    """Count the operations of a forward and a backward pass over sequences of `positions`, (S,).

    6 for each weight and position, and in each layer 6 H L^2 for the causal attention of H columns over L positions.
    The output layer counts for the `predicted` positions alone, the embedding not at all (PaLM, arXiv 2204.02311,
    appendix B, with half of its attention, because it is causal).
    """
    shape = case.model
    width = shape.heads * shape.head_dim
    attention = shape.hidden * (2 * width + 2 * shape.kv_heads * shape.head_dim)
    weights = shape.layers * (attention + 3 * shape.hidden * shape.intermediate)
    pairs = float((positions.astype(np.float64) ** 2).sum())
    output = shape.hidden * shape.vocabulary
    return 6.0 * (weights * int(positions.sum()) + output * predicted) + 6.0 * shape.layers * width * pairs
