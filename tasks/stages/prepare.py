"""Stage `prepare` of iteration 0: the model directory and the prompt tables become parts of the run.

From here on the run depends on nothing outside its storage root.
"""

import tempfile
from pathlib import Path

from storage.schema import PROMPTS, fingerprint
from tasks.data.models import fill_model_directory
from tasks.data.sources import prompt_tables
from tasks.data.tokenizer import TextCodec
from tasks.stages.names import Stage
from tasks.stages.prepared import MODEL
from tasks.stages.stage import StageOutput, Work, stage
from tasks.stages.views import Prepared


@stage(Stage.PREPARE, (), Prepared)
def prepare(work: Work) -> StageOutput:
    """Record what the run is made from. Generated models and data sets are made here, from the run's seed."""
    config, writer = work.config, work.writer
    with tempfile.TemporaryDirectory(prefix="ratchet-model-") as folder:
        directory = Path(folder)
        names = fill_model_directory(directory, config.model, config.run.seed)
        tables = prompt_tables(config, TextCodec.from_directory(directory))
        model = [part.model_copy(update={"name": MODEL + part.name}) for part in writer.write_files(directory, names)]
    data = [writer.write_table(f"{name}.arrow", table, PROMPTS) for name, table in tables.items()]
    return StageOutput(
        parts=(*model, *data),
        schema_fingerprint=fingerprint(PROMPTS),
        facts={"cursor": 0},
        metrics={f"{name}_records": float(table.num_rows) for name, table in tables.items()},
    )
