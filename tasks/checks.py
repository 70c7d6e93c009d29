"""Checks of a run that are made before anything expensive starts."""

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping

from storage import layout
from storage.backends.root import Root
from storage.errors import InputError
from storage.manifest import Manifest, Part, find
from storage.parts import read_part, read_parts
from storage.schema import PROMPTS
from tasks.config.credentials import check_root_url
from tasks.config.environment import Settings
from tasks.config.others import KEYS
from tasks.config.reward import RewardSection
from tasks.config.run import RunConfig
from tasks.data.backends import token_bytes
from tasks.data.generated import model_config
from tasks.data.models import count_parameters, open_model, parameters_in
from tasks.data.sources import check_prompts, check_sources, check_stored_prompts, text_codec
from tasks.data.values import Keyed
from tasks.environments.checking import check_environment
from tasks.model_checks.architectures import architecture_of
from tasks.model_checks.fitness import Facts, check_fit, source_facts
from tasks.model_checks.objective import (
    check_beside,
    check_engine,
    check_judge,
    check_objective,
    check_teacher,
    judge_facts,
    other_parameters,
)
from tasks.preflight import check_continued, check_model, check_others
from tasks.rewards.passing import check_components, check_passing
from tasks.rewards.resolve import find_reward
from tasks.rewards.scoring import own_judges
from tasks.rewards.trying import Call, call_reward, check_golds, check_reward
from tasks.stages.names import Stage
from tasks.stages.prepared import MODEL, other_parts, stored_codec
from tasks.stages.views import Prepared
from tasks.workers.peers import card_bytes, have_fp8
from tasks.workers.placement import Parameters, card_of_judge, check_room, placement, transport
from trainer_core.config import Device, is_classifier
from trainer_core.objectives.objective_config import check_sampling


def check_config(config: RunConfig, root: Root, prepared: Manifest | None = None) -> None:
    """Refuse a run that cannot work. A second call in the same process reads and tokenizes nothing again. A run that
    has stored its model and its prompts depends on nothing outside: their sources may be gone, but if they can be read
    they must be what the run was made from. `prepared` is the stage `prepare` of a run that has committed it. Raises
    InputError (the layout or the engine does not fit the model, the model, a data set or the reward cannot be used or
    is not what the run was started with, sizes contradict each other, CUDA is requested but not available, or the
    root's URL has credentials) or StorageUnavailable (the root cannot be written)."""
    check_root_url(root.url)
    root.check_writable()
    if prepared is None:
        check_content(config)
    else:
        selected = None if config.retrain is None else find(root, prepared.run, 0, Stage.SELECT)
        check_continued(config, root, Prepared(prepared), selected)
        check_kept(config, root, prepared, "the run's model")
        if config.retrain is not None and selected is None:
            _check_teacher(config, root, prepared)
        called = config.scores and config.retrain is None and config.environment is None
        if called and "train.arrow" in prepared.part_names:
            stored = Keyed(prepared.digest, (root, prepared))
            calls = _call_stored(config.reward.model_dump_json(), _texts(config.reward), stored)
            check_components([call.score for call in calls], config.evaluate.passing, "evaluate.pass")


def check_content(config: RunConfig) -> None:
    """The checks of a new run that need no storage root. Writes nothing. Raises InputError: as `check_config`."""
    _check_content(config.model_dump_json(), _device(config))
    check_components([call.score for call in reward_calls(config)], config.evaluate.passing, "evaluate.pass")


def reward_calls(config: RunConfig) -> tuple[Call, ...]:
    """Calls of a new run's reward on a few records, if `reward.try`. Raises InputError: too many have no score."""
    called = config.scores and config.environment is None
    return _reward_calls(config.model_dump_json(), _texts(config.reward)) if called else ()


def check_branch(config: RunConfig, source: Root, prepared: Manifest) -> None:
    """The checks of a run that begins with another's model and prompts. Raises InputError: as `check_config`."""
    if config.model.source is not None:
        check_model(config.model, prepared)
    check_others(config, prepared)
    check_kept(config, source, prepared, f"the model of run {prepared.run!r}")
    _check_teacher(config, source, prepared)


def _check_teacher(config: RunConfig, root: Root, prepared: Manifest) -> None:
    facts = json.loads(read_part(root, prepared.part(f"{MODEL}config.json")))
    check_teacher(config, facts, lambda: stored_codec(root, Prepared(prepared)).backend, _device(config))


def prepared_stage(root: Root, run: str) -> Manifest | None:
    """The stage `prepare` of a run that was recorded, if it is committed."""
    return find(root, run, 0, Stage.PREPARE) if root.exists(layout.run_config_key(run)) else None


def parameters_of(config: RunConfig) -> Parameters:
    """Numbers of weights of the models of a run that begins. Raises InputError: files of one cannot be listed."""
    own = count_parameters(config.model, model_facts(config))
    return Parameters(own, **{kind: other_parameters(config, kind) for kind in KEYS})


def model_facts(config: RunConfig) -> Facts:
    """The content of the model's config.json, read or to be generated. Raises InputError: it cannot be read."""
    section = config.model
    return model_config(section.generate) if section.generate else open_model(section).document("config.json")


def advice(config: RunConfig) -> Iterator[str]:
    """Advice on settings that work, but not as well as others: one sentence each."""
    settings, ranks = Settings.from_environment(), config.train.parallel.world_size
    cores = len(os.sched_getaffinity(0))
    if settings.device(config.device.kind) == "cpu" and ranks > cores:
        yield f"{ranks} trainer ranks share {cores} cores: a layout with fewer ranks under [train.parallel] is faster"
    if (critic := config.train.critic) is not None and config.retrain is None:
        made = (config.run.iterations - 1) * critic.epochs * critic.mini_batches  # before the last iteration begins
        if 0 <= made < critic.updates_alone:
            fact = f"train.critic.updates_alone = {critic.updates_alone} lets the critic learn alone in all"
            yield f"{fact} {config.run.iterations} iterations (run.iterations), and the policy in none"


def prompt_notes(config: RunConfig, prepared: Manifest | None) -> tuple[str, ...]:
    """Treatment of prompts that may not be intended, for a run that begins: one sentence each."""
    return check_prompts(config).notes if prepared is None and config.retrain is None else ()


@functools.lru_cache(maxsize=1)  # the command line and the flow both check; a refusal is not cached
def _check_content(document: str, device: Device) -> None:
    config = RunConfig.model_validate_json(document)
    facts = source_facts(config, device)
    _check_settings(config, facts, device, "model.generate" if config.model.source is None else "model.source")
    _check_room(config, device, lambda: parameters_of(config))
    if config.rollout.stop:
        token_bytes(text_codec(config).backend)  # or an engine could not look for them
    tables = check_prompts(config).tables
    check_teacher(config, facts, lambda: text_codec(config).backend, device)
    check_beside(config, facts, lambda: text_codec(config).backend, device, "critic")
    _check_kind(config, judge_facts(config))
    check_judge(config, facts, lambda: text_codec(config).backend, device)
    if config.scores and config.environment is None:
        check_golds(config.reward, [tables[name] for name in ("train", "held_out") if name in tables])


def _texts(section: RewardSection) -> tuple[str | None, ...]:
    return tuple(find_reward(part.function, part.key).text for part in section.parts)


@functools.lru_cache(maxsize=1)
def _reward_calls(document: str, _: tuple[str | None, ...]) -> tuple[Call, ...]:
    config = RunConfig.model_validate_json(document)
    codec = text_codec(config)
    return tuple(call_reward(config.reward, check_prompts(config).tables["train"], codec))


def check_kept(config: RunConfig, root: Root, prepared: Manifest, where: str) -> None:
    """The same checks of what a run has stored, and that the sources are still what it was made from."""
    check_sources(config, prepared)
    facts = json.loads(read_part(root, prepared.part(f"{MODEL}config.json")))
    _check_settings(config, facts, device := _device(config), where)
    judge = other_parts(prepared, "judge").get("config.json")
    _check_kind(config, None if judge is None else json.loads(read_part(root, judge)))
    stored = functools.partial(_stored_parameters, root)
    others = {kind: other_parts(prepared, kind) for kind in KEYS}
    _check_room(
        config,
        device,
        lambda: Parameters(stored(prepared.below(MODEL)), **{kind: stored(parts) for kind, parts in others.items()}),
    )
    check_stored_prompts(config, root, prepared)


def _stored_parameters(root: Root, parts: Mapping[str, Part]) -> int:
    """The number of weights of a stored model; 0 if there is none."""
    weights = sum(part.bytes for name, part in parts.items() if name.endswith(".safetensors"))
    return parameters_in(weights, json.loads(read_part(root, parts["config.json"]))) if parts else 0


@functools.lru_cache(maxsize=1)
def _call_stored(reward: str, _: tuple[str | None, ...], stored: Keyed[tuple[Root, Manifest]]) -> tuple[Call, ...]:
    root, prepared = stored.value
    prompts = read_parts(root, [prepared.part("train.arrow")], PROMPTS, ["prompt_id", "answer", "record"])
    codec = stored_codec(root, Prepared(prepared))
    return tuple(call_reward(RewardSection.model_validate_json(reward), prompts, codec))


def _check_settings(config: RunConfig, facts: Facts, device: Device, where: str) -> None:
    check_fit(config, facts, device, where)
    _check_cards(config)
    _check_asked(config)
    if config.environment is not None:
        check_environment(config)
    elif config.scores:
        check_reward(config.reward)
    check_objective(config.train.policy)
    check_saving(config, device)
    if config.retrain is None:
        check_engine(config.engine)
    if config.scores:
        check_passing(config.reward, config.evaluate.passing, "evaluate.pass")
    samples = config.rollout.prompts * config.rollout.samples
    if config.retrain is None:
        _check_algorithm(config)
        _check_ahead(config)
        if config.train.max_length < (longest := config.engine.max_model_len):
            given = f"train.max_length = {config.train.max_length}"
            raise InputError(f"engine.max_model_len = {longest} lets responses grow beyond {given}: make them equal")
    else:  # the selection is checked for what it is; no engine is started
        samples = config.retrain.samples
    updates = config.train.policy.mini_batches
    if samples < updates:
        fact = f"{samples} samples per iteration cannot be split into train.policy.mini_batches = {updates}"
        raise InputError(f"{fact}: lower it, or raise rollout.prompts or rollout.samples")


def _check_asked(config: RunConfig) -> None:
    """Refuse a judge that nothing answers for, and an engine that nothing asks."""
    scores = config.environment is None and (config.scores if config.retrain is None else config.retrain.rescore)
    asking = own_judges(config.reward) if scores else []
    if asking and config.engines is None:
        if find_reward(asking[0].function, asking[0].key).traits.values:
            fact = f"{asking[0].key} = {asking[0].function!r} has no model that scores"
            raise InputError(f"{fact}: give the folder of a reward model as engines.judge.source")
        raise InputError(
            f'{asking[0].key} = "judge" has no url in its arguments, and the run has no engine that judges: give the '
            "url of an OpenAI-compatible judge, or its model as engines.judge.source"
        )
    if config.engines is not None and config.retrain is None and not asking:
        given = f"engines.judge.source = {config.engines.judge.source!r} has no effect"
        if config.environment is not None:
            raise InputError(f"{given}, because the environment gives the rewards: leave [engines.judge] out")
        raise InputError(
            f'{given}, because no reward asks that engine: set reward.function = "judge" with arguments that have a '
            'rubric and no url (of a reward model "reward_model" without arguments), or leave [engines.judge] out'
        )


def _check_kind(config: RunConfig, judge: Facts | None) -> None:
    """Refuse a reward model that is asked as a judge, and the reverse; `judge` is the config.json of the model."""
    if judge is None:
        return
    for part in own_judges(config.reward):
        if (wants := find_reward(part.function, part.key).traits.values) == is_classifier(judge):
            continue
        fact = f"{part.key} = {part.function!r} needs {'a reward model' if wants else 'a chat model'}"
        there = f"{fact}, and engines.judge.source is a {architecture_of(judge, KEYS['judge'])}"
        if wants:
            raise InputError(f'{there}: take a folder that `ratchet export` made of a reward model, or set "judge"')
        raise InputError(f'{there}: set "reward_model" without arguments, or take a chat model')


def check_saving(config: RunConfig, device: Device) -> None:
    """Refuse to leave out states that could not be made again bit for bit. Raises InputError."""
    if (every := config.storage.save_every) == 1:
        return
    given = f"storage.save_every = {every} makes states again from stored samples"
    if device == "cuda" and not config.device.deterministic:
        raise InputError(f"{given}, by kernels that must repeat them: set device.deterministic = 'trainer', or it to 1")
    if config.train.policy.distill is not None:
        raise InputError(f"{given}, but a teacher's scores (train.policy.distill) are stored with states: set it to 1")


def _check_algorithm(config: RunConfig) -> None:
    """Refuse an objective that this run's samples cannot serve."""
    policy, samples = config.train.policy, config.rollout.samples
    check_sampling(policy, config.rollout.top_p, "rollout.top_p", 1)
    check_sampling(policy, config.rollout.top_k, "rollout.top_k", 0)
    check_sampling(policy, config.rollout.min_p, "rollout.min_p", 0)
    if (comparing := policy.compares) is not None and samples == 1:
        fact = f"train.policy.{comparing} compares the samples of a prompt, but rollout.samples is 1"
        raise InputError(f"{fact}: raise it to 2 or more")
    if config.rollout.most_prompts is not None and not (policy.leave_out_equal_groups or policy.loss.paired):
        raise InputError(
            f"rollout.most_prompts = {config.rollout.most_prompts} draws until {config.rollout.prompts} prompts have a "
            "spread of rewards, but train.policy trains on those without one, too: set "
            "train.policy.leave_out_equal_groups to true, or leave rollout.most_prompts out"
        )


def _check_ahead(config: RunConfig) -> None:
    """Refuse rollouts beside a training where one of both has no use for that, or no room."""
    _check_updates(config)
    if not config.rollout.ahead:
        return
    policy, given = config.train.policy, f"rollout.ahead = {config.rollout.ahead}"
    older = f"{given} trains on samples of older weights"
    if policy.loss.paired and not policy.loss.trains_critic:
        raise InputError(
            f'{older}, which train.policy.loss.type = "{policy.loss.type}" cannot correct for: it compares pairs of '
            "samples by the log-probabilities of the trained policy alone. Set rollout.ahead to 0"
        )
    if policy.needs_advantages and not policy.needs_behaviour:
        raise InputError(
            f'{older}, and nothing in train.policy corrects for that: set train.policy.old_policy to "behaviour", or '
            "give train.policy.correction a type; both use the log-probabilities stored with the samples"
        )
    turns = "engine.sleep" if config.engine.sleep else "train.memory" if config.train.memory.in_use else None
    if turns is not None:
        raise InputError(
            f"{given} lets engines sample while the trainer trains, but under {turns} one gives its memory to the "
            f'other: leave {turns} out, with cards of their own for the engines (engine.cards = "own") if there is no '
            "room for both, or set rollout.ahead to 0"
        )


def _check_updates(config: RunConfig) -> None:
    """Refuse updates in flight where nothing can go on, and a bound of staleness that nothing keeps."""
    section, bound = config.rollout, config.rollout.max_staleness
    if bound is not None and bound < section.ahead:
        raise InputError(
            f"rollout.max_staleness = {bound} leaves out every sample: with rollout.ahead = {section.ahead} the first "
            f"token of each is {section.ahead} updates old. Raise it, or lower rollout.ahead"
        )
    if section.updates == "between":
        return
    alone = 'rollout.updates = "in-flight"'
    refused = {
        "rollout.ahead = 0, under which weights never change beside a rollout: raise it": not section.ahead,
        f"rollout.max_staleness = {bound}, by which no response may go on: raise it": bound == section.ahead,
        "[environment]: turns of a conversation are not continued under other weights": config.environment is not None,
        "engine.function: an engine of your own does not go on with a response": config.engine.function is not None,
        "rollout.most_prompts: the number of groups of a rollout is fixed": section.most_prompts is not None,
        f"rollout.pause_tokens = {section.pause_tokens}, as no response is longer than rollout.max_tokens = "
        f"{section.max_tokens}: lower it": section.pause_tokens >= section.max_tokens,
        f"rollout.open_prompts = {section.open_prompts}, which leaves none open: raise it above rollout.prompts = "
        f"{section.prompts}": section.in_flight <= section.prompts,
    }
    if found := next((why for why, holds in refused.items() if holds), None):
        raise InputError(f'{alone} does not work with {found}, or set rollout.updates to "between"')


def _check_cards(config: RunConfig) -> None:
    settings, sampled = Settings.from_environment(), None if config.retrain else config.engine.quantization
    wanted = {"engine.quantization": sampled, "train.fp8": config.train.fp8}
    given = next((f'{key} = "{value}"' for key, value in wanted.items() if value is not None), None)
    if given is not None and settings.local and have_fp8(len(settings.gpus)) is False:
        fact = f"{given} takes cards with FP8 units (compute capability 8.9 or more)"
        raise InputError(f"{fact}, which some of the visible ones lack: leave it out, or choose other cards")


def _check_room(config: RunConfig, device: Device, parameters: Callable[[], Parameters]) -> None:
    """Refuse processes that a card is too small for at once, as far as that is known."""
    settings = Settings.from_environment()
    if device == "cpu" or not settings.local or config.retrain is not None:
        return
    if (config.rollout.ahead or config.engines is not None) and (size := card_bytes(len(settings.gpus))) is not None:
        check_room(config, parameters(), placement(config, settings), card_of_judge(settings, device), size)


def _device(config: RunConfig) -> Device:
    """Device of the run; refuses settings that need more cards than there are, or others."""
    settings, parallel = Settings.from_environment(), config.train.parallel
    device = settings.device(config.device.kind)
    if not settings.local:  # Ray says what there is
        return device
    if device == "cuda" and parallel.world_size > len(settings.gpus):
        raise InputError(
            f"the layout {parallel} under [train.parallel] needs {parallel.world_size} GPUs, one a rank, but "
            f"{len(settings.gpus)} are visible: choose a smaller layout, or make more visible (CUDA_VISIBLE_DEVICES)"
        )
    if device == "cuda" and config.retrain is None and config.engine.tensor > len(settings.gpus):
        fact = f"engine.tensor is {config.engine.tensor}, but {len(settings.gpus)} GPUs are visible"
        raise InputError(f"{fact}: choose a smaller one, or make more visible (CUDA_VISIBLE_DEVICES)")
    if config.retrain is None:
        transport(config.sync.transport, placement(config, settings))
    return device
