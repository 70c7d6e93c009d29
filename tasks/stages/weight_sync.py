"""Stage `weight-sync`: the engines serve the trained weights, and both sides agree on what they compute."""

from dataclasses import dataclass

import numpy as np

from storage.errors import SyncMismatch
from storage.manifest import Manifest, find
from tasks.config.run import SyncSection
from tasks.stages.context import RunContext
from tasks.stages.held_state import ensure_state
from tasks.stages.names import Stage
from tasks.stages.prepare import prompts
from tasks.stages.served_weights import deliver, engines_of
from tasks.stages.stage import StageOutput, StageResult

Logprobs = list[np.ndarray]


def weight_sync(context: RunContext, iteration: int, prepared: Manifest, trained: Manifest) -> StageResult:
    """Load the weights of `trained` into every engine, prove it by digests and by log-probabilities, and commit."""
    inputs = {"prepare": prepared, "train": trained}
    return context.stage(iteration, Stage.WEIGHT_SYNC, inputs, lambda _: _sync(context, iteration, prepared, trained))


def _sync(context: RunContext, iteration: int, prepared: Manifest, trained: Manifest) -> StageOutput:
    group = ensure_state(context, prepared, trained)
    engines = engines_of(context, prepared)
    probe = probe_sequences(context, prepared)
    before = engines[0].score(probe) if engines[0].identity().weight_version == iteration - 1 else None
    delivery = deliver(engines, group, iteration)
    ours: Logprobs = group.call("logprobs", probe)[0]
    agreement = [agree(engine.score(probe), ours, context.config.sync) for engine in engines]
    previous = find(context.root, context.run, iteration - 1, Stage.WEIGHT_SYNC) if iteration else None
    if before is not None and previous is not None:
        _check_change(before, engines[0].score(probe), previous.facts["weights_digest"] != delivery.weights_digest)
    return StageOutput(
        facts={
            "weight_version": iteration,
            "weights_digest": delivery.weights_digest,
            "cursor": trained.facts["cursor"],
        },
        metrics={
            "tensors": float(delivery.tensors),
            "bytes": float(delivery.bytes),
            "probe_diff_mean": max(found.mean for found in agreement),
            "probe_diff_max": max(found.largest for found in agreement),
        },
    )


@dataclass(frozen=True)
class Agreement:
    """Differences of log-probabilities between engine and trainer over the probe, nat."""

    mean: float
    largest: float


def agree(engine: Logprobs, trainer: Logprobs, section: SyncSection) -> Agreement:
    """Compare the two sides' log-probabilities of the probe.

    Raises:
        SyncMismatch: they differ by more than the configured limits.
    """
    difference = np.abs(np.concatenate(engine) - np.concatenate(trainer))
    found = Agreement(float(difference.mean()), float(difference.max()))
    if not (found.mean <= section.max_mean_difference and found.largest <= section.max_difference):
        raise SyncMismatch(
            f"engine and trainer disagree on the probe by {found.mean:.3g} nat in the mean and {found.largest:.3g} at "
            f"most; sync.max_mean_difference is {section.max_mean_difference} and sync.max_difference "
            f"{section.max_difference}. The engine does not compute with the weights that were sent"
        )
    return found


def probe_sequences(context: RunContext, prepared: Manifest) -> list[np.ndarray]:
    """The fixed probe: the first held-out (or training) prompts with their answers, as int32 token ids."""
    table = prompts(context, prepared, "held_out")
    table = (table if table.num_rows else prompts(context, prepared, "train")).slice(
        0, context.config.sync.probe_sequences
    )
    pairs = zip(table["prompt_tokens"].to_pylist(), table["answer_tokens"].to_pylist(), strict=True)
    return [np.array([*prompt, *(answer or prompt)], dtype=np.int32) for prompt, answer in pairs]


def _check_change(before: Logprobs, after: Logprobs, weights_changed: bool) -> None:
    same = np.array_equal(np.concatenate(before), np.concatenate(after))
    if same and weights_changed:
        raise SyncMismatch(
            "the trained weights differ from the ones served before, but the engine's log-probabilities of the probe "
            "are the same as before the sync: it still computes with the old weights"
        )
