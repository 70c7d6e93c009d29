"""Deployments for stored runs: `evaluate`, `choose`, `export`, `fork`, `verify`, `import` and `maintain`."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

import httpx
from prefect import get_run_logger
from prefect.artifacts import create_table_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import PrefectHTTPStatusError
from prefect.runtime import flow_run
from prefect.states import Completed, Failed
from pydantic import Field

from flows.deployments.attempt import Asked, Count, Minutes, Positive, attempt, fix, form, owner
from flows.driving import make_head
from flows.evaluating import evaluate_weights
from flows.maintenance import Maintenance, Upkeep, maintain_root
from flows.server.history import TAG, forget_flow_runs
from flows.subflows import as_task
from flows.views.artifacts import artifact_key
from flows.views.evaluations import EvaluationRecord, compared_with, evaluation_rows
from flows.views.output import count, size
from storage import layout
from storage.backends.root import open_root
from storage.errors import InputError
from storage.ids import check_run_name
from storage.revisions import read_revisions
from storage.upkeep.catalog import require_run, require_runs
from storage.upkeep.fork import Announce
from storage.upkeep.redoing import unfinished
from storage.upkeep.verify import Verification, verify
from tasks.config.credentials import shown_text
from tasks.config.evaluation import EvaluationSettings
from tasks.config.section import COLDEST, settings_of
from tasks.config.stored import begun_by
from tasks.export.order import BEST, ExportFolder, ExportSettings
from tasks.export.order import choose as choose_weights
from tasks.forking import make_fork
from tasks.importing.rows import ImportOrder, mapped
from tasks.importing.samples import import_samples

LAST = "last"
Which = Annotated[str, Field(pattern=rf"^({LAST}|{BEST}(\..+)?|[0-9]+)$")]
"""One field of text: of a choice of types, a page sends only one."""
Days = Annotated[float, Field(gt=0)]

_AGAIN = "does the same again"


def _evaluated() -> str:
    given: dict[str, Any] = flow_run.get_parameters()
    return f"{given['run']}@{given.get('iteration', LAST)} evaluated"


@form("evaluate", _evaluated, EvaluationSettings)
def evaluate(
    run: str,
    root: str,
    iteration: Which = LAST,
    samples: Count = 8,
    temperature: Annotated[float, Field(ge=COLDEST)] = 1.0,
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0,
    top_k: Annotated[int, Field(ge=0)] = 0,
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0,
    prompts: Positive = 256,
    max_tokens: Positive | None = None,
    table: Literal["held_out", "train"] = "held_out",
    passing: str | None = None,
    seed: Count = 0,
) -> State[Any]:
    """Evaluate stored weights of a run: pass@1, pass@k, mean reward by data source, greedy and sampled.

    The result is stored with the run, which may go on meanwhile, and shown as a table with the change since the last
    evaluation that asked the same. What is done is not done again, and Retry continues after the last stored part.

    Args:
        iteration: Weights: last, best, best.reward (by mean reward), or the number of an iteration whose state is kept.
            It becomes that number when the flow run begins, so that a Retry evaluates the same.
    """
    logger = get_run_logger()

    def work() -> State[Any]:
        settings = EvaluationSettings(
            table=table, prompts=prompts, samples=samples, temperature=temperature, top_p=top_p, top_k=top_k,
            min_p=min_p, max_tokens=max_tokens, passing=passing, seed=seed,
        )  # fmt: skip
        chosen = choose_weights(open_root(root), place_of(run, iteration))
        if chosen.why:
            logger.info("iteration %s is %s", chosen.iteration, chosen.why)
        fix(iteration=f"{chosen.iteration}")
        return show_evaluated(evaluate_weights(root, f"{run}@{chosen.iteration}", settings, logger.info, as_task))

    weights = f"the weights of run {run}, iteration {iteration}"
    will = f"evaluate {weights}: {prompts} prompts, {samples} sampled answers each"
    return attempt(Asked(run, root, will, "goes on after the last stored part of the evaluation"), work)


@form("choose", "{run} choose")
def choose_revision(run: str, root: str, revision: Count, reason: str, patience_minutes: Minutes = 10.0) -> State[Any]:
    """Make a revision the head of a run: what the run consists of, and goes on from. The others stay.

    Args:
        revision: Its number, as the page of the flow run that repeated a stage gives it; 0 is the run's first result.
        reason: Reason, which is recorded.
    """
    will = f"make revision {revision} the head of run {run}: {reason}"
    asked = Asked(run, root, will, _AGAIN, patience_minutes=patience_minutes)
    return attempt(asked, lambda: begin_choice(check_run_name(run), root, revision, reason))


def begin_choice(run: str, root: str, revision: int, reason: str) -> State[Any]:
    """Choose, unless that revision is the head and nothing is withdrawn by that. Raises InputError if the run cannot go
    on from it, LeaseHeld if it is driven."""
    store = open_root(root)
    require_run(store, run)
    if not reason.strip():
        raise InputError("a reason is missing: say why; it is recorded with the choice")
    revisions = read_revisions(store, run)
    begun = unfinished(store, run, revisions)
    other = None if begun is None or begun.revision == revision else begun.revision
    if revisions.head == revision and other is None:
        return Completed(message=f"run {run}: revision {revision} is the head already")
    before = make_head(store, run, revision, reason, f"flow run {flow_run.get_name()}", owner())
    stays = f"stays the head: revision {other}, which was not finished, is withdrawn"
    chosen = stays if before == revision else f"is the head, before it was {before}"
    return Completed(message=f"run {run}: revision {revision} {chosen}")


@form("export", "{run} export", ExportSettings)
def export_weights(
    run: str,
    root: str,
    to: str,
    iteration: Which = LAST,
    precision: Literal["as trained", "bf16", "fp32"] = "as trained",
    adapter: bool = False,
    critic: bool = False,
) -> State[Any]:
    """Write a trained model as a Hugging Face folder that transformers and vLLM load.

    Args:
        to: The new folder: an absolute path, or any fsspec URL.
        iteration: Weights: last, best, or the number of an iteration, whose state must be kept.
    """

    will, given = f"export iteration {iteration} of run {run} to {to}", (precision, adapter, critic)
    asked = Asked(run, root, will, "writes the folder again", places={"to": to})
    return attempt(asked, lambda: begin_export(run, root, to, iteration, *given))


def begin_export(
    run: str, root: str, to: str, iteration: str, precision: str, adapter: bool, critic: bool
) -> State[Any]:
    """Export. Raises InputError: there are no such weights, the folder exists, or the settings exclude each other."""
    from tasks.export.export import export_as  # imports torch, and Megatron later

    kind = None if precision == "as trained" else precision
    settings = settings_of(ExportSettings, {"precision": kind, "adapter": adapter, "critic": critic}, "an export")
    store = open_root(root)
    chosen, target = choose_weights(store, place_of(run, iteration)), ExportFolder.new(to)
    fix(iteration=f"{chosen.iteration}")
    made = export_as(store, chosen, target, settings)
    return Completed(message=f"iteration {made.iteration} of run {run} is in {made.folder}, {made.precision}")


@form("fork", "{run} fork")
def fork_run(
    run: str,
    root: str,
    at: Count,
    new: str,
    settings: list[str] = [],  # noqa: B006 - never changed; Prefect shows a default in its form
    revision: Count | None = None,
) -> State[Any]:
    """Make a new run that begins with the past of another, in parts of its own. Deployment `train` continues it.

    Args:
        run: Id of the run to fork.
        at: The last iteration that the new run takes over.
        new: Id of the new run.
        settings: Settings of the new run that differ, each as section.key=value.
        revision: The revision of the run to fork; the head if not given.
    """
    will = f"fork run {run} after iteration {at} as run {new}"
    say = get_run_logger().info
    asked = Asked(run, root, will, "completes the fork")
    return attempt(asked, lambda: begin_fork(run, root, at, new, settings, say, revision))


def begin_fork(
    run: str,
    root: str,
    at: int,
    new: str,
    settings: list[str],
    say: Announce = lambda _: None,
    revision: int | None = None,
) -> State[Any]:
    """Fork, unless this flow run has done so. Raises InputError if there is no such iteration, or the new name is
    taken."""
    store, identity = open_root(root), flow_run.get_id()
    require_run(store, run)
    done = f"run {new} has iterations 0 to {at} of run {run}"
    if store.exists(layout.run_config_key(check_run_name(new))) and identity and begun_by(store, new) == identity:
        return Completed(message=done)
    make_fork(store, run, at, new, settings, revision, identity, say)
    return Completed(message=done)


@form("verify", lambda: f"{flow_run.get_parameters().get('run') or 'all runs'} verify")
def verify_runs(root: str, run: str = "") -> State[Any]:
    """Read everything that a run has stored and name what is damaged, missing or orphaned.

    Args:
        run: Id of the run. By default all runs of the root.
    """

    def work() -> State[Any]:
        store = open_root(root)
        if run:
            require_run(store, run)
        return show_verified([verify(store, name) for name in ([run] if run else require_runs(store))])

    return attempt(Asked(run or "*", root, f"verify {f'run {run}' if run else 'all runs'}", _AGAIN), work)


@form("import", "{run} import")
def import_files(
    run: str,
    root: str,
    files: list[str],
    columns: list[str] = [],  # noqa: B006
    temperature: float | None = None,
    without_logprobs: bool = False,
) -> State[Any]:
    """Store samples made elsewhere, each file as an iteration, so that deployment `retrain` can select them.

    Args:
        run: Id of the run that is to hold them.
        files: Absolute paths or URLs of .jsonl, .json or .parquet files.
        columns: Columns with another name than their content, each as CONTENT=COLUMN: reward=score.
        temperature: Temperature of all samples.
        without_logprobs: They have no log-probabilities: only objectives that need none can train on them.
    """

    def work() -> State[Any]:
        order = ImportOrder(tuple(files), run, mapped(columns), temperature, logprobs=not without_logprobs)
        made = import_samples(open_root(root), order)
        return Completed(message=f"run {made.run}: {made.samples} samples of {made.groups} prompts")

    places = {f"file {number}": place for number, place in enumerate(files, 1)}
    return attempt(Asked(run, root, f"import {', '.join(files)} as run {run}", _AGAIN, places=places), work)


@form("maintain", lambda: f"maintain {shown_text(flow_run.get_parameters()['root'])}")
def maintain(
    root: str,
    runs: list[str] = [],  # noqa: B006
    gc: bool = True,
    compact: bool = True,
    verify: bool = True,
    keep_days: Days | None = 30.0,
) -> State[Any]:
    """Look after all runs of a storage root. Safe at any time, also while runs are driven, and twice at once.

    A run with a problem does not stop the others; the flow run is then red and names each problem.

    Args:
        runs: Only these runs. By default all runs of the root.
        gc: Delete what crashes left behind, also of train states that retention has retired. Beside a process that
            drives a run, only what that process cannot use is deleted.
        compact: Write the samples of new iterations to the run's archive (Parquet), in chunks of 100 iterations.
        verify: Read everything that is stored and compare it with its digests. This takes as long as reading does.
        keep_days: Delete flow runs of this site that ended longer ago than this many days from Prefect's database, with
            their task runs and logs. Runs lose nothing by it. Empty keeps all.
    """
    upkeep, say = Upkeep(gc=gc, compact=compact, verify=verify), get_run_logger().info
    chosen = [name for name, wanted in upkeep.model_dump().items() if wanted] or ["no upkeep"]
    will = f"{', '.join(chosen)} of {', '.join(runs) or 'all runs'}"

    def work() -> State[Any]:
        done = maintain_root(open_root(root), upkeep, runs, lambda line: say("%s", line))
        return show_maintained(done, shown_text(root), forget(keep_days))

    return attempt(Asked(", ".join(runs) or "*", root, will, "looks after all of them again"), work)


def forget(keep_days: float | None) -> str:
    """Delete old flow runs; says what was done, or why it was not."""
    if keep_days is None:
        return "all flow runs are kept"
    try:
        with get_client(sync_client=True) as client:
            count = forget_flow_runs(client, TAG, datetime.now(UTC) - timedelta(days=keep_days))
    except (httpx.TransportError, PrefectHTTPStatusError) as error:
        return f"old flow runs were not deleted ({error}); the next maintenance does it"
    return f"{count} old flow runs were deleted"


def place_of(run: str, iteration: str) -> str:
    return check_run_name(run) if iteration == LAST else f"{check_run_name(run)}@{iteration}"


def show_evaluated(record: EvaluationRecord) -> State[Any]:
    """Attach the table of an evaluation, and end with its greedy figures."""
    text = f"Weights of iteration {record.iteration} of run {record.run}{compared_with(record)}"
    key, rows = artifact_key(record.run, "evaluation"), evaluation_rows(record)
    create_table_artifact(rows, key=key, description=f"{text}. Stored in {record.stored}")
    figures = {name: record.figures.get(f"greedy/{name}") for name in ("reward", "pass@1")}
    shown = ", ".join(f"greedy {name} {value:.4g}" for name, value in figures.items() if value is not None)
    greedy = shown or "no answer has a score"
    return Completed(message=f"iteration {record.iteration} of run {record.run}: {greedy}")


def show_verified(found: list[Verification]) -> State[Any]:
    """Attach a table of what is wrong, and end red if a run is not sound."""
    rows = [{"run": one.run, **each.model_dump(mode="json")} for one in found for each in one.findings]
    create_table_artifact(key=artifact_key("all", "verification"), table=rows, description=f"{len(found)} runs")
    broken = [one.run for one in found if not one.sound]
    if broken:
        return Failed(message=f"not sound: {', '.join(broken)}. The artifact names each object; Retry reads it again")
    sound = ", ".join(one.run for one in found)
    return Completed(message=f"sound: {sound}")


def show_maintained(done: Maintenance, root: str, forgotten: str) -> State[Any]:
    """Attach a table with a row for each run, and end red if one has a problem."""
    rows = [
        {
            "run": one.run, "driven": one.driven, "objects deleted": one.removed, "deleted": size(one.removed_bytes),
            "samples archived": one.archived, "verified": size(one.verified_bytes),
            "problems": "; ".join(one.problems) or "none",
        }
        for one in done.runs
    ]  # fmt: skip
    create_table_artifact(key=artifact_key(root.lower(), "maintenance"), table=rows, description=f"Upkeep of {root}")
    problems = [f"run {one.run}: {text}" for one in done.runs for text in one.problems]
    if problems:
        return Failed(message="\n\n".join([f"{count(len(problems), 'problem')} in {root}", *problems]))
    return Completed(message=f"no problem in {count(len(done.runs), 'run')}; {forgotten}")
