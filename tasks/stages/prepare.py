"""Stage `prepare` of iteration 0: the model directory and the prompt tables become parts of the run.

From here on the run depends on nothing outside its storage root."""

from storage.ownership.scratch import scratch
from storage.schema import PROMPTS, fingerprint
from tasks.config.others import KEYS
from tasks.data.models import fill_model_directory
from tasks.data.sources import Prompts, codec_of, prompts_of
from tasks.stages.names import Stage
from tasks.stages.prepared import MODEL, store_other
from tasks.stages.stage import StageOutput, Work, stage
from tasks.stages.views import Prepared


@stage(Stage.PREPARE, (), Prepared)
def prepare(work: Work) -> StageOutput:
    """Record what the run is made from. Generated models and data sets are made here, from the run's seed."""
    config, writer = work.config, work.writer
    work.context.workers.expect()  # their imports take as long as this
    with scratch() as directory:
        names = fill_model_directory(directory, config.model, config.run.seed)
        codec = codec_of(config, directory)
        prompts = prompts_of(config, codec)
        model = writer.write_files(directory, names, MODEL)
    others = [part for kind in KEYS for part in store_other(writer, config, kind)]
    data = [writer.write_table(f"{name}.arrow", table, PROMPTS) for name, table in prompts.tables.items()]
    return StageOutput(
        parts=(*model, *others, *data),
        schema_fingerprint=fingerprint(PROMPTS),
        facts={
            "cursor": 0,
            "stop_tokens": list(codec.stop_tokens),
            "left_out_tokens": [*sorted(codec.left_out)],
            "data_digests": {name: list(digests) for name, digests in prompts.digests.items()},
            "train_rows": [one.rows for one in prompts.counts["train"]],
        },
        metrics=_metrics(prompts),
    )


def _metrics(prompts: Prompts) -> dict[str, float]:
    dropped = {name: sum(one.dropped for one in counts) for name, counts in prompts.counts.items()}
    unsolved = prompts.tables["warmup"]["answer"].null_count if "warmup" in prompts.tables else 0
    return {
        **{f"{name}_records": float(table.num_rows) for name, table in prompts.tables.items()},
        **{f"{name}_dropped": float(count) for name, count in dropped.items() if count},
        **({"warmup_unsolved": float(unsolved)} if unsolved else {}),
    }
