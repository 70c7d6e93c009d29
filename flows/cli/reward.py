"""`ratchet reward`: tries a reward function on stored samples. Ray and Prefect are imported only for a judge on an
engine of the run."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated

from cyclopts import Parameter

from flows.cli.options import Common, place_in, several
from flows.views.output import Output, figure
from storage.backends.root import Root
from storage.errors import InputError, StageFailed
from tasks.config.credentials import shown_setting
from tasks.config.document import apply_override, parse_config
from tasks.config.reward import RewardSection
from tasks.config.run import RunConfig
from tasks.config.stored import stored_config
from tasks.rewards.judge import Judges
from tasks.rewards.scoring import own_judges
from tasks.rewards.trying import check_reward
from tasks.stages.trial import Trial, Trials, try_reward
from trainer_core.user_code import located_function, without_folder

_EXCERPT = 60


def reward_command(
    which: Annotated[str, Parameter(help="RUN@ITERATION: the iteration whose samples are scored.")],
    /,
    *,
    function: Annotated[
        str | None, Parameter(help="As reward.function, from the working directory; by default the run's own.")
    ] = None,
    settings: Annotated[tuple[str, ...], several("Another setting, as reward.key=value", "--set")] = (),
    last: Annotated[int, Parameter(help="Iterations that are scored, up to the one that is named.")] = 1,
    common: Common = Common(),
) -> int:
    """Try a reward function on stored samples; store only the exchanges with a judge.

    Exit code 1 if more samples than reward.max_failures remain without a score."""
    place = place_in(which, "RUN@ITERATION")
    store = common.store
    section = _section(stored_config(store, place.run), function, settings)
    check_reward(section)
    newest = place.iteration or 0
    if not 1 <= last <= newest:
        raise InputError(f"--last {last}: iteration {newest} is the last of {newest} iterations: give 1 to {newest}")
    with Output(json=common.json) as output, _judges(store, place.run, section) as judges:
        numbers = range(newest - last + 1, newest + 1)
        trials = [try_reward(store, place.run, number, section, judges) for number in numbers]
        lines = [line for trial in trials for line in _lines(trial)]
        together = Trials(trials=tuple(trials))
        told = f"all          {together.changed} of {together.samples} samples of {last} iterations changed"
        output.result(*((trials[0], lines) if last == 1 else (together, [*lines, told])))
    return StageFailed.exit_code if any(trial.too_many for trial in trials) else 0


def _judges(store: Root, run: str, section: RewardSection) -> AbstractContextManager[Judges | None]:
    if not own_judges(section):
        return nullcontext()
    from flows.evaluating import open_judges  # imports Prefect and Ray

    return open_judges(store, run)


def _section(config: RunConfig, function: str | None, settings: Sequence[str]) -> RewardSection:
    """The run's own settings, or those of another function with what is given."""
    document = config.model_dump(mode="json")
    if config.environment is not None:
        if function is None:
            fact = f"the rewards of this run come from its environment {config.environment.function!r}"
            raise InputError(f"{fact}, which is not asked again: name a reward function with --function")
        del document["environment"]
    if function is not None and without_folder(function) != without_folder(config.reward.function):
        kept = RewardSection.model_fields.keys() - {"function", "arguments", "weights", "batch", "functions"}
        document["reward"] = {key: document["reward"][key] for key in kept}
    if function is not None:
        document["reward"]["function"] = located_function(function, None, "--function")
    for setting in settings:
        if not setting.strip().startswith("reward."):
            given = shown_setting(setting)
            raise InputError(f"--set {given!r}: only settings of [reward] can be tried: reward.key=value")
        apply_override(document, setting)
    return parse_config(document, "with the given settings").reward


def _lines(trial: Trial) -> Iterator[str]:
    yield f"{trial.samples} samples of iteration {trial.iteration} of run {trial.run}; nothing was stored"
    for name, source in trial.sources.items():
        yield f"function     {name} ({source})"
    before = "not scored yet" if trial.changed is None else f"stored {figure(trial.stored_mean)}"
    yield f"mean reward  {figure(trial.mean)} ({before})"
    for name, mean in trial.components.items():
        yield f"  {name:<10} {figure(mean)}"
    if trial.changed is not None:
        yield f"changed      {trial.changed} of {trial.samples}"
    limit = "; more than reward.max_failures allows" if trial.too_many else ""
    why = ", ".join(f"{count} {reason}" for reason, count in sorted(trial.reasons.items()))
    yield f"unscored     {trial.unscored}{f' ({why})' if why else ''}{limit}"
    for one in trial.examples:
        text = one.response if len(one.response) <= _EXCERPT else f"{one.response[:_EXCERPT]}..."
        score = f"{figure(one.stored)} -> {figure(one.reward)}" if trial.changed is not None else figure(one.reward)
        yield f"{one.prompt_id}/{one.sample_id}  {score}  {text!r}{f'  {one.detail}' if one.detail else ''}"
