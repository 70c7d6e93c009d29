"""Stage `evaluate`: greedy answers or conversations of held-out prompts with the weights just served; no change."""

from collections.abc import Mapping

import pyarrow as pa

from storage.digest import value_digest
from storage.parts import row_views
from storage.schema import EVALUATION, fingerprint
from tasks.config.evaluation import ASKED, PASS, SCORED_BY, SOURCE
from tasks.engine.protocol import Sampling
from tasks.environments.scores import Kept, play_metrics
from tasks.rewards.passing import condition_of, passing
from tasks.rewards.scoring import Scores, score_responses
from tasks.stages.conversations import environment_source, played_once, tasks_of
from tasks.stages.names import Stage
from tasks.stages.prepared import Records, prompts, text_codec
from tasks.stages.samples import HELD_OUT_WORLD, sample_seed
from tasks.stages.scored import accepted, judges_of, metrics, responses_of, scored_by, with_scores
from tasks.stages.served_weights import ensure_served
from tasks.stages.stage import StageOutput, Work, stage
from tasks.stages.views import Evaluated, Prepared, Served
from tasks.workers.sampling import Batch, spread


@stage(Stage.EVALUATE, ("prepare", "weights"), Evaluated)
def evaluate(work: Work, prepared: Prepared, served: Served) -> StageOutput:
    """Answer the first `evaluate.prompts` held-out prompts greedily and score them with the run's reward. `reward_mean`
    is the mean over the answers that have a score; the others are counted beside it. `pass_rate` is the share of the
    same answers that pass, if it is known which do: see `evaluate.pass`. With an environment a conversation is played
    about each prompt, always with the same seed, and the environment gives the scores."""
    section = work.config.reward
    table = prompts(work.context, prepared, "held_out").slice(0, work.config.evaluate.prompts)
    if not table.num_rows:
        return StageOutput()
    sources = environment_source(work.config)
    played: list[Kept] = []
    if sources:
        answers, played = _played(work, prepared, served, table, sources)
    else:
        answers = _answered(work, prepared, served, table)
    responses = responses_of(answers, text_codec(work.context, prepared), Records(table), work.iteration)
    if sources:
        scored = Scores([one.score.score for one in played], sources)
    else:
        scored = score_responses(section, responses, judges=judges_of(work.context, prepared))
    scores = accepted(scored.scores, responses, section.max_failures, f"evaluate of iteration {work.iteration}")
    result = with_scores(answers, scores, EVALUATION)
    condition = condition_of(result, section, work.config.evaluate.passing)
    rollout = work.config.rollout
    asked = {"prompts": len(scores), "max_tokens": rollout.max_tokens}
    asked |= {"stop": list(rollout.stop)} if rollout.stop else {}
    own = {SOURCE: dict(scored.sources), SCORED_BY: scored_by(section, scored.sources), ASKED: asked}
    rewards = [score.reward for score in scores if score.reward is not None]
    figures = {"reward_mean": sum(rewards) / len(rewards)}
    if condition is not None:
        figures["pass_rate"] = float(passing(result, condition).sum()) / len(rewards)
    return StageOutput(
        parts=(work.writer.write_table("answers.arrow", result, EVALUATION),),
        schema_fingerprint=fingerprint(EVALUATION),
        facts={**own, **({} if condition is None else {PASS: condition})},
        metrics={
            **figures,
            "prompts": float(len(scores)),
            **metrics(scores),
            **(play_metrics(played) if played else {}),
        },
    )


def _answered(work: Work, prepared: Prepared, served: Served, table: pa.Table) -> pa.Table:
    """The greedy answers of the engines, as `responses_of` takes them."""
    engines = ensure_served(work.context, prepared, served)
    batch = Batch(row_views(table["prompt_tokens"]), [0] * table.num_rows)
    answers = spread(engines, batch, _greedy(work, prepared), served.weight_version)
    return _table(table, *(answers[name].combine_chunks() for name in ("response_tokens", "finish_reason")))


def _played(
    work: Work, prepared: Prepared, served: Served, table: pa.Table, sources: Mapping[str, str]
) -> tuple[pa.Table, list[Kept]]:
    """The same of conversations with the environment of these `sources`, and their scores."""
    engines, count = ensure_served(work.context, prepared, served), table.num_rows
    worlds = [sample_seed(0, row, HELD_OUT_WORLD) for row in range(count)]  # the same in every run
    name = value_digest([served.digest, work.config.engine.numbers, *sources.values()])[:16]
    tasks, greedy = tasks_of(table, [0] * count, [0] * count, worlds), _greedy(work, prepared)
    version = served.weight_version
    responses, ends, kept = played_once(work.context, work.writer, name, engines, version, prepared, tasks, greedy)
    return _table(table, responses, ends), kept


def _greedy(work: Work, prepared: Prepared) -> Sampling:
    section, stop = work.config.rollout, text_codec(work.context, prepared).stop_tokens
    return Sampling(temperature=0, max_tokens=section.max_tokens, stop_token_ids=stop, stop=section.stop)


def _table(prompts: pa.Table, responses: pa.Array, ends: pa.Array) -> pa.Table:
    return pa.table(
        {
            "prompt_id": prompts["prompt_id"].combine_chunks(),
            "sample_id": pa.array([0] * prompts.num_rows, pa.int32()),
            "response_tokens": responses.cast(EVALUATION.field("response_tokens").type),
            "finish_reason": ends,
        }
    )
