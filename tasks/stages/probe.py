"""The probe of a weight sync: a few sequences on which engines and trainer must compute the same log-probabilities.

Digests show that the bytes arrived; the probe shows that both sides make the same of them. It comes after the commit,
when the engines serve again."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from storage.errors import SyncMismatch
from tasks.config.run import RunConfig
from tasks.stages.context import RunContext
from tasks.stages.prepared import prompts
from tasks.stages.views import Prepared

Logprobs = Sequence[np.ndarray]  # of each sequence float32 nats of its tokens 1, 2, ...


class Difference(NamedTuple):
    """Differences of log-probabilities between engine and trainer over the probe, nat."""

    mean: float
    largest: float


_LIMITS = {"fp32": Difference(1e-3, 5e-3), "bf16": Difference(3e-2, 1e-1), "fp8": Difference(0.2, 1.4)}


def limits(config: RunConfig) -> Difference:
    """The configured limits, or by default at least three times the difference measured in the coarser precision."""
    used = (config.engine.numbers, "fp8" if config.train.fp8 else config.train.precision)
    section, usual = config.sync, next(_LIMITS[numbers] for numbers in ("fp8", "bf16", "fp32") if numbers in used)
    mean = usual.mean if section.max_mean_difference is None else section.max_mean_difference
    return Difference(mean, usual.largest if section.max_difference is None else section.max_difference)


def agree(engine: Logprobs, trainer: Logprobs, allowed: Difference) -> Difference:
    """Raises SyncMismatch: the two sides' log-probabilities of the probe differ by more than is allowed."""
    difference = np.abs(np.concatenate(engine) - np.concatenate(trainer))
    found = Difference(float(difference.mean()), float(difference.max()))
    if not (found.mean <= allowed.mean and found.largest <= allowed.largest):
        raise SyncMismatch(
            f"engine and trainer disagree on the probe by {found.mean:.3g} nat on average and {found.largest:.3g} at "
            f"most; sync.max_mean_difference is {allowed.mean} and sync.max_difference {allowed.largest}. "
            "One of the two does not compute what these weights mean, and the probe does not say which: an export "
            "(`ratchet export`) in transformers tells"
        )
    return found


def probe_sequences(context: RunContext, prepared: Prepared) -> list[np.ndarray]:
    """The fixed probe: the first held-out (or training) prompts with their answers, as int32 token ids. A prompt
    without an answer is repeated instead. What is longer than the engine takes is cut."""
    table = prompts(context, prepared, "held_out")
    table = table if table.num_rows else prompts(context, prepared, "train")
    table = table.slice(0, context.config.sync.probe_sequences)
    pairs = zip(table["prompt_tokens"].to_pylist(), table["answer_tokens"].to_pylist(), strict=True)
    longest = context.config.engine.max_model_len - 1  # the engine samples one token beyond what it scores
    return [np.array([*prompt, *(answer or prompt)][:longest], dtype=np.int32) for prompt, answer in pairs]


def check_change(before: Logprobs, after: Logprobs) -> None:
    """Raises SyncMismatch: an engine's log-probabilities of the probe are the same although its weights are others."""
    if np.array_equal(np.concatenate(before), np.concatenate(after)):
        raise SyncMismatch(
            "the trained weights differ from the ones served before, but the engine's log-probabilities of the probe "
            "are the same as before the sync: it still computes with the old weights"
        )
