"""Training on stored samples on the real stack: a run begins with a state of another and trains on its samples."""

import pytest

from storage.backends.root import open_root
from storage.manifest import need
from tasks.stages.names import Stage
from tests.integration.command import RUN, python, ratchet
from tests.pages import examples


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_stored_samples_are_trained_on_and_the_model_is_exported(whole, home, tmp_path):
    code = examples("python.md", "Train on stored samples", {"my-run": RUN, "./runs": whole})
    code = code.replace("epochs=1", "epochs=1, settings=['train.parallel.pipeline=2']")
    done = python(tmp_path, home, "-c", code)
    assert done.code == 0, done.err
    assert int(done.out) >= 2
    first, second = (need(open_root(whole), "again", iteration, Stage.TRAIN) for iteration in (1, 2))
    assert second.inputs["state"] == first.digest
    # the behaviour is another policy's, so importance weights are not all 1
    assert first.metrics["engine_logprob_diff_max"] > 0
    exported = python(tmp_path, home, "-c", examples("python.md", "Use", {"my-run": "again", "./runs": whole}))
    assert exported.code == 0, exported.err
    assert (tmp_path / "my-model" / "config.json").exists()
    checked = ratchet("verify", "again", "--root", whole, "--json", home=home)
    assert checked.json["findings"] == []
