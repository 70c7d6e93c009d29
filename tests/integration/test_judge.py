"""A judge on an engine of the run over the real stack: driver and judge are killed, and the scores stay the same."""

import json
import subprocess
import sys

import pytest

from storage.backends.root import open_root
from storage.manifest import need
from storage.parts import read_table
from storage.schema import REWARD
from storage.upkeep.verify import verify
from tasks.stages.names import Stage
from tests.integration.command import PROJECT, RUN, prove, ratchet

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

KILLS = ["reward@2:started:judge-0", "reward@2:parts-done:flow"]
SETTINGS = ("rollout.prompts=8", "evaluate.prompts=4")


def rewards(root):
    tables = [read_table(root, need(root, RUN, number, Stage.REWARD), REWARD, ["reward"]) for number in (1, 2)]
    return [table["reward"].to_pylist() for table in tables]


def test_scores_are_those_of_a_run_that_nobody_interrupts_and_another_rubric_asks_the_judge(home, tmp_path):
    make = [sys.executable, "-m", "infra.examples.chat.make", str(tmp_path / "chat")]
    subprocess.run(make, check=True, cwd=PROJECT)
    done = prove(tmp_path / "chat/judge.toml", str(tmp_path / "proof"), 2, KILLS, SETTINGS, home)
    assert done.code == 0, done.err + done.out
    assert (done.json["points"], done.json["orphans"]) == (KILLS, [])
    whole, interrupted = (open_root(str(tmp_path / "proof" / name)) for name in ("whole", "interrupted"))
    assert rewards(whole) == rewards(interrupted)
    assert len({score for scores in rewards(whole) for score in scores}) > 2
    assert verify(interrupted, RUN).sound
    folder = tmp_path / "proof/interrupted" / RUN / "exchanges"
    before = {path.name for path in folder.iterdir()}
    kept = json.loads(next(folder.iterdir()).read_text())
    assert kept["url"].startswith("engines.judge:")
    again = ["reward", f"{RUN}@2", "--root", str(tmp_path / "proof/interrupted"), "--json"]
    assert ratchet(*again, home=home).json["changed"] == 0
    assert {path.name for path in folder.iterdir()} == before
    other = ratchet(*again, "--set", 'reward.arguments.rubric="{response} is it {answer}"', home=home)
    assert other.code in (0, 1), other.err
    assert other.json["samples"] == 32
    assert {path.name for path in folder.iterdir()} > before
