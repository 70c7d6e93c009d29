"""Commands that read, check and tidy what is stored: no Prefect, Ray, vLLM or torch is imported."""

from contextlib import nullcontext
from typing import Annotated

from cyclopts import Parameter

from flows.cli import printing as lines
from flows.cli.options import Common, Revision, RunId, flag, place_in, several
from flows.views.output import Output, count, size
from storage.errors import InputError
from storage.ownership.lease import hold, unlock
from storage.ownership.process import this_process
from storage.upkeep.archive import compact, without_texts
from storage.upkeep.catalog import contents, names, names_of, require_runs, summaries
from storage.upkeep.lineage import of_sample, of_weights, parse_sample
from storage.upkeep.retention import Retention, collect
from storage.upkeep.verify import verify
from tasks.config.stored import continued_by
from tasks.data.tokenizer import texts_of
from tasks.forking import make_fork
from tasks.stages.names import RETRAINING, WORKFLOW, Stage


def ls_command(*, common: Common = Common()) -> int:
    """List the runs of a root."""
    store = common.store
    listing = lines.Listing(root=store.url, runs=tuple(summaries(store)))
    return common.show(listing, lines.of_listing(listing))


def show_command(
    which: Annotated[
        str,
        Parameter(
            help="RUN[@ITERATION][:STAGE]: a run, one iteration of it, and prepare, rollout, reward, train, "
            "weight-sync, evaluate or the name of an evaluation."
        ),
    ],
    /,
    *,
    revision: Revision = None,
    common: Common = Common(),
) -> int:
    """Show what a run has committed: all of it, one iteration, or one stage with its parts; and what was done again."""
    place = place_in(which)
    run, iteration, stage = place.run, place.iteration, place.stage
    store = common.of_run(run)
    stored = contents(store, run, names_of(store, run, revision))
    chosen = [one for one in stored.newest if iteration in (None, one.iteration) and stage in (None, one.stage)]
    if not chosen and (iteration, stage) != (None, None):
        where = "any iteration" if iteration is None else f"iteration {iteration}"
        raise InputError(f"run {run!r} has no {stage or 'committed stage'} in {where}")
    shown = lines.Shown.of(store.url, stored, chosen)
    return common.show(shown, lines.of_shown(shown, in_detail=stage is not None))


def lineage_command(
    which: Annotated[
        str, Parameter(help="RUN@ITERATION: the weights that its training made, or with --sample what it has sampled.")
    ],
    /,
    *,
    sample: Annotated[str | None, Parameter(help="A sample of that iteration, as PROMPT_ID/SAMPLE_ID.")] = None,
    revision: Revision = None,
    common: Common = Common(),
) -> int:
    """Show what weights were made from, or what made a sample and what was trained on it."""
    place, store = place_in(which, "RUN@ITERATION"), common.store
    run, iteration = place.run, place.iteration or 0
    if sample is None:
        weights = of_weights(store, WORKFLOW, run, iteration, revision)
        return common.show(weights, lines.of_weights_lineage(weights))
    found = of_sample(store, WORKFLOW, run, iteration, *parse_sample(sample), revision=revision)
    return common.show(found, lines.of_sample_lineage(found))


def verify_command(
    run: Annotated[str | None, Parameter(help="Id of the run.")] = None,
    *,
    everything: Annotated[bool, flag("Verify every run of the root.", "--all")] = False,
    common: Common = Common(),
) -> int:
    """Read everything a run has stored and name what is damaged, missing or orphaned. Exit code 1 if it is unsound."""
    if (run is None) != everything:
        raise InputError("give the id of a run, or --all for every run of the root")
    if run is not None:
        report = verify(common.of_run(run), run)
        return common.show(report, lines.of_verification(report), report.sound)
    store = common.store
    found = lines.Verifications(root=store.url, runs=tuple(verify(store, name) for name in require_runs(store)))
    total = sum(not one.sound for one in found.runs)
    each = [line for one in found.runs for line in lines.of_verification(one)]
    last = f"{count(len(found.runs), 'run')} in {found.root}, {f'{total} of them NOT SOUND' if total else 'all sound'}"
    return common.show(found, [*each, last], found.sound)


def gc_command(
    run: RunId,
    *,
    keep_newest: Annotated[int | None, Parameter(help="Keep only this many of the newest train states.")] = None,
    keep_every: Annotated[
        int | None, Parameter(help="Also keep the states of iterations that this number divides.")
    ] = None,
    apply: Annotated[bool, flag("Delete them; without this option nothing is touched.")] = False,
    objects: Annotated[bool, flag("Name each object.")] = False,
    common: Common = Common(),
) -> int:
    """Show what a run no longer needs: orphans older than a day, and states that retention retires.

    Exit code 1 if a record that may name parts cannot be read: then no part is deleted."""
    if keep_every is not None and keep_newest is None:
        raise InputError("--keep-every needs --keep-newest: give both")
    for option, value in (("--keep-newest", keep_newest), ("--keep-every", keep_every)):
        if value is not None and value < 1:
            raise InputError(f"{option} {value} cannot be used: give a number of at least 1")
    store, retention = common.of_run(run), Retention(newest=keep_newest, every=keep_every)
    with hold(store, run, "ratchet gc") if apply else nullcontext() as fence:
        workflow = RETRAINING if names(store, run, 0).of_stage(Stage.SELECT) else WORKFLOW
        found = collect(store, workflow, run, retention, apply=apply, fence=fence)
    return common.show(found, lines.of_collection(found, each=objects), not found.unreadable)


def fork_command(
    which: Annotated[
        str, Parameter(help="RUN@ITERATION: the run to fork, and the last iteration that the new run takes over.")
    ],
    /,
    *,
    run: Annotated[str, Parameter(name="--run", help="Id of the new run.")],
    settings: Annotated[tuple[str, ...], several("A setting of the new run, as section.key=value", "--set")] = (),
    revision: Revision = None,
    common: Common = Common(),
) -> int:
    """Make a new run that begins with the past of another, in parts of its own: hard links, or copies by the store."""
    place = place_in(which, "RUN@ITERATION")
    store = common.of_run(place.run)
    with Output(json=common.json) as output:
        made = make_fork(store, place.run, place.iteration or 0, run, settings, revision, announce=output.say)
        how = f"{size(made.bytes)} of parts, {'linked' if made.linked else 'copied'}"
        first = f"run {run} has iterations 0 to {made.iteration} of {made.parent}: {made.manifests} stages, {how}"
        output.result(made, [first, f"continue it with    {continued_by(store.url, made.run)}"])
    return 0


def unlock_command(
    run: RunId,
    *,
    force: Annotated[bool, flag("Free the run even if its holder may be alive.")] = False,
    common: Common = Common(),
) -> int:
    """Show which process drives a run, and free the run if that process is gone. Exit code 1 if it is not free."""
    free, explanation = unlock(common.of_run(run), run, this_process("ratchet unlock"), force=force)
    result = lines.Unlocked(run=run, free=free, explanation=explanation)
    return common.show(result, [explanation, f"run {run} is {'free' if free else 'not free'}"], free)


def compact_command(run: RunId, *, common: Common = Common()) -> int:
    """Write all scored samples of a run, with their texts, to one Parquet file for other tools."""
    store = common.of_run(run)
    made = compact(store, WORKFLOW, run, texts_of(store, run) or without_texts)
    first, last = made.iterations
    text = f"{made.rows} samples of iterations {first} to {last} in {size(made.bytes)}"
    return common.show(made, [made.key, f"{text}; their parts take {size(made.parts_bytes)}"])
