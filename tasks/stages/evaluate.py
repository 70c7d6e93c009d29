"""Stage `evaluate`: greedy answers to held-out prompts with the weights just served. It changes nothing."""

import pyarrow as pa

from storage.schema import EVALUATION, fingerprint
from tasks.engine.protocol import Sampling, token_rows
from tasks.rewards.scoring import score_samples
from tasks.stages.names import Stage
from tasks.stages.prepared import prompts, records_of, text_codec
from tasks.stages.served_weights import ensure_served
from tasks.stages.stage import StageOutput, Work, stage
from tasks.stages.views import Evaluated, Prepared, Served


@stage(Stage.EVALUATE, ("prepare", "weights"), Evaluated)
def evaluate(work: Work, prepared: Prepared, served: Served) -> StageOutput:
    """Answer the first `evaluate.prompts` held-out prompts greedily and score them with the run's reward."""
    table = prompts(work.context, prepared, "held_out").slice(0, work.config.evaluate.prompts)
    if not table.num_rows:
        return StageOutput()
    codec = text_codec(work.context, prepared)
    greedy = Sampling(
        temperature=0, top_p=1, max_tokens=work.config.rollout.max_tokens, stop_token_ids=codec.stop_tokens
    )
    engine = ensure_served(work.context, prepared, served)[0]
    batch = engine.generate(token_rows(table["prompt_tokens"]), [0] * table.num_rows, greedy)
    texts = codec.decode_column(batch.column("response_tokens"))
    records = records_of(table)
    names = table["prompt_id"].to_pylist()
    scores = score_samples(work.config.reward, [(records[name], text) for name, text in zip(names, texts, strict=True)])
    result = pa.Table.from_arrays(
        [
            table["prompt_id"].combine_chunks(),
            batch.column("response_tokens").cast(EVALUATION.field("response_tokens").type),
            pa.array([score.reward for score in scores], pa.float32()),
            pa.array([score.status for score in scores], pa.string()),
        ],
        schema=EVALUATION,
    )
    accuracy = sum(score.reward or 0.0 for score in scores) / len(scores)
    return StageOutput(
        parts=(work.writer.write_table("answers.arrow", result, EVALUATION),),
        schema_fingerprint=fingerprint(EVALUATION),
        metrics={"accuracy": accuracy, "prompts": float(len(scores))},
    )
