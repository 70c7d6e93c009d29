"""Stage `reward`: every stored response gets a score, or a record of why it has none."""

from collections.abc import Mapping
from typing import cast

import numpy as np
from pydantic import JsonValue

from storage.parts import read_part, read_table
from storage.schema import REWARD, ROLLOUT, fingerprint
from tasks.config.evaluation import SCORED_BY, SOURCE
from tasks.environments.scores import read_scores
from tasks.rewards.scoring import Scores, equal_groups, score_responses
from tasks.stages.draws import scorable, scored_before
from tasks.stages.names import Stage
from tasks.stages.scored import REPLACED, accepted, judges_of, metrics, scored_by, with_scores
from tasks.stages.stage import StageOutput, Work, stage
from tasks.stages.views import ENVIRONMENT, SCORES, Prepared, Rewards, Rollouts

_NEEDED = ["prompt_id", "sample_id", "response_tokens", "turns"]


@stage(Stage.REWARD, ("prepare", "rollout"), Rewards)
def reward(work: Work, prepared: Prepared, rollouts: Rollouts) -> StageOutput:
    """Score the responses of one rollout stage."""
    section = work.config.reward
    table = read_table(work.root, rollouts.manifest, ROLLOUT, _NEEDED)
    responses = scorable(work, prepared, table)
    if work.config.environment is not None:  # environments gave the scores, which are stored with the rollout
        found = read_scores(read_part(work.root, rollouts.manifest.part(SCORES)))
        sources = cast(Mapping[str, str], rollouts.manifest.facts.get(ENVIRONMENT))
        scored = Scores([one.score for one in found], sources)
    else:
        scored = scored_before(work, rollouts)
    if scored is None:
        scored = score_responses(section, responses, judges=judges_of(work.context, prepared))
    scores = accepted(scored.scores, responses, section.max_failures, f"reward of iteration {work.iteration}")
    result = with_scores(table, scores, REWARD)
    mean = np.mean(result["reward"].drop_null().to_numpy())
    return StageOutput(
        parts=(work.writer.write_table("rewards.arrow", result, REWARD),),
        schema_fingerprint=fingerprint(REWARD),
        facts=_facts(work, scored.sources),
        metrics={"reward_mean": float(mean), "equal_groups": equal_groups(result), **metrics(scores)},
    )


def _facts(work: Work, sources: Mapping[str, str]) -> dict[str, JsonValue]:
    """Sources of the functions, and those that have changed since the previous iteration, which is reported."""
    # they may not be published yet; a train state that was added since takes longer, and is not waited for
    work.context.outbox.settle((work.iteration - 1, Stage.REWARD))
    earlier = work.context.find(work.iteration - 1, Stage.REWARD) if work.iteration > 1 else None
    before = earlier.facts.get(SOURCE) if earlier is not None else None
    known = before if isinstance(before, dict) else {}
    replaced = {name: known[name] for name in sources if name in known and known[name] != sources[name]}
    for name, old in replaced.items():
        work.context.say(
            f"reward function {name} has changed ({str(old)[:12]} -> {sources[name][:12]}): it applies from iteration "
            f"{work.iteration}, and earlier ones stay scored as they are"
        )
    own = {SOURCE: dict(sources), SCORED_BY: scored_by(work.config.reward, sources)}
    return {**own, **({REPLACED: replaced} if replaced else {})}
