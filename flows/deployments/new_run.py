"""Deployment `new-run`: start a run that is described in the form, without a file."""

import functools
import time
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from pydantic import Field, WithJsonSchema

from flows.deployments.attempt import Asked, attempt
from flows.deployments.train import Minutes, begin, owner, waiting
from flows.run import ready
from storage import layout
from storage.backends.root import Root, open_root
from storage.errors import InputError
from storage.ids import check_run_name
from storage.ownership.lease import hold
from storage.upkeep.catalog import names
from tasks.config.document import config_of_tables
from tasks.config.form import section_form
from tasks.config.run import RunConfig
from tasks.config.stored import begun_by, record_config

Positive = Annotated[int, Field(ge=1)]
Table = dict[str, Any]
Tables = dict[str, Table]
"""Settings by section, as the form gives them."""


def named() -> str:
    """Name of a flow run in the UI."""
    return f"{flow_run.get_parameters()['run']} new"


@flow(name="new-run", flow_run_name=named, persist_result=False, validate_parameters=True)
def new_run(
    run: str,
    root: str,
    iterations: Positive,
    model: Annotated[Table, WithJsonSchema(section_form("model"))] = {},  # noqa: B006 - never changed
    data: Annotated[Table, WithJsonSchema(section_form("data"))] = {},  # noqa: B006
    train: Annotated[Table, WithJsonSchema(section_form("train"))] = {},  # noqa: B006
    reward: Annotated[Table, WithJsonSchema(section_form("reward"))] = {},  # noqa: B006
    rollout: Annotated[Table, WithJsonSchema(section_form("rollout"))] = {},  # noqa: B006
    evaluate: Annotated[Table, WithJsonSchema(section_form("evaluate"))] = {},  # noqa: B006
    engine: Annotated[Table, WithJsonSchema(section_form("engine"))] = {},  # noqa: B006
    storage: Annotated[Table, WithJsonSchema(section_form("storage"))] = {},  # noqa: B006
    settings: list[str] = [],  # noqa: B006
    patience_minutes: Minutes = 10.0,
) -> State[Any]:
    """Start a run of Ratchet that is described here. It needs a model, data, the longest sequence and a learning rate.

    Deployment `train` continues it, and starts a run that a file describes.

    Args:
        run: Id of the new run. A name that a run has already is refused.
        root: Storage root: an absolute path, file:///absolute/path or s3://bucket/prefix.
        iterations: How many iterations the run gets; it can be continued beyond them later.
        model: The model.
        data: The prompts.
        train: Optimizer, policy, layout and limits of the trainer.
        reward: How responses are scored.
        rollout: What is sampled in an iteration.
        evaluate: Answers to held-out prompts.
        engine: The rollout engines.
        storage: How long train states are kept.
        settings: Any other settings, each as section.key=value.
        patience_minutes: How long to wait for another process that drives this run.
    """
    sections: Tables = {
        "model": model, "data": data, "rollout": rollout, "reward": reward,
        "train": train, "evaluate": evaluate, "engine": engine, "storage": storage,
    }  # fmt: skip
    deadline, say = time.monotonic() + 60 * patience_minutes, get_run_logger().info

    def work() -> State[Any]:
        store, identity = open_root(root), flow_run.get_id()
        check_new(store, check_run_name(run), identity)
        config = described(run, iterations, settings, sections)
        return waiting(run, functools.partial(begin_new, store, run, config, identity), deadline, say)

    return attempt(Asked(run, root, f"start run {run} and train it for {iterations} iterations"), work)


def described(run: str, iterations: int, settings: list[str], sections: Tables) -> RunConfig:
    """The configuration that the form gives.

    Raises:
        InputError: it cannot be used, or something is missing.
    """
    return config_of_tables(sections, [*settings, f"run.iterations={iterations}"], f"of the new run {run}")


def check_new(store: Root, run: str, identity: str | None) -> None:
    """Refuse the name of a run that something else has begun. One under which nothing was made yet may be used.

    Args:
        identity: of the flow run that asks, which may have begun it before.

    Raises:
        InputError: there is such a run.
    """
    if not store.exists(layout.run_config_key(run)) or not names(store, run, 0).manifests:
        return
    if identity is None or begun_by(store, run) != identity:
        raise InputError(f"run {run!r} exists in {store.url}: give another name, or continue it with `train`")


def begin_new(store: Root, run: str, config: RunConfig, identity: str | None) -> State[Any]:
    """Record the run as this flow run's, and do it.

    Raises:
        InputError: another flow run has begun it meanwhile.
        LeaseHeld: another process drives the run.
        RatchetError: whatever stops the run.
    """
    ready(run, store.url, config)
    with hold(store, run, owner()) as lease:
        check_new(store, run, identity)
        record_config(store, run, config, lease, identity)
        return begin(run, store.url, config, held=lease)
