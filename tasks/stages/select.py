"""Stage `select`: the stored samples to train on, copied into the run, so that training on them can be repeated."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from storage.backends.root import Root
from storage.errors import InputError, told
from storage.manifest import Manifest, Part
from storage.parts import read_part
from storage.schema import SELECTION, fingerprint
from storage.selection import write_prompts, write_sources
from tasks.config.run import RunConfig
from tasks.rewards.scoring import is_valued
from tasks.stages.names import Stage
from tasks.stages.prepared import MODEL, store_other
from tasks.stages.selecting import Ranges, Rollout, Selecting, rollouts
from tasks.stages.stage import StageOutput, Work, stage
from tasks.stages.views import Prepared, Selected
from trainer_core.batches.routes import Routing
from trainer_core.config import experts_of
from trainer_core.objectives.objective_config import PolicyConfig, check_sampling

_UNSCORED = "let their run go on, set retrain.rescore, or train with an objective that needs none, such as sft"
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")


@stage(Stage.SELECT, ("prepare",), Selected)
def select(work: Work, prepared: Prepared) -> StageOutput:
    """Copy what [retrain] selects into parts, one for each share that an iteration trains on. Raises InputError:
    nothing is selected, or what is cannot be trained on from the state that the run begins with."""
    parts: list[Part] = []

    def store(share: pa.Table) -> None:
        parts.append(work.writer.write_table(f"samples-{len(parts):06d}.arrow", share, SELECTION))

    try:
        selecting, ranges = examine(work.config, work.root, prepared, work.root, store)
    except InputError as error:
        fact = f"{told(error)}\nWhen run {work.context.run!r} began this was otherwise. Nothing is trained yet"
        raise InputError(f"{fact}: remove it with `ratchet rm {work.context.run}`, and begin it again") from error
    prompts = [write_prompts(work.writer, prepare, one.read()) for prepare, one in selecting.answered.items()]
    teacher = store_other(work.writer, work.config, "teacher")
    temperature = _temperature(work.config.train.policy, ranges)
    return StageOutput(
        parts=(*parts, *prompts, write_sources(work.writer, selecting.sources), *teacher),
        schema_fingerprint=fingerprint(SELECTION),
        facts={"samples": selecting.rows, "temperature": temperature, "shares": len(parts)},
        metrics=_metrics(selecting, ranges),
    )


def examine(
    config: RunConfig, own: Root, prepared: Prepared, home: Root, store: Callable[[pa.Table], object]
) -> tuple[Selecting, Ranges]:
    """Go through everything that [retrain] selects; each share is given to `store`. `own` is the root of the run, which
    a place without a root means; `prepared`, stored in `home`, holds the model that is to be trained. Raises
    InputError: nothing is selected, or what is cannot be trained on from the state that the run begins with."""
    if (section := config.retrain) is None:
        raise InputError("the run has no [retrain], so there is nothing to select: start it with `ratchet retrain`")
    selecting, ranges = Selecting(section, config.train.policy.needs_rewards), Ranges()
    for share in _shares(own, prepared, selecting):
        ranges.add(share)
        store(share)
    _check_content(config, selecting, ranges)
    _check_fit(config, json.loads(read_part(home, prepared.manifest.part(f"{MODEL}config.json"))), ranges)
    return selecting, ranges


def _shares(own: Root, prepared: Prepared, selecting: Selecting) -> Iterator[pa.Table]:
    for rollout in rollouts(own, selecting.section):
        _check_tokenizer(prepared, rollout)
        yield from selecting.add(rollout)
        if selecting.full:
            break
    yield from selecting.rest()


def _metrics(selecting: Selecting, ranges: Ranges) -> dict[str, float]:
    mean = {"reward_mean": ranges.rewards / ranges.scored} if ranges.scored else {}
    return {
        "samples": float(selecting.rows),
        "groups": float(selecting.groups),
        "rollouts": float(len(selecting.sources)),
        "examined": float(selecting.examined),
        "duplicates": float(selecting.duplicates),
        "scored": float(ranges.scored),
        **mean,
    }


def _check_tokenizer(prepared: Prepared, rollout: Rollout) -> None:
    """Refuse samples whose token ids mean something else."""
    if rollout.prepared is None:
        return  # imported: only the range of its token ids can be checked
    ours, theirs = _tokenizer(prepared.manifest), _tokenizer(rollout.prepared.manifest)
    if differing := [name for name, digest in theirs.items() if ours.get(name, digest) != digest]:
        raise InputError(
            f"the samples of run {rollout.manifest.run!r} were made with another tokenizer than that of the model to "
            f"be trained: {differing[0]} differs. Select samples of runs that have the same one"
        )


def _tokenizer(manifest: Manifest) -> dict[str, str]:
    parts = manifest.below(MODEL)
    return {name: parts[name].digest for name in _TOKENIZER if name in parts}


def _check_content(config: RunConfig, selecting: Selecting, ranges: Ranges) -> None:
    section, policy = selecting.section, config.train.policy
    if not selecting.rows:
        given = {"where": section.where, "since": section.since, "limit": section.limit}
        keys = [f"retrain.{key} = {value!s}" for key, value in given.items() if value]
        filtered = f", and {', '.join(keys)} leaves none: change that" if keys else ""
        unscored = f"; rollouts without scores, which were left out: {selecting.unscored} ({_UNSCORED})"
        fact = f"nothing is selected: {selecting.examined} samples were examined{filtered}"
        raise InputError(fact + (unscored if selecting.unscored else ""))
    if ranges.without_logprobs and policy.needs_advantages:
        raise InputError(
            f"{ranges.without_logprobs} selected samples were imported without log-probabilities, "
            'without which only train.policy.loss.type "sft", "dpo" and "reward_model" train: set one of these, or '
            "select others"
        )
    if policy.loss.paired and policy.overlong.type != "penalty" and not (ranges.ranked or section.rescore):
        raise InputError(
            f'train.policy.loss.type = "{policy.loss.type}" learns from two samples of a prompt with different scores, '
            "and no prompt of the selection has two: change retrain.where or retrain.limit, select other runs, or "
            "score again with another reward (retrain.rescore)"
        )
    check_sampling(policy, ranges.least_top_p, "top_p of the selected samples", 1)
    check_sampling(policy, ranges.most_top_k, "top_k of the selected samples", 0)
    check_sampling(policy, ranges.most_min_p, "min_p of the selected samples", 0)
    _temperature(policy, ranges)


def _check_fit(config: RunConfig, model: Mapping[str, Any], ranges: Ranges) -> None:
    vocabulary = model["vocab_size"]
    if ranges.largest_token >= vocabulary:
        raise InputError(
            f"the selected samples hold token id {ranges.largest_token}, but the model to be trained has "
            f"{vocabulary} tokens: they were made with another tokenizer"
        )
    _check_values(config, ranges)
    if config.train.experts.replay:
        check_routes(model, ranges, not config.model.accept)  # keys that are let pass may leave layers without experts
    longest = config.train.max_length
    if ranges.longest > longest:
        raise InputError(
            f"a selected sample has {ranges.longest} tokens, but train.max_length is {longest}: raise it, or add "
            f"'length(prompt_tokens) + length(response_tokens) <= {longest}' to retrain.where"
        )


def _check_values(config: RunConfig, ranges: Ranges) -> None:
    """Refuse samples that a reward model is to score and cannot read whole."""
    rescored = config.retrain is not None and config.retrain.rescore and is_valued(config.reward)
    if not rescored or config.engines is None:
        return
    if ranges.longest > (most := config.engines.judge.max_model_len):
        fact = f"a selected sample has {ranges.longest} tokens, and the reward model reads {most} at most"
        repair = f"add 'length(prompt_tokens) + length(response_tokens) <= {most}' to retrain.where"
        raise InputError(f"{fact} (engines.judge.max_model_len), so it would have no score: {repair}")


def check_routes(model: Mapping[str, Any], ranges: Ranges, exactly: bool = True) -> None:
    """Refuse samples without the experts by which they were drawn, or `exactly` with those of another model than that
    with the config.json `model`. Raises InputError."""
    given, repair = "train.experts.replay = true", "select others, or set it to false"
    if 0 in ranges.route_bytes:
        raise InputError(f"{given} needs the routes of every sample, and selected ones have none: {repair}")
    if not exactly:
        return
    layers = model["num_hidden_layers"] - (model.get("first_k_dense_replace") or 0)
    own = Routing(experts_of(model), layers, model["num_experts_per_tok"]).token_bytes
    if others := sorted(ranges.route_bytes - {own}):
        fact = f"{given}, but a token's routes have {', '.join(map(str, others))} bytes, and those of the model {own}"
        raise InputError(f"{fact}, so they are of another model: {repair}")


def _temperature(policy: PolicyConfig, ranges: Ranges) -> float:
    """Temperature that divides the trainer's logits: that of the samples; 1 for a likelihood objective."""
    found = sorted(ranges.temperatures)
    if policy.loss.imitates or policy.loss.trains_critic:
        return 1.0
    if len(found) > 1:
        fact = f"the selected samples were drawn at the temperatures {', '.join(f'{one:g}' for one in found)}"
        raise InputError(f"{fact}, and one trainer has one: add 'temperature = {found[0]:g}' to retrain.where")
    if found[0] == 0:
        raise InputError(
            "the selected samples were chosen greedily (temperature 0), so they have no probability that the trainer's "
            'could be compared with: set train.policy.loss.type = "sft", or select others'
        )
    return found[0]
