"""Stage `weight-sync`: the engines serve the trained weights, and both sides agree on what they compute.

Digests show that the bytes arrived; the probe, a few sequences, shows that both sides make the same of them. It comes
after the commit, when the engines serve again."""

import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from storage import kill_points
from storage.errors import SyncMismatch
from tasks.config.run import RunConfig
from tasks.stages.context import RunContext
from tasks.stages.held_state import ensure_state, release, summed
from tasks.stages.names import Stage
from tasks.stages.prepared import prompts
from tasks.stages.served_weights import engines_of
from tasks.stages.stage import StageOutput, Work, stage
from tasks.stages.transaction import at_once, deliver
from tasks.stages.views import Prepared, Served, Trained
from tasks.workers.interface import EngineHandle, TrainerGroup

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


@stage(Stage.WEIGHT_SYNC, ("prepare", "train"), Served)
def weight_sync(work: Work, prepared: Prepared, trained: Trained) -> StageOutput:
    """Bring the weights of `trained` into every engine, prove it by digests, commit, and probe what they compute."""
    context, version = work.context, work.iteration
    group = ensure_state(context, prepared, trained)
    given_up = [release(context, group, weights=False)]
    engines = engines_of(context, prepared)
    probe = _Probe(work, engines, probe_sequences(context, prepared))
    before = probe.before()
    noted = partial(kill_points.reached, key=work.writer.manifest_key)
    delivery = deliver(context, dict(enumerate(engines)), group, version, noted=noted)
    agreement = probe.after(group, before, delivery.weights_digest)
    given_up.append(release(context, group))
    return StageOutput(
        facts={
            "weight_version": version,
            "weights_digest": delivery.weights_digest,
            **({} if delivery.quantized is None else {"quantized_digest": delivery.quantized}),
        },
        metrics={
            **delivery.metrics(),
            "probe_s": probe.seconds,
            "probe_diff_mean": max(found.mean for found in agreement),
            "probe_diff_max": max(found.largest for found in agreement),
            **summed(given_up),
        },
    )


class _Probe:
    """The probe of one sync; `seconds` is how long it has taken so far."""

    def __init__(self, work: Work, engines: list[EngineHandle], sequences: list[np.ndarray]) -> None:
        self._work, self._engines, self._sequences = work, engines, sequences
        self.seconds = 0.0

    def before(self) -> Logprobs | None:
        """Log-probabilities of the first engine with the weights of the previous sync; None if it holds others."""
        clock = time.perf_counter()
        first = self._engines[0]
        held = first.identity().weight_version == self._work.iteration - 1
        found = first.score(self._sequences) if held else None
        self.seconds += time.perf_counter() - clock
        return found

    def after(self, group: TrainerGroup, before: Logprobs | None, weights_digest: str) -> list[Difference]:
        """Agreement of each engine with the trainer. Where they disagree, no engine samples any more. Raises
        SyncMismatch: they disagree, or the first engine computes as before though the weights are others."""
        clock = time.perf_counter()
        try:
            sides = (group.logprobs, *(engine.score for engine in self._engines))
            ours, *theirs = at_once([partial(side, self._sequences) for side in sides])
            agreement = [agree(one, ours, limits(self._work.config)) for one in theirs]
            previous = None if before is None else self._work.context.find(self._work.iteration - 1, Stage.WEIGHT_SYNC)
            if before is not None and previous is not None and Served(previous).weights_digest != weights_digest:
                check_change(before, theirs[0])
        except SyncMismatch as error:
            for engine in self._engines:
                engine.refuse(str(error))
            raise
        self.seconds += time.perf_counter() - clock
        return agreement
