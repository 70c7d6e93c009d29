"""Output of `ratchet check-sync` on a comparison, and its refusals before anything starts."""

import pytest

from flows.cli.app import execute
from flows.cli.weights import _synced
from tasks.sync_check import CheckedEngine, CheckedSync

GOOD = CheckedEngine(name="engine-0", weight_version=3, weights_digest="d" * 32, differing=())
BAD = CheckedEngine(
    name="engine-1",
    weight_version=3,
    weights_digest="e" * 32,
    differing=tuple(f"model.layers.{layer}.weight" for layer in range(10)),
    problem="it holds weights e, but d were served",
)


def compared(*engines, stored="equal"):
    return CheckedSync(run="run", iteration=3, weights_digest="d" * 32, stored=stored, engines=engines)


def test_engines_that_differ_are_told_with_tensors():
    found = compared(GOOD, BAD)
    assert not found.equal
    assert _synced(found) == [
        f"run run, iteration 3: weights {'d' * 32}; the stored state gives them",
        "engine-0: serves them",
        "engine-1: it holds weights e, but d were served",
        f"  differing: {', '.join(BAD.differing[:8])} and 2 more",
    ]


@pytest.mark.parametrize(("stored", "equal"), [("equal", True), ("not compared", True), ("different", False)])
def test_a_stored_state_that_gives_other_weights_is_no_good_either(stored, equal):
    found = compared(GOOD, stored=stored)
    assert found.equal is equal
    assert ("ratchet verify" in _synced(found)[0]) is not equal


def test_a_run_that_is_not_there_is_refused(tmp_path, capfd):
    assert execute(["check-sync", "nobody@3", "--root", f"file://{tmp_path}"]) == 2
    assert "nobody" in capfd.readouterr().err
