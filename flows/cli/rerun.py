"""Commands about finished stages that are done again."""

from typing import Annotated

from cyclopts import Parameter
from pydantic import BaseModel

from flows.cli.options import Common, RunId, place_in, several
from flows.views.output import Output
from storage.errors import InputError
from storage.revisions import Rerun, read_revisions
from storage.upkeep.redoing import Wanted
from tasks.config.environment import prepare_process
from tasks.stages.names import Stage


class Chosen(BaseModel, frozen=True, extra="forbid"):
    run: str
    before: int
    head: int


def rerun_command(
    which: Annotated[
        str, Parameter(help="RUN@ITERATION:STAGE; STAGE is rollout, reward, train, weight-sync or evaluate.")
    ],
    /,
    *,
    reason: Annotated[str | None, Parameter(help="Why; it is recorded.")] = None,
    cascade: Annotated[
        bool,
        Parameter(help="Make the result the head and do again what was made from it; else leave it beside the head."),
    ] = True,
    new_seeds: Annotated[bool, Parameter(help="Sample a rollout with other seeds.", negative="--same-seeds")] = False,
    settings: Annotated[tuple[str, ...], several("A setting that applies from this stage on", "--set")] = (),
    revision: Annotated[int | None, Parameter(help="Continue with the rerun that makes this revision.")] = None,
    common: Common = Common(),
) -> int:
    """Do a finished stage again, as a new revision; the first result stays."""
    from flows.driving import ask_again, going_on, person
    from tasks.config.stored import stored_config

    prepare_process()
    named = place_in(which, "RUN@ITERATION:STAGE")
    run, iteration, place = named.run, named.iteration or 0, _repeatable(named.stage)
    store = common.of_run(run)
    if revision is None:
        if reason is None:
            raise InputError("give --reason TEXT: why the stage is done again; it is recorded with the result")
        wanted = Wanted(iteration, place, reason, person(), cascade, new_seeds)
        asked, config = ask_again(store, run, wanted, settings)
    else:
        asked = _asked(read_revisions(store, run).seen(revision).reruns, revision, place, iteration)
        config = going_on(stored_config(store, run), {"run.iterations": asked.until}, run)
    from flows.cli.launch import Order, launch  # imports Prefect and Ray

    again = common.again(["rerun", which, f"--revision={asked.revision}"])
    with Output(json=common.json) as output:
        return launch(Order(config, run, common.root, again, one_stage=not asked.cascade), output)


def choose_command(
    run: RunId,
    revision: Annotated[
        int, Parameter(help="Number of the revision, as `ratchet show` lists them; 0 has the first results.")
    ],
    *,
    reason: Annotated[str, Parameter(help="Why; it is recorded.")],
    common: Common = Common(),
) -> int:
    """Make a revision the head of a run: what the run consists of, and goes on from. The others stay."""
    from flows.driving import make_head, person

    before = make_head(common.of_run(run), run, revision, reason, person(), "ratchet choose")
    chosen = Chosen(run=run, before=before, head=revision)
    return common.show(chosen, [f"run {run}: revision {revision} is the head, before it was {before}"])


def _repeatable(stage: str | None) -> Stage:
    if stage not in [one.value for one in Stage]:
        fact = f"{stage} is an evaluation on request, which is not done again"
        raise InputError(f"{fact}: `ratchet evaluate` makes another")
    return Stage(stage)


def _asked(reruns: tuple[Rerun, ...], revision: int, stage: str, iteration: int) -> Rerun:
    asked = reruns[revision - 1] if revision else None
    if asked is None or (asked.stage, asked.iteration) != (stage, iteration):
        there = asked or "what was done first"
        raise InputError(f"revision {revision} is {there}, not {stage} of iteration {iteration}")
    return asked
