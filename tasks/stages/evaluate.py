"""Stage `evaluate`: greedy answers to held-out prompts with the weights just served. It changes nothing."""

import pyarrow as pa

from storage.manifest import Manifest
from storage.parts import PartWriter
from storage.schema import EVALUATION, fingerprint
from tasks.data.tokenizer import TextCodec
from tasks.engine.engine import Sampling
from tasks.stages.context import RunContext
from tasks.stages.names import Stage
from tasks.stages.prepare import model_directory, prompts
from tasks.stages.reward import records_of, score_samples
from tasks.stages.served_weights import ensure_served
from tasks.stages.stage import StageOutput, StageResult


def evaluate(context: RunContext, iteration: int, prepared: Manifest, synced: Manifest) -> StageResult:
    """Answer the first `evaluate.prompts` held-out prompts greedily and score them with the run's reward."""
    inputs = {"prepare": prepared, "weights": synced}
    return context.stage(iteration, Stage.EVALUATE, inputs, lambda writer: _evaluate(context, writer, prepared, synced))


def _evaluate(context: RunContext, writer: PartWriter, prepared: Manifest, synced: Manifest) -> StageOutput:
    table = prompts(context, prepared, "held_out").slice(0, context.config.evaluate.prompts)
    if not table.num_rows:
        return StageOutput()
    codec = TextCodec.from_directory(model_directory(context, prepared))
    greedy = Sampling(
        temperature=0, top_p=1, max_tokens=context.config.rollout.max_tokens, stop_token_ids=codec.stop_tokens
    )
    engine = ensure_served(context, prepared, synced)[0]
    batch = engine.generate(table["prompt_tokens"].to_pylist(), [0] * table.num_rows, greedy)
    texts = codec.decode_batch(batch.column("response_tokens").to_pylist())
    records = records_of(table)
    scores = score_samples(
        context.config.reward,
        [(records[name], text) for name, text in zip(table["prompt_id"].to_pylist(), texts, strict=True)],
    )
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
        parts=(writer.write_table("answers.arrow", result, EVALUATION),),
        schema_fingerprint=fingerprint(EVALUATION),
        metrics={"accuracy": accuracy, "prompts": float(len(scores))},
    )
