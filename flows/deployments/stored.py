"""Deployments for what is stored: `choose`, `export`, `fork`, `verify` and `import`, as the commands of these names."""

import functools
import time
from typing import Any, Literal

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed, Failed

from flows.deployments.attempt import Asked, attempt, fix
from flows.deployments.evaluate import LAST, Which, place_of
from flows.deployments.train import Count, Minutes, owner, waiting
from flows.views.artifacts import artifact_key
from flows.views.reports import write_report
from storage import layout
from storage.backends.root import open_root
from storage.errors import InputError
from storage.ids import check_run_name
from storage.ownership.lease import hold
from storage.revisions import read_revisions
from storage.upkeep.catalog import require_run, runs
from storage.upkeep.fork import fork
from storage.upkeep.redoing import choose
from storage.upkeep.verify import Verification, verify
from tasks.config.stored import ConfigRecord, begun_by, forked_config
from tasks.export.choice import choose as choose_weights
from tasks.export.target import Target
from tasks.importing.rows import ImportOrder, mapped
from tasks.importing.samples import import_samples
from tasks.stages.names import WORKFLOW

_AGAIN = "does the same again"


def named() -> str:
    """Name of a flow run in the UI."""
    return f"{flow_run.get_parameters().get('run') or 'all runs'} {flow_run.get_flow_name()}"


@flow(name="choose", flow_run_name=named, persist_result=False, validate_parameters=True)
def choose_revision(run: str, root: str, revision: Count, reason: str, patience_minutes: Minutes = 10.0) -> State[Any]:
    """Make a revision the head of a run: what the run consists of, and goes on from. The others stay.

    Args:
        run: Id of the run.
        root: Storage root: an absolute path, file:///absolute/path or s3://bucket/prefix.
        revision: Its number, as the page of the flow run that did a stage again gives it; 0 is what was done first.
        reason: Why; it is recorded.
        patience_minutes: How long to wait for another process that drives this run.
    """
    deadline, say = time.monotonic() + 60 * patience_minutes, get_run_logger().info
    make_head = functools.partial(begin_choice, run, root, revision, reason)
    will = f"make revision {revision} the head of run {run}: {reason}"
    return attempt(Asked(run, root, will, _AGAIN), lambda: waiting(check_run_name(run), make_head, deadline, say))


def begin_choice(run: str, root: str, revision: int, reason: str) -> State[Any]:
    """Choose, unless that revision is the head.

    Raises:
        InputError: there is no such run or revision, or the run cannot go on from it.
        LeaseHeld: another process drives the run.
    """
    store = open_root(root)
    require_run(store, run)
    if not reason.strip():
        raise InputError("a reason is missing: say why; it is recorded with the choice")
    before = read_revisions(store, run).head
    if before == revision:
        return Completed(message=f"run {run}: revision {revision} is the head already")
    with hold(store, run, owner()) as lease:
        choose(store, WORKFLOW, run, revision, reason, f"flow run {flow_run.get_name()}", lease)
        write_report(store, run)
    return Completed(message=f"run {run}: revision {revision} is the head, before it was {before}")


@flow(name="export", flow_run_name=named, persist_result=False, validate_parameters=True)
def export_weights(
    run: str,
    root: str,
    to: str,
    iteration: Which = LAST,
    precision: Literal["as trained", "bf16", "fp32"] = "as trained",
) -> State[Any]:
    """Write a trained model as a Hugging Face folder that transformers and vLLM load.

    Args:
        run: Id of the run.
        root: Storage root: an absolute path, file:///absolute/path or s3://bucket/prefix.
        to: The new folder: an absolute path, or any fsspec URL.
        iteration: Whose weights: last, best, or the number of an iteration, whose state must be kept.
        precision: Type of the weights.
    """

    def work() -> State[Any]:
        from tasks.export.export import export  # imports torch, and Megatron later

        store = open_root(root)
        chosen, target = choose_weights(store, place_of(run, iteration)), Target.new(to)
        fix(iteration=f"{chosen.iteration}")
        made = export(store, chosen, target, None if precision == "as trained" else precision)
        return Completed(message=f"iteration {made.iteration} of run {run} is in {made.folder}, {made.precision}")

    will = f"export iteration {iteration} of run {run} to {to}"
    return attempt(Asked(run, root, will, "writes the folder again", places={"to": to}), work)


@flow(name="fork", flow_run_name=named, persist_result=False, validate_parameters=True)
def fork_run(
    run: str,
    root: str,
    at: Count,
    new: str,
    settings: list[str] = [],  # noqa: B006 - never changed; Prefect shows a default in its form
) -> State[Any]:
    """Make a new run that shares the past of another; nothing is copied. Deployment `train` continues it.

    Args:
        run: Id of the run to fork.
        root: Storage root: an absolute path, file:///absolute/path or s3://bucket/prefix.
        at: The last iteration that both runs share.
        new: Id of the new run.
        settings: Settings of the new run that differ, each as section.key=value.
    """
    will = f"fork run {run} after iteration {at} as run {new}"
    return attempt(Asked(run, root, will, "completes the fork"), lambda: begin_fork(run, root, at, new, settings))


def begin_fork(run: str, root: str, at: int, new: str, settings: list[str]) -> State[Any]:
    """Fork, unless this flow run has done so.

    Raises:
        InputError: there is no such run or iteration, or the name of the new one is taken.
    """
    store, identity = open_root(root), flow_run.get_id()
    require_run(store, run)
    done = f"run {new} shares iterations 0 to {at} of run {run}"
    if store.exists(layout.run_config_key(check_run_name(new))) and identity and begun_by(store, new) == identity:
        return Completed(message=done)
    record = ConfigRecord.of(forked_config(store, run, new, settings), identity)
    fork(store, WORKFLOW, run, at, new, record.digest, record)
    return Completed(message=done)


@flow(name="verify", flow_run_name=named, persist_result=False, validate_parameters=True)
def verify_runs(root: str, run: str = "") -> State[Any]:
    """Read everything that a run has stored and name what is damaged, missing or orphaned.

    Args:
        root: Storage root: an absolute path, file:///absolute/path or s3://bucket/prefix.
        run: Id of the run. By default all runs of the root.
    """

    def work() -> State[Any]:
        store = open_root(root)
        if run:
            require_run(store, run)
        return show_verified([verify(store, name) for name in ([run] if run else runs(store))])

    return attempt(Asked(run or "*", root, f"verify {f'run {run}' if run else 'all runs'}", _AGAIN), work)


def show_verified(found: list[Verification]) -> State[Any]:
    """Attach a table of what is wrong, and end red if a run is not sound."""
    rows = [{"run": one.run, **each.model_dump(mode="json")} for one in found for each in one.findings]
    create_table_artifact(key=artifact_key("all", "verification"), table=rows, description=f"{len(found)} runs")
    broken = [one.run for one in found if not one.sound]
    if broken:
        return Failed(message=f"not sound: {', '.join(broken)}. The artifact names each object; Retry reads it again")
    return Completed(message=f"sound: {', '.join(one.run for one in found) or 'there is no run'}")


@flow(name="import", flow_run_name=named, persist_result=False, validate_parameters=True)
def import_files(
    run: str,
    root: str,
    files: list[str],
    columns: list[str] = [],  # noqa: B006 - never changed; Prefect shows a default in its form
    temperature: float | None = None,
    without_logprobs: bool = False,
) -> State[Any]:
    """Store samples made elsewhere, each file as an iteration, so that deployment `retrain` can select them.

    Args:
        run: Id of the run that is to hold them.
        root: Storage root: an absolute path, file:///absolute/path or s3://bucket/prefix.
        files: Absolute paths or URLs of .jsonl, .json or .parquet files.
        columns: Columns with another name than what they hold, each as WHAT=COLUMN: reward=score.
        temperature: At which all samples were drawn.
        without_logprobs: They have no log-probabilities: only objectives that need none can train on them.
    """

    def work() -> State[Any]:
        if not files:
            raise InputError("name at least one .jsonl, .json or .parquet file to import")
        made = import_samples(
            open_root(root), ImportOrder(tuple(files), run, mapped(columns), temperature, logprobs=not without_logprobs)
        )
        return Completed(message=f"run {made.run}: {made.samples} samples of {made.groups} prompts")

    places = {f"file {number}": place for number, place in enumerate(files, 1)}
    return attempt(Asked(run, root, f"import {', '.join(files)} as run {run}", _AGAIN, places=places), work)
