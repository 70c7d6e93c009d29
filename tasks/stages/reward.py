"""Stage `reward`: every stored response gets a score, or a record of why it has none."""

import pyarrow as pa

from storage.errors import StageFailed
from storage.parts import read_table
from storage.schema import REWARD, ROLLOUT, fingerprint
from tasks.rewards.scoring import score_samples
from tasks.rewards.spread import equal_groups
from tasks.stages.names import Stage
from tasks.stages.prepared import prompts, records_of, text_codec
from tasks.stages.stage import StageOutput, Work, stage
from tasks.stages.views import Prepared, Rewards, Rollouts


@stage(Stage.REWARD, ("prepare", "rollout"), Rewards)
def reward(work: Work, prepared: Prepared, rollouts: Rollouts) -> StageOutput:
    """Score the responses of one rollout stage."""
    table = read_table(work.root, rollouts.manifest, ROLLOUT, ["prompt_id", "sample_id", "response_tokens"])
    records = records_of(prompts(work.context, prepared, "train"))
    texts = text_codec(work.context, prepared).decode_column(table["response_tokens"])
    samples = [(records[name], text) for name, text in zip(table["prompt_id"].to_pylist(), texts, strict=True)]
    scores = score_samples(work.config.reward, samples)
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
        parts=(work.writer.write_table("rewards.arrow", result, REWARD),),
        schema_fingerprint=fingerprint(REWARD),
        metrics=_metrics(result),
    )


def _metrics(rewards: pa.Table) -> dict[str, float]:
    scored = rewards["reward"].drop_null().to_numpy()
    if not scored.size:
        first = rewards["detail"][0].as_py() if rewards.num_rows else "there are no samples"
        raise StageFailed(f"none of {rewards.num_rows} responses could be scored; the first error: {first}")
    counts = {row["values"]: row["counts"] for row in rewards["status"].value_counts().to_pylist()}
    return {
        "reward_mean": float(scored.mean()),
        "errors": float(counts.get("error", 0)),
        "timeouts": float(counts.get("timeout", 0)),
        "equal_groups": equal_groups(rewards),
    }
