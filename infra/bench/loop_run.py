"""A run of the loop's bench, as `ratchet run` does it; engines and trainer are called without the loop before they end.

python -m infra.bench.loop_run FOLDER
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from flows import run
from flows.cli.launch import Order, drive
from infra.bench.loop import CONFIG, DIRECT, ROOT, RUN
from storage.errors import RatchetError, told
from storage.parts import PartWriter
from tasks.config.run import RunConfig
from tasks.stages.context import RunContext
from tasks.stages.held_state import trainers
from tasks.stages.names import Stage
from tasks.stages.samples import sampling
from tasks.stages.served_weights import ensure_served, rest
from tasks.stages.stage import Work
from tasks.stages.views import Prepared, Served
from tasks.workers.sampling import Batch, sample
from trainer_core.batches.reading import read_samples
from trainer_core.batches.sequences import Samples

open_context = run.open_context


def main() -> int:
    """Drive the run that the folder describes, and write what was measured beside it."""
    folder = Path(sys.argv[1])
    config = RunConfig.model_validate_json((folder / CONFIG).read_text())
    found: dict[str, float] = {}

    @contextmanager
    def opened(*given: Any) -> Iterator[RunContext]:
        with open_context(*given) as context:
            yield context
            context.outbox.settle()
            found.update(direct(context))

    run.open_context = opened
    try:
        root = run.ready(RUN, str(folder / ROOT), config)
        _, result = drive(Order(config, RUN, root.url, again=""), root, lambda text: sys.stderr.write(f"{text}\n"))
    except RatchetError as error:
        sys.stderr.write(f"{told(error)}\n")
        return 1
    (folder / DIRECT).write_text(json.dumps({**found, "peak_gib": result.peak_pss_gib}))
    return 0


def direct(context: RunContext) -> dict[str, float]:
    """The engines' rate over the prompts of the last rollout, and the seconds of an update on its samples."""
    last = context.config.run.iterations
    prepared = Prepared(context.need(0, Stage.PREPARE))
    samples = read_samples(context.root, context.need(last, Stage.ROLLOUT), context.need(last, Stage.REWARD))
    rate = _sampled_per_s(context, prepared, samples)
    rest(context, prepared)
    group = trainers(context, prepared)
    group.resume()
    clock, config = time.perf_counter(), context.config
    group.train_policy(samples, config.rollout.temperature, config.train.policy.needs_reference)
    return {"direct_tokens_per_s": rate, "direct_train_s": time.perf_counter() - clock}


def _sampled_per_s(context: RunContext, prepared: Prepared, samples: Samples) -> float:
    last, section = context.config.run.iterations, context.config.rollout
    engines = ensure_served(context, prepared, Served(context.need(last, Stage.WEIGHT_SYNC)))
    writer = PartWriter(context.root, context.run, last, Stage.ROLLOUT)
    how = sampling(Work(context, last, writer), prepared)
    ends = np.cumsum(samples.prompt_lengths + samples.response_lengths)
    starts = ends - samples.prompt_lengths - samples.response_lengths
    prompts = [samples.tokens[start : start + length]
               for start, length in zip(starts, samples.prompt_lengths, strict=True)]  # fmt: skip
    size, count = section.groups_per_part * section.samples, [0]
    batches = [Batch(prompts[first : first + size], range(first, first + len(prompts[first : first + size])))
               for first in range(0, len(prompts), size)]  # fmt: skip
    clock = time.perf_counter()
    sample(engines, batches, how, lambda _, found: count.append(len(found["response_tokens"].flatten())))
    return sum(count) / (time.perf_counter() - clock)


if __name__ == "__main__":
    sys.exit(main())
