"""Stage `reward`: every stored response gets a score, or a record of why it has none."""

import json
from collections.abc import Sequence

import pyarrow as pa

from storage.errors import StageFailed
from storage.manifest import Manifest
from storage.parts import PartWriter, read_table
from storage.schema import REWARD, ROLLOUT, fingerprint
from tasks.config.run import RewardSection
from tasks.data.tokenizer import TextCodec
from tasks.rewards.pool import Sample, Score, ScoringOrder, score_in_processes
from tasks.rewards.resolve import resolve_reward
from tasks.rewards.worker import score
from tasks.stages.context import RunContext
from tasks.stages.names import Stage
from tasks.stages.prepare import model_directory, prompts
from tasks.stages.stage import StageOutput, StageResult


def reward(context: RunContext, iteration: int, prepared: Manifest, rollouts: Manifest) -> StageResult:
    """Score the responses of one rollout stage."""
    inputs = {"prepare": prepared, "rollout": rollouts}
    return context.stage(iteration, Stage.REWARD, inputs, lambda writer: _reward(context, writer, prepared, rollouts))


def score_samples(section: RewardSection, samples: Sequence[Sample]) -> list[Score]:
    """Scores of (prompt record, response text) pairs, in order."""
    if section.processes:
        order = ScoringOrder(section.function, section.arguments, section.deadline_s)
        return score_in_processes(order, samples, section.processes)
    function = resolve_reward(section.function, section.arguments)
    return [Score(**score(function, dict(record), response)) for record, response in samples]


def _reward(context: RunContext, writer: PartWriter, prepared: Manifest, rollouts: Manifest) -> StageOutput:
    table = read_table(context.root, rollouts, ROLLOUT, ["prompt_id", "sample_id", "response_tokens"])
    records = records_of(prompts(context, prepared, "train"))
    codec = TextCodec.from_directory(model_directory(context, prepared))
    texts = codec.decode_batch(table["response_tokens"].to_pylist())
    samples = [(records[name], text) for name, text in zip(table["prompt_id"].to_pylist(), texts, strict=True)]
    scores = score_samples(context.config.reward, samples)
    result = pa.Table.from_arrays(
        [
            *(table[name].combine_chunks() for name in ("prompt_id", "sample_id")),
            pa.array([score.reward for score in scores], pa.float32()),
            pa.array([score.status for score in scores], pa.string()),
            pa.array([score.detail for score in scores], pa.string()),
        ],
        schema=REWARD,
    )
    return StageOutput(
        parts=(writer.write_table("rewards.arrow", result, REWARD),),
        schema_fingerprint=fingerprint(REWARD),
        metrics=_metrics(result),
    )


def records_of(table: pa.Table) -> dict[str, dict[str, object]]:
    """Whole dataset records by prompt id."""
    return dict(zip(table["prompt_id"].to_pylist(), map(json.loads, table["record"].to_pylist()), strict=True))


def _metrics(rewards: pa.Table) -> dict[str, float]:
    scored = rewards["reward"].drop_null().to_numpy()
    if not scored.size:
        first = rewards["detail"][0].as_py() if rewards.num_rows else "there are no samples"
        raise StageFailed(f"not one of {rewards.num_rows} responses could be scored; the first says: {first}")
    counts = {row["values"]: row["counts"] for row in rewards["status"].value_counts().to_pylist()}
    return {
        "reward_mean": float(scored.mean()),
        "errors": float(counts.get("error", 0)),
        "timeouts": float(counts.get("timeout", 0)),
    }
