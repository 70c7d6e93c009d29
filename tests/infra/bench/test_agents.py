"""The bench of conversations: its output, and that the engine keeps the turns of all sessions."""

import json
import subprocess
import sys

import pytest


@pytest.mark.full
def test_the_command_prints_one_object_and_no_turn_is_computed_again():
    command = ["bench", "agents", "--json", "--case=tiny", "--pairs=1", "--sessions=8", "--tokens=32"]
    done = subprocess.run([sys.executable, "-m", "flows", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["prefix_cache_hits"] >= 0.9
    assert min(found[key] for key in ("tokens_per_s", "bare_tokens_per_s", "rollout_ms", "harness_ms")) > 0
    assert found["engine_ratio"] > 0.5
    assert found["rollout_ms"] == pytest.approx(1000 * found["rollout_s"] / 32)
