"""Conversations of the real stack with the calculator: the driver and the host of the environments are killed."""

import subprocess
import sys

import pytest

from storage.backends.root import open_root
from storage.manifest import need
from storage.upkeep.verify import verify
from tasks.stages.names import Stage
from tests.integration.command import PROJECT, RUN, prove

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

KILLS = ["rollout@1:mid-response:flow", "rollout@1:mid-response:environment-0"]
SETTINGS = (
    "warmup.steps=120", "warmup.optimizer.decay_steps=120", "rollout.prompts=8", "rollout.samples=8",
    "rollout.groups_per_part=4", "evaluate.prompts=16",
)  # fmt: skip


def test_turns_tokens_and_rewards_are_those_of_a_run_that_nobody_interrupts(home, tmp_path):
    make = [sys.executable, "-m", "infra.examples.tools.make", str(tmp_path / "tools")]
    subprocess.run(make, check=True, cwd=PROJECT)
    done = prove(tmp_path / "tools/tools.toml", str(tmp_path / "proof"), 1, KILLS, SETTINGS, home)
    assert done.code == 0, done.err + done.out
    assert (done.json["points"], done.json["starts"], done.json["orphans"]) == (KILLS, 2, [])
    interrupted = open_root(str(tmp_path / "proof/interrupted"))
    metrics = need(interrupted, RUN, 1, Stage.ROLLOUT).metrics
    assert metrics["turns_max"] > 1
    assert metrics["environment_failures_exit"] > 0
    assert verify(interrupted, RUN).sound
