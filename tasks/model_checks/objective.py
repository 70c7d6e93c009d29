"""Checks of objectives and engines of the user's own, before anything expensive starts."""

import functools
import subprocess
import sys

from storage.errors import InputError
from tasks.config.environment import scoring_environment
from tasks.config.run import EngineSection
from trainer_core.objectives.objective_config import PolicyConfig

_DEADLINE_S = 300


def check_objective(policy: PolicyConfig) -> None:
    """Try code of the user's own on a few tokens, in a process of its own; built-in objectives need no trial. Raises
    InputError: it cannot be imported or called, or returns something unusable."""
    if policy.runs_user_code:
        _tried("trainer_core.objectives.trial", policy.model_dump_json(), "objective in train.policy")


def check_engine(section: EngineSection) -> None:
    """Import an engine of the user's own in a process of its own, and compare it with `EngineProtocol`. Raises
    InputError: it cannot be imported, or lacks a method."""
    if section.function is not None:
        table = section.model_dump_json(include={"function", "source"})
        _tried("tasks.engine.own", table, "engine in engine.function")


@functools.lru_cache(maxsize=2)  # the command line and the flow both check; a refusal is not cached
def _tried(program: str, document: str, what: str) -> None:
    command = [sys.executable, "-P", "-m", program]
    try:
        found = subprocess.run(
            command, input=document, capture_output=True, text=True, timeout=_DEADLINE_S, env=scoring_environment([])
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"the trial of the {what} did not end within {_DEADLINE_S} s: correct its function") from None
    if found.returncode:
        said = found.stderr.strip()[-1000:]
        raise InputError(f"the trial of the {what} ended with code {found.returncode}: {said}")
    if found.stdout:
        raise InputError(f"{found.stdout}. Nothing was started: correct it, or name another")
