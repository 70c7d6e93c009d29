"""Stage `weight-sync`: the engines serve the trained weights, and both sides agree on what they compute."""

from dataclasses import dataclass

import numpy as np

from storage.errors import SyncMismatch
from tasks.config.run import SyncSection
from tasks.stages.context import RunContext
from tasks.stages.held_state import ensure_state
from tasks.stages.names import Stage
from tasks.stages.prepared import prompts
from tasks.stages.served_weights import deliver, engines_of
from tasks.stages.stage import StageOutput, Work, stage
from tasks.stages.turns import release, together
from tasks.stages.views import Prepared, Served, Trained

Logprobs = list[np.ndarray]


@stage(Stage.WEIGHT_SYNC, ("prepare", "train"), Served)
def weight_sync(work: Work, prepared: Prepared, trained: Trained) -> StageOutput:
    """Load the weights of `trained` into every engine, prove it by digests and by log-probabilities, and commit."""
    context, version = work.context, work.iteration
    group = ensure_state(context, prepared, trained)
    given_up = [release(context, group, weights=False)]
    engines = engines_of(context, prepared)
    probe = probe_sequences(context, prepared)
    before = engines[0].score(probe) if engines[0].identity().weight_version == version - 1 else None
    delivery = deliver(engines, group, version)
    ours: Logprobs = group.logprobs(probe)
    given_up.append(release(context, group))
    agreement = [agree(engine.score(probe), ours, work.config.sync) for engine in engines]
    previous = context.find(version - 1, Stage.WEIGHT_SYNC) if version else None
    if before is not None and previous is not None:
        changed = Served(previous).weights_digest != delivery.weights_digest
        _check_change(before, engines[0].score(probe), changed)
    return StageOutput(
        facts={
            "weight_version": version,
            "weights_digest": delivery.weights_digest,
            "cursor": trained.cursor,
        },
        metrics={
            "tensors": float(delivery.tensors),
            "bytes": float(delivery.bytes),
            "probe_diff_mean": max(found.mean for found in agreement),
            "probe_diff_max": max(found.largest for found in agreement),
            **together(given_up),
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
            f"engine and trainer disagree on the probe by {found.mean:.3g} nat on average and {found.largest:.3g} at "
            f"most; sync.max_mean_difference is {section.max_mean_difference} and sync.max_difference "
            f"{section.max_difference}. The engine does not compute with the weights that were sent"
        )
    return found


def probe_sequences(context: RunContext, prepared: Prepared) -> list[np.ndarray]:
    """The fixed probe: the first held-out (or training) prompts with their answers, as int32 token ids.

    A prompt without an answer is repeated instead. What is longer than the engine takes is cut.
    """
    table = prompts(context, prepared, "held_out")
    table = (table if table.num_rows else prompts(context, prepared, "train")).slice(
        0, context.config.sync.probe_sequences
    )
    pairs = zip(table["prompt_tokens"].to_pylist(), table["answer_tokens"].to_pylist(), strict=True)
    longest = context.config.engine.max_model_len - 1  # the engine samples one token beyond what it scores
    return [np.array([*prompt, *(answer or prompt)][:longest], dtype=np.int32) for prompt, answer in pairs]


def _check_change(before: Logprobs, after: Logprobs, weights_changed: bool) -> None:
    same = np.array_equal(np.concatenate(before), np.concatenate(after))
    if same and weights_changed:
        raise SyncMismatch(
            "the trained weights differ from the ones served before, but the engine's log-probabilities of the probe "
            "are the same as before the sync: it still computes with the old weights"
        )
