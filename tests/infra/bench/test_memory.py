"""The bench of memory: its output, and that it would notice other updates."""

import json
import subprocess
import sys

import pytest

from infra.bench.cases import CASES
from tests.trainer_core.ranks import run_ranks

pytestmark = pytest.mark.full
SWITCHES = ("offload_parameters", "drop_gradients", "offload_optimizer")


def test_the_command_prints_one_object():
    done = subprocess.run(
        [sys.executable, "-m", "flows", "bench", "memory", "--json", "--case=tiny"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["repeatable"]
    assert found["same_updates"]
    weights = found["drop_gradients"]["gib"]  # fp32, like the gradients
    assert [round(found[switch]["gib"] / weights, 1) for switch in SWITCHES] == [1, 1, 2]
    assert all(found[switch][key] > 0 for switch in SWITCHES for key in ("first_s", "out_s", "back_s"))


def two_lives(rank, world_size, store, folder):
    """The same life, and one in which a switch changes a weight."""
    from pathlib import Path

    from infra.bench.memory import _lived, _trainer
    from tasks.data.generated import generate_model

    case = CASES["tiny"]
    generate_model(Path(folder), case.model, seed=0)
    trainer = _trainer(folder, case, "cpu")

    def broken(switch):
        if switch == "offload_parameters":
            with trainer._model.weights("writable"):
                next(trainer._model.modules[0].parameters()).data[0, 0] += 1e-3

    lives = [_lived(trainer, case, Path(folder), between) for between in (None, lambda _: None, broken)]
    trainer.close()
    return lives


def test_a_switch_that_changes_a_weight_is_noticed(tmp_path):
    ((plain, same, other),) = run_ranks(1, two_lives, str(tmp_path))
    assert same == plain
    assert other.state != plain.state
