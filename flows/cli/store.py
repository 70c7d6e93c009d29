"""Commands that read, check and tidy what is stored: no Prefect, Ray, vLLM or torch is imported."""

from contextlib import nullcontext
from typing import Annotated

from cyclopts import Parameter

from flows.cli import printing as lines
from flows.cli.options import DEFAULT_ROOT, Json, Revision, RootUrl, place_in
from flows.views.output import Output
from storage.backends.root import Root, open_root
from storage.errors import InputError, StageFailed
from storage.ids import check_run_name
from storage.manifest import find
from storage.ownership.lease import hold, unlock
from storage.ownership.process import this_process
from storage.upkeep.archive import compact, without_texts
from storage.upkeep.catalog import contents, names, names_of, require_run, runs, summaries
from storage.upkeep.fork import fork
from storage.upkeep.lineage import of_sample, of_weights, parse_sample
from storage.upkeep.retention import Retention, collect
from storage.upkeep.verify import verify
from tasks.config.stored import ConfigRecord, forked_config
from tasks.data.tokenizer import StoredTexts
from tasks.stages.names import RETRAINING, WORKFLOW, Stage


def ls_command(*, root: RootUrl = DEFAULT_ROOT, json: Json = False) -> int:
    """List the runs of a root."""
    store = open_root(root)
    listing = lines.Listing(root=store.url, runs=tuple(summaries(store)))
    with Output(json=json) as output:
        output.result(listing, lines.of_listing(listing))
    return 0


def show_command(
    which: str,
    /,
    *,
    revision: Revision = None,
    root: RootUrl = DEFAULT_ROOT,
    json: Json = False,
) -> int:
    """Show what a run has committed: all of it, one iteration, or one stage with its parts; and what was done again.

    Parameters
    ----------
    which
        RUN[@ITERATION][:STAGE]: a run, one iteration of it, and prepare, rollout, reward, train, weight-sync,
        evaluate or the name of an evaluation.
    """
    place, store = place_in(which), open_root(root)
    run, iteration, stage = place.run, place.iteration, place.stage
    require_run(store, run)
    stored = contents(store, run, names_of(store, run, revision))
    chosen = [one for one in stored.newest if iteration in (None, one.iteration) and stage in (None, one.stage)]
    if not chosen and (iteration, stage) != (None, None):
        where = "any iteration" if iteration is None else f"iteration {iteration}"
        raise InputError(f"run {run!r} has no {stage or 'committed stage'} in {where}")
    shown = lines.Shown.of(store.url, stored, chosen)
    with Output(json=json) as output:
        output.result(shown, lines.of_shown(shown, in_detail=stage is not None))
    return 0


def lineage_command(
    which: str,
    /,
    *,
    sample: Annotated[str | None, Parameter(help="A sample of that iteration, as PROMPT_ID/SAMPLE_ID.")] = None,
    revision: Revision = None,
    root: RootUrl = DEFAULT_ROOT,
    json: Json = False,
) -> int:
    """Show what weights were made from, or what made a sample and what was trained on it.

    Parameters
    ----------
    which
        RUN@ITERATION: the weights that the training of this iteration made, or with --sample what it has sampled.
    """
    place, store = place_in(which, "RUN@ITERATION"), open_root(root)
    run, iteration = place.run, place.iteration or 0
    with Output(json=json) as output:
        if sample is None:
            of = of_weights(store, WORKFLOW, run, iteration, revision)
            output.result(of, lines.of_weights_lineage(of))
        else:
            found = of_sample(store, WORKFLOW, run, iteration, *parse_sample(sample), revision=revision)
            output.result(found, lines.of_sample_lineage(found))
    return 0


def verify_command(
    run: str | None = None,
    *,
    everything: Annotated[bool, Parameter(name="--all", help="Verify every run of the root.", negative=())] = False,
    root: RootUrl = DEFAULT_ROOT,
    json: Json = False,
) -> int:
    """Read everything a run has stored and name what is damaged, missing or orphaned. Exit code 1 if it is not sound.

    Parameters
    ----------
    run
        Id of the run.
    """
    if (run is None) != everything:
        raise InputError("give the id of a run, or --all for every run of the root")
    store = open_root(root)
    with Output(json=json) as output:
        if run is None:
            found = lines.Verifications(root=store.url, runs=tuple(verify(store, name) for name in runs(store)))
            output.result(found, lines.of_verifications(found))
            return 0 if found.sound else StageFailed.exit_code
        require_run(store, run)
        report = verify(store, run)
        output.result(report, lines.of_verification(report))
    return 0 if report.sound else StageFailed.exit_code


def gc_command(
    run: str,
    *,
    keep_newest: Annotated[int | None, Parameter(help="Keep only this many of the newest train states.")] = None,
    keep_every: Annotated[
        int | None, Parameter(help="Also keep the states of iterations that this number divides.")
    ] = None,
    apply: Annotated[bool, Parameter(help="Delete; without it nothing is touched.", negative=())] = False,
    objects: Annotated[bool, Parameter(help="Name each object.", negative=())] = False,
    root: RootUrl = DEFAULT_ROOT,
    json: Json = False,
) -> int:
    """Show what a run no longer needs: orphans older than a day, and states that retention retires.

    Exit code 1 if a record that may name parts cannot be read: then no part is deleted.

    Parameters
    ----------
    run
        Id of the run.
    """
    if keep_every is not None and keep_newest is None:
        raise InputError("--keep-every needs --keep-newest: give both")
    for option, value in (("--keep-newest", keep_newest), ("--keep-every", keep_every)):
        if value is not None and value < 1:
            raise InputError(f"{option} {value} cannot be used: give a number of at least 1")
    store = _open(root, run)
    retention = Retention(newest=keep_newest, every=keep_every)
    with hold(store, run, "ratchet gc") if apply else nullcontext() as fence:
        selects = bool(names(store, run, 0).of_stage(Stage.SELECT))
        workflow = RETRAINING if selects else WORKFLOW
        found = collect(store, workflow, run, retention, apply=apply, fence=fence)
    with Output(json=json) as output:
        output.result(found, lines.of_collection(found, each=objects))
    return StageFailed.exit_code if found.unreadable else 0


def fork_command(
    which: str,
    /,
    *,
    run: Annotated[str, Parameter(name="--run", help="Id of the new run.")],
    settings: Annotated[
        tuple[str, ...],
        Parameter(name="--set", help="A setting of the new run, as section.key=value; may be repeated.", negative=()),
    ] = (),
    revision: Revision = None,
    root: RootUrl = DEFAULT_ROOT,
    json: Json = False,
) -> int:
    """Make a new run that begins with the past of another, in parts of its own: hard links, or copies by the store.

    Parameters
    ----------
    which
        RUN@ITERATION: the run to fork, and the last iteration that the new run takes over.
    """
    place = place_in(which, "RUN@ITERATION")
    parent, at = place.run, place.iteration or 0
    store = _open(root, parent)
    config = forked_config(store, parent, check_run_name(run), settings, revision)
    record, older = ConfigRecord.of(config), config.rollout.ahead
    with Output(json=json) as output:
        made = fork(store, WORKFLOW, parent, at, run, record.digest, record, revision, output.say, older)
        output.result(made, lines.of_fork(made, store.url))
    return 0


def unlock_command(
    run: str,
    *,
    force: Annotated[bool, Parameter(help="Free it even if its holder may be alive.", negative=())] = False,
    root: RootUrl = DEFAULT_ROOT,
    json: Json = False,
) -> int:
    """Show which process drives a run, and free the run if that process is gone. Exit code 1 if it is not free.

    Parameters
    ----------
    run
        Id of the run.
    """
    free, explanation = unlock(_open(root, run), run, this_process("ratchet unlock"), force=force)
    result = lines.Unlocked(run=run, free=free, explanation=explanation)
    with Output(json=json) as output:
        output.result(result, lines.of_unlocked(result))
    return 0 if free else StageFailed.exit_code


def compact_command(run: str, *, root: RootUrl = DEFAULT_ROOT, json: Json = False) -> int:
    """Write all scored samples of a run, with their texts, to one Parquet file for other tools.

    Parameters
    ----------
    run
        Id of the run.
    """
    store = _open(root, run)
    prepared = find(store, run, 0, Stage.PREPARE)
    archive = compact(store, WORKFLOW, run, without_texts if prepared is None else StoredTexts.of(store, prepared))
    with Output(json=json) as output:
        output.result(archive, lines.of_archive(archive))
    return 0


def _open(root: str, run: str) -> Root:
    store = open_root(root)
    require_run(store, run)
    return store
