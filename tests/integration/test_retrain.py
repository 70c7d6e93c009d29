"""Training on stored samples on the real stack: a run begins with a state of another and trains on its samples."""

import pytest

from storage.backends.root import open_root
from storage.manifest import need
from tasks.stages.names import Stage
from tests.integration.command import RUN, ratchet


@pytest.mark.slow
def test_stored_samples_are_trained_on_and_the_model_is_exported(whole, home, tmp_path):
    root, _ = whole
    given = ["--from", f"{RUN}@1", "--select", RUN, "--where", "length(response_tokens) > 1", "--samples", "64"]
    given += ["--set", "train.parallel.pipeline=2"]
    done = ratchet("retrain", "again", *given, "--root", str(root), "--json", home=home)
    assert done.code == 0, done.err
    assert done.json["iterations"] >= 2
    first, second = (need(open_root(str(root)), "again", iteration, Stage.TRAIN) for iteration in (1, 2))
    assert second.inputs["state"] == first.digest
    # the behaviour is another policy's, so importance weights are not all 1
    assert first.metrics["engine_logprob_diff_max"] > 0
    exported = ratchet("export", "again", "--to", str(tmp_path / "model"), "--root", str(root), "--json", home=home)
    assert exported.code == 0, exported.err
    assert (tmp_path / "model" / "config.json").exists()
    checked = ratchet("verify", "again", "--root", str(root), "--json", home=home)
    assert checked.json["findings"] == []
