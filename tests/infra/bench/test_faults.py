"""The bench of failures: seconds from a kill to the next gradient, by step, and a whole run of it."""

import json
import subprocess
import sys

import pytest

from infra.bench.faults import STEPS, Faults, settings_of, steps_of
from infra.bench.faults_rank import Mark


def test_a_step_ends_with_the_last_rank_and_a_gradient_before_the_death_is_noticed_does_not_count():
    marks = [("gradient", 9.0), ("killed", 10.0), ("gradient", 10.1), ("noticed", 11.0), ("asked", 12.5),
             ("process", 12.6), ("process", 15.0), ("imported", 12.7), ("imported", 21.0), ("met", 22.0), ("met", 22.5),
             ("built", 23.0), ("loaded", 24.0), ("gradient", 26.0), ("gradient", 26.5), ("noticed", 99.0)]  # fmt: skip
    found = steps_of([Mark(what=what, at=at) for what, at in marks], 10.0)
    assert list(found) == list(STEPS)
    assert list(found.values()) == pytest.approx([1.0, 1.5, 2.5, 6.0, 1.5, 0.5, 1.0, 2.0])


@pytest.mark.parametrize(("device", "waiting"), [("cpu", 1), ("cuda", 3)])
def test_on_cards_a_process_waits_for_each_rank_because_all_of_them_end_with_one(device, waiting):
    order = Faults(iterations=2, every=2, seconds=0, ranks=3)
    assert f"workers.standby={waiting}" in settings_of("standby", order, device, ())
    assert not any("standby" in one for one in settings_of("apart", order, device, ()))


@pytest.mark.full
def test_runs_with_failures_end_in_the_bits_of_the_undisturbed_one():
    command = [sys.executable, "-m", "flows", "bench", "faults", "--json", "--iterations=2", "--every=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sides = json.loads(done.stdout.splitlines()[-1])["sides"]
    assert {name: (one["kills"], one["starts"], one["differences"]) for name, one in sides.items()} == {
        "undisturbed": (0, 1, None),
        "everything": (1, 2, 0),
        "apart": (1, 1, 0),
        "standby": (1, 1, 0),
    }
