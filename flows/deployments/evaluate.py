"""Deployment `evaluate`: evaluate stored weights of a run, started by a schedule, a person or a program."""

from typing import Annotated, Any, Literal

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed, Failed
from pydantic import Field

from flows.deployments.crashes import LIMIT, too_many_crashes
from flows.deployments.explaining import failed
from flows.deployments.train import is_absolute, warn_of_versions
from flows.evaluating import evaluate_weights
from flows.prefect_tasks import as_task
from flows.views.artifacts import artifact_key
from flows.views.evaluations import EvaluationRecord, evaluation_rows
from storage.errors import InputError, RatchetError
from tasks.config.evaluation import EvaluationSettings

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


def named() -> str:
    """Name of a flow run in the UI."""
    given: dict[str, Any] = flow_run.get_parameters()
    at = given.get("iteration")
    return f"{given['run']}@{'last' if at is None else at}"


@flow(name="evaluate", flow_run_name=named, persist_result=False, validate_parameters=True)
def evaluate(
    run: str,
    root: str,
    iteration: Count | Literal["best"] | None = None,
    samples: Count = 8,
    temperature: Annotated[float, Field(gt=0)] = 1.0,
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0,
    prompts: Positive = 256,
    max_tokens: Positive | None = None,
    table: Literal["held_out", "train"] = "held_out",
    pass_reward: float = 1.0,
    seed: Count = 0,
) -> State[Any]:
    """Evaluate stored weights of a run: pass@1, pass@k, mean reward by data source, greedy and sampled.

    The result is stored with the run, which may go on meanwhile, and shown as a table with the change since the last
    evaluation that asked the same. What is done is not done again, and Retry continues after the last stored part.

    Args:
        run: Id of the run.
        root: Storage root: an absolute path, file:///absolute/path or s3://bucket/prefix.
        iteration: Whose weights: a number, best, or the last one. Its state must be kept.
        samples: Sampled answers to each prompt, beside the greedy one.
        temperature: Of the sampled answers.
        top_p: Nucleus of the sampled answers.
        prompts: How many prompts, from the first.
        max_tokens: Limit on the tokens of an answer; by default the run's.
        table: Which prompts of the run.
        pass_reward: An answer passes if its reward is at least this.
        seed: Of the sampled answers.
    """
    if too_many_crashes():
        message = f"run {run}: the process of its evaluation died {LIMIT + 1} times in a row"
        return Failed(message=f"{message}. Find out why, then press Retry")
    logger = get_run_logger()
    warn_of_versions(logger)
    try:
        if not is_absolute(root):
            raise InputError(f"root is {root!r}: give an absolute path or a URL, because a Retry may start elsewhere")
        settings = EvaluationSettings(
            table=table, prompts=prompts, samples=samples, temperature=temperature, top_p=top_p,
            max_tokens=max_tokens, pass_reward=pass_reward, seed=seed,
        )  # fmt: skip
        which = run if iteration is None else f"{run}@{iteration}"
        record = evaluate_weights(root, which, settings, logger.info, as_task)
    except RatchetError as error:
        return failed(error, run, root)
    show(record)
    passed = record.figures.get("greedy/pass@1")
    return Completed(message=f"iteration {record.iteration} of run {run}: greedy pass@1 {passed}")


def show(record: EvaluationRecord) -> None:
    """Attach the table to the current flow run."""
    since = "" if record.before is None else f"; change since iteration {record.before}"
    create_table_artifact(
        key=artifact_key(record.run, "evaluation"),
        table=evaluation_rows(record),
        description=f"Weights of iteration {record.iteration} of run {record.run}{since}. Stored in {record.stored}",
    )
