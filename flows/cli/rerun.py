"""Commands about finished stages that are done again."""

import shlex
from typing import Annotated

from cyclopts import Parameter
from pydantic import BaseModel

from flows.cli.options import DEFAULT_ROOT, Json, RootUrl, RunId, place_in
from flows.views.output import Output
from storage.backends.root import open_root
from storage.errors import InputError
from storage.ownership.lease import hold
from storage.revisions import Rerun, read_revisions
from storage.upkeep.catalog import require_run
from storage.upkeep.redoing import Wanted, choose
from tasks.config.credentials import shown_text
from tasks.config.environment import prepare_process
from tasks.stages.names import WORKFLOW, Stage


class Chosen(BaseModel, frozen=True, extra="forbid"):
    """A change of the head."""

    run: str
    before: int
    head: int


def rerun_command(
    which: Annotated[
        str,
        Parameter(help="RUN@ITERATION:STAGE of the stage; STAGE is rollout, reward, train, weight-sync or evaluate."),
    ],
    /,
    *,
    reason: Annotated[str | None, Parameter(help="Why; it is recorded.")] = None,
    cascade: Annotated[
        bool, Parameter(help="Make the result the head and do again what was made from it; else leave it beside.")
    ] = True,
    new_seeds: Annotated[bool, Parameter(help="Sample a rollout with other seeds.", negative="--same-seeds")] = False,
    settings: Annotated[
        tuple[str, ...],
        Parameter(name="--set", help="A setting that applies from this stage on; may be repeated.", negative=()),
    ] = (),
    revision: Annotated[int | None, Parameter(help="Continue with the rerun that makes this revision.")] = None,
    root: RootUrl = DEFAULT_ROOT,
    json: Json = False,
) -> int:
    """Do a finished stage again, as a new revision; the first result stays."""
    from flows.rerun import ask_again, going_on, person
    from tasks.config.stored import stored_config

    prepare_process()
    named = place_in(which, "RUN@ITERATION:STAGE")
    run, iteration, place = named.run, named.iteration or 0, _repeatable(named.stage)
    store = open_root(root)
    if revision is None:
        if reason is None:
            raise InputError("give --reason TEXT: why the stage is done again; it is recorded with the result")
        wanted = Wanted(iteration, place, reason, person(), cascade, new_seeds)
        asked, config = ask_again(store, run, wanted, settings)
    else:
        require_run(store, run)
        asked = _asked(read_revisions(store, run).seen(revision).reruns, revision, place, iteration)
        config = going_on(stored_config(store, run), {"run.iterations": asked.until}, run)
    from flows.cli.launch import Order, launch  # imports Prefect and Ray

    words = ["ratchet", "rerun", which, f"--revision={asked.revision}", f"--root={shown_text(root)}"]
    again = shlex.join([*words, *(["--json"] if json else [])])
    with Output(json=json) as output:
        return launch(Order(config, run, root, again, one_stage=not asked.cascade), output)


def choose_command(
    run: RunId,
    revision: Annotated[int, Parameter(help="Its number, as `ratchet show` lists them; 0 is what was done first.")],
    *,
    reason: Annotated[str, Parameter(help="Why; it is recorded.")],
    root: RootUrl = DEFAULT_ROOT,
    json: Json = False,
) -> int:
    """Make a revision the head of a run: what the run consists of, and goes on from. The others stay."""
    from flows.rerun import person
    from flows.views.reports import write_report  # draws curves
    from tasks.config.stored import stored_config

    store = open_root(root)
    require_run(store, run)
    before = read_revisions(store, run).head
    with hold(store, run, "ratchet choose") as lease:
        ahead = stored_config(store, run).rollout.ahead
        choose(store, WORKFLOW, run, revision, reason, person(), lease, ahead)
        write_report(store, run)
    chosen = Chosen(run=run, before=before, head=revision)
    return Output.show(json, chosen, [f"run {run}: revision {revision} is the head, before it was {before}"])


def _repeatable(stage: str | None) -> Stage:
    if stage not in [one.value for one in Stage]:
        raise InputError(
            f"{stage} is an evaluation on request, which is not done again: `ratchet evaluate` makes another"
        )
    return Stage(stage)


def _asked(reruns: tuple[Rerun, ...], revision: int, stage: str, iteration: int) -> Rerun:
    asked = reruns[revision - 1] if revision else None
    if asked is None or (asked.stage, asked.iteration) != (stage, iteration):
        raise InputError(
            f"revision {revision} is {asked or 'what was done first'}, not {stage} of iteration {iteration}"
        )
    return asked
