"""Deployment `evaluate`: evaluate stored weights of a run, started by a schedule, a person or a program."""

from typing import Annotated, Any, Literal

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed
from pydantic import Field

from flows.deployments.attempt import Asked, attempt, fix
from flows.evaluating import evaluate_weights
from flows.prefect_tasks import as_task
from flows.views.artifacts import artifact_key
from flows.views.evaluations import EvaluationRecord, compared_with, evaluation_rows
from storage.backends.root import open_root
from storage.ids import check_run_name
from tasks.config.evaluation import EvaluationSettings
from tasks.config.numbers import COLDEST
from tasks.export.choice import BEST, choose

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
LAST = "last"
Which = Annotated[str, Field(pattern=rf"^({LAST}|{BEST}(\..+)?|[0-9]+)$")]
"""One field of text: of a choice of types, a page sends only one."""


def named() -> str:
    """Name of a flow run in the UI."""
    given: dict[str, Any] = flow_run.get_parameters()
    return f"{given['run']}@{given.get('iteration', LAST)} evaluated"


@flow(name="evaluate", flow_run_name=named, persist_result=False, validate_parameters=True)
def evaluate(
    run: str,
    root: str,
    iteration: Which = LAST,
    samples: Count = 8,
    temperature: Annotated[float, Field(ge=COLDEST)] = 1.0,
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0,
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
        run: Id of the run.
        root: Storage root: an absolute path, file:///absolute/path or s3://bucket/prefix.
        iteration: Whose weights: last, best, best.reward (by mean reward), or the number of an iteration whose state
            is kept. It becomes that number when the flow run begins, so that a Retry evaluates the same.
        samples: Sampled answers to each prompt, beside the greedy one.
        temperature: Of the sampled answers.
        top_p: Nucleus of the sampled answers.
        prompts: How many prompts, from the first.
        max_tokens: Limit on the tokens of an answer; by default the run's.
        table: Which prompts of the run.
        passing: Which answers pass, as in right >= 1; by default as evaluate.pass of the run says.
        seed: Of the sampled answers.
    """
    logger = get_run_logger()

    def work() -> State[Any]:
        settings = EvaluationSettings(
            table=table, prompts=prompts, samples=samples, temperature=temperature, top_p=top_p,
            max_tokens=max_tokens, passing=passing, seed=seed,
        )  # fmt: skip
        chosen = choose(open_root(root), place_of(run, iteration))
        if chosen.why:
            logger.info("iteration %s is %s", chosen.iteration, chosen.why)
        fix(iteration=f"{chosen.iteration}")
        record = evaluate_weights(root, f"{run}@{chosen.iteration}", settings, logger.info, as_task)
        show(record)
        return Completed(message=f"iteration {record.iteration} of run {run}: {_greedy(record)}")

    will = (
        f"evaluate the weights of run {run}, iteration {iteration}: {prompts} prompts, {samples} sampled answers each"
    )
    return attempt(Asked(run, root, will, "goes on after the last stored part of the evaluation"), work)


def place_of(run: str, iteration: str) -> str:
    """Which weights, as commands name them."""
    return check_run_name(run) if iteration == LAST else f"{check_run_name(run)}@{iteration}"


def _greedy(record: EvaluationRecord) -> str:
    figures = {name: record.figures.get(f"greedy/{name}") for name in ("reward", "pass@1")}
    shown = ", ".join(f"greedy {name} {value:.4g}" for name, value in figures.items() if value is not None)
    return shown or "no answer has a score"


def show(record: EvaluationRecord) -> None:
    """Attach the table to the current flow run."""
    create_table_artifact(
        key=artifact_key(record.run, "evaluation"),
        table=evaluation_rows(record),
        description=f"Weights of iteration {record.iteration} of run {record.run}{compared_with(record)}. "
        f"Stored in {record.stored}",
    )
