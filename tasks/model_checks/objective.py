"""Check of an objective of the user's own, before anything expensive starts."""

import functools
import subprocess
import sys

from storage.errors import InputError
from tasks.config.environment import scoring_environment
from trainer_core.objectives.objective_config import PolicyConfig

_DEADLINE_S = 300


def check_objective(policy: PolicyConfig) -> None:
    """Try code of the user's own on a few tokens, in a process of its own; built-in objectives need no trial.

    Raises:
        InputError: it cannot be imported or called, or returns something unusable.
    """
    if policy.runs_user_code:
        _tried(policy.model_dump_json())


@functools.lru_cache(maxsize=1)  # the command line and the flow both check; a refusal is not cached
def _tried(document: str) -> None:
    command = [sys.executable, "-P", "-m", "trainer_core.objectives.trial"]
    try:
        found = subprocess.run(
            command, input=document, capture_output=True, text=True, timeout=_DEADLINE_S, env=scoring_environment([])
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"the objective in train.policy did not end on 15 tokens within {_DEADLINE_S} s: correct its function"
        ) from None
    if found.returncode:
        said = found.stderr.strip()[-1000:]
        raise InputError(f"the trial of the objective in train.policy ended with code {found.returncode}: {said}")
    if found.stdout:
        raise InputError(f"{found.stdout}. Nothing was started: correct it, or name another objective")
