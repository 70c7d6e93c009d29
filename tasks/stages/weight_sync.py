"""Stage `weight-sync`: the engines serve the trained weights, and both sides agree on what they compute."""

import time
from functools import partial

import numpy as np

from storage import kill_points
from storage.errors import SyncMismatch
from tasks.stages.held_state import ensure_state, release, summed
from tasks.stages.names import Stage
from tasks.stages.probe import Difference, Logprobs, agree, check_change, limits, probe_sequences
from tasks.stages.served_weights import engines_of
from tasks.stages.stage import StageOutput, Work, stage
from tasks.stages.transaction import at_once, deliver
from tasks.stages.views import Prepared, Served, Trained
from tasks.workers.engines import EngineHandle
from tasks.workers.trainers import TrainerGroup


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
