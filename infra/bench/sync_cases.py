"""Cases of the sync bench, and the record of a round. Imports no torch."""

from dataclasses import dataclass

from infra.bench.cases import CASES, SyncCaseName
from infra.bench.latent import LatentModel
from tasks.config.model import GeneratedModel
from tasks.config.run import EngineCards
from tasks.stages.transaction import Delivery
from trainer_core.config import Frozen, ParallelConfig, Precision


class SyncCase(Frozen):
    """A model, the layout of its trainer, and its engine."""

    model: GeneratedModel | LatentModel
    """Shape of the model."""
    precision: Precision
    """Type of the weights in trainer and engine."""
    pipeline: int = 1
    """Stages of the trainer's pipeline, a rank each."""
    layers_first_stage: int | None = None
    """Layers of the first stage, if stages cannot have equally many."""
    tensor: int = 1
    """Workers of the engine."""
    cards: EngineCards = "shared"
    """Value of `engine.cards`."""

    @property
    def parallel(self) -> ParallelConfig:
        """The trainer's layout."""
        return ParallelConfig(pipeline=self.pipeline, layers_first_stage=self.layers_first_stage)


_BIG = SyncCase(model=CASES["0.75b"].model, precision="bf16")
_BIGGER = SyncCase(model=CASES["4b"].model, precision="bf16")

SYNC_CASES: dict[SyncCaseName, SyncCase] = {
    "cpu": SyncCase(
        model=GeneratedModel(layers=4, hidden=256, intermediate=512, vocabulary=512, max_positions=128),
        precision="fp32",
        pipeline=2,
    ),
    "cpu-experts": SyncCase(
        model=LatentModel(
            layers=4, hidden=128, intermediate=256, expert=64, experts=16, chosen=2, heads=4, query_rank=48,
            value_rank=32, plain=24, rotary=8, value=32, vocabulary=512,
        ),
        precision="fp32",
        pipeline=2,
    ),
    "cpu-tied": SyncCase(
        model=GeneratedModel(layers=4, hidden=64, vocabulary=512, max_positions=128, tied_embeddings=True),
        precision="fp32",
        pipeline=2,
    ),
    "0.75b": _BIG,
    "0.75b-pp2": _BIG.model_copy(update={"pipeline": 2}),
    "0.75b-own": _BIG.model_copy(update={"cards": "own"}),
    "experts": SyncCase(
        model=LatentModel(
            layers=4, hidden=512, intermediate=1024, expert=256, experts=16, chosen=4, heads=8, query_rank=192,
            value_rank=512, plain=128, rotary=64, value=128, vocabulary=32_768,
        ),
        precision="bf16",
    ),
    "4b": _BIGGER,
    "4b-pp2": _BIGGER.model_copy(update={"pipeline": 2}),
    "4b-pp2-tp2": _BIGGER.model_copy(update={"pipeline": 2, "tensor": 2}),
    "4b-own": _BIGGER.model_copy(update={"cards": "own"}),
    # Moonlight-16B-A3B, but with a latent vector for queries: without one megatron-core has no layers for it
    "moonlight": SyncCase(
        model=LatentModel(
            layers=27, hidden=2048, intermediate=11264, expert=1408, experts=64, chosen=6, heads=16, query_rank=1536,
            value_rank=512, plain=128, rotary=64, value=128, vocabulary=163_840,
        ),
        precision="bf16",
        pipeline=2,
        layers_first_stage=13,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class SyncRound:
    """One round of all ways."""

    delivery: Delivery
    """Ratchet's delivery."""
    seconds: float
    kept_plan_seconds: float
    pauses: list[tuple[float, float]]
    """Pauses of further updates of ours, with digests and without."""
    stock_seconds: float
    probe_s: float
    probe_difference: float
    """Mean |engine - trainer| over the probe, nat."""
    sample_difference: float
    """The same over tokens that the engine has sampled."""
    stock_probe_difference: float
    object_collectives: int
    stock_object_collectives: int
    extra_bytes: int
    """Memory of the cards."""
    stock_extra_bytes: int
