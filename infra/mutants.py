"""Puts faults into the code on purpose, one at a time, to see that the tests of CI notice each of them.

    python -m infra.mutants [NAME ...]      all of them if no name is given; --list shows them

Each is a change of a few lines in a copy of the project, and the tests that should notice it. A fault that no test
notices is a gap in the tests. Run it by hand after a change to a promise; it is not part of CI.
"""

import argparse
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from infra.mutants_ahead import AHEAD
from infra.mutants_closed import CLOSED
from infra.mutants_critic import CRITIC
from infra.mutants_endpoint import ENDPOINT
from infra.mutants_engine import ENGINE
from infra.mutants_environments import ENVIRONMENTS
from infra.mutants_evaluate import EVALUATE
from infra.mutants_face import FACE
from infra.mutants_families import FAMILIES
from infra.mutants_hosts import HOSTS
from infra.mutants_inputs import INPUTS
from infra.mutants_judge import JUDGE
from infra.mutants_known import Mutant
from infra.mutants_lora import LORA
from infra.mutants_machine import MACHINE
from infra.mutants_memory import MEMORY
from infra.mutants_models import MODELS
from infra.mutants_objectives import OBJECTIVES
from infra.mutants_operators import OPERATORS
from infra.mutants_origins import ORIGINS
from infra.mutants_own_engine import OWN_ENGINE
from infra.mutants_pages import PAGES
from infra.mutants_plan import PLAN
from infra.mutants_quantized import QUANTIZED
from infra.mutants_responses import RESPONSES
from infra.mutants_retrain import RETRAIN
from infra.mutants_revisions import REVISIONS
from infra.mutants_rewards import REWARDS
from infra.mutants_routes import ROUTES
from infra.mutants_rows import ROWS
from infra.mutants_sampling import SAMPLING
from infra.mutants_scoring import SCORING
from infra.mutants_site import SITE
from infra.mutants_stages import STAGES
from infra.mutants_states import STATES
from infra.mutants_storage import STORAGE
from infra.mutants_store import STORE
from infra.mutants_sync import SYNC
from infra.mutants_tasks import TASKS
from infra.mutants_teacher import TEACHER
from infra.mutants_text import TEXT
from infra.mutants_trainer import TRAINER
from infra.mutants_trainer_core import TRAINER_CORE
from infra.mutants_upkeep import UPKEEP
from infra.mutants_view import VIEW

MUTANTS = (
    *OBJECTIVES,
    *AHEAD,
    *CRITIC,
    *ROUTES,
    *ENGINE,
    *ROWS,
    *SAMPLING,
    *EVALUATE,
    *ENVIRONMENTS,
    *FACE,
    *FAMILIES,
    *HOSTS,
    *INPUTS,
    *LORA,
    *MACHINE,
    *MEMORY,
    *MODELS,
    *OPERATORS,
    *ORIGINS,
    *OWN_ENGINE,
    *ENDPOINT,
    *JUDGE,
    *PAGES,
    *PLAN,
    *QUANTIZED,
    *RESPONSES,
    *RETRAIN,
    *REVISIONS,
    *REWARDS,
    *SCORING,
    *SITE,
    *STAGES,
    *STATES,
    *STORAGE,
    *STORE,
    *CLOSED,
    *TASKS,
    *SYNC,
    *TEACHER,
    *TEXT,
    *TRAINER,
    *TRAINER_CORE,
    *UPKEEP,
    *VIEW,
)
PROJECT = Path(__file__).resolve().parents[1]
_COPIED = (
    "ratchet.py", "flows", "tasks", "trainer_core", "storage", "tests", "infra", "docs", "pyproject.toml", "README.md",
    "LICENSE",
)  # fmt: skip
_LIMIT_S = 900
_EXIT_TESTS_FAILED = 1

logger = logging.getLogger("mutants")


@dataclass(frozen=True)
class Verdict:
    """The outcome of one fault."""

    mutant: Mutant
    noticed: bool
    seconds: float
    by: str
    """The first test that failed, or the reason why there is none."""


def try_out(mutant: Mutant, copy: Path) -> Verdict:
    """Put a fault into the copy, run its tests, and remove it.

    Raises:
        ValueError: the code that the fault changes does not occur exactly once.
    """
    path = copy / mutant.file
    original = path.read_text(encoding="utf-8")
    if original.count(mutant.before) != 1:
        raise ValueError(
            f"{mutant.name}: {mutant.file} has {original.count(mutant.before)} occurrences of {mutant.before!r}"
        )
    path.write_text(original.replace(mutant.before, mutant.after), encoding="utf-8")
    clock = time.monotonic()
    try:
        code, by = _run_tests(mutant, copy)
    finally:
        path.write_text(original, encoding="utf-8")
    return Verdict(mutant, code == _EXIT_TESTS_FAILED, time.monotonic() - clock, by)


def _run_tests(mutant: Mutant, copy: Path) -> tuple[int, str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-m",
        "not full",
        "-p",
        "no:cacheprovider",
        *mutant.tests,
    ]
    try:
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return _EXIT_TESTS_FAILED, f"the tests did not finish within {_LIMIT_S} s"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if not failed and done.returncode == _EXIT_TESTS_FAILED:  # a Python without pytest exits with it too
        raise RuntimeError(f"{mutant.name}: no test failed, but: {done.stdout[-500:]}{done.stderr[-500:]}")
    return done.returncode, failed[0][:140] if failed else f"pytest ended with {done.returncode}"


def copy_of_project(folder: Path) -> Path:
    """A copy of the project for faults."""
    for name in _COPIED:
        source, target = PROJECT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
    return folder


def main() -> int:
    """Try the faults and report; the exit code is the number of unnoticed ones, at most 100."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--list", action="store_true", help="show the names and exit")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    chosen = [mutant for mutant in MUTANTS if not given.names or mutant.name in given.names]
    if given.list:
        for mutant in chosen:
            logger.info("%-40s %s", mutant.name, mutant.what)
        return 0
    with tempfile.TemporaryDirectory(prefix="ratchet-mutants-") as folder:
        copy = copy_of_project(Path(folder))
        verdicts = [_reported(try_out(mutant, copy)) for mutant in chosen]
    survivors = [verdict for verdict in verdicts if not verdict.noticed]
    logger.info("%d of %d faults were noticed", len(chosen) - len(survivors), len(chosen))
    return min(len(survivors), 100)


def _reported(verdict: Verdict) -> Verdict:
    word = "noticed" if verdict.noticed else "SURVIVED"
    logger.info("%-9s %-40s %6.1f s  %s", word, verdict.mutant.name, verdict.seconds, verdict.by)
    return verdict


if __name__ == "__main__":
    sys.exit(main())
