"""An exported model is the base with its adapters, as engines were sent it and as transformers computes."""

from collections import namedtuple

import numpy as np
import pytest

from tests.tasks.export.exported import export_run, settings, store_run
from tests.trainer_core.model.test_lora import TARGETS
from tests.trainer_core.models import hugging_face_logprobs, make_family, random_samples, random_sequences
from tests.trainer_core.ranks import run_ranks, run_trainers
from tests.trainer_core.weights.syncing import sync
from trainer_core.config import ExpertsConfig, ParallelConfig
from trainer_core.lora import LoraConfig

pytestmark = pytest.mark.slow
Record = namedtuple("Record", "name digest")


def trained(trainer, folder):
    trainer.import_model()
    trainer.train_policy(random_samples(), 1.0)
    trainer.save(f"{folder}/state")
    received = sync(trainer, folder)["received"]
    return [Record(name, digest) for name, (digest, *_) in (received or {}).items()], trainer.logprobs(
        random_sequences()
    )


@pytest.mark.parametrize(
    ("family", "precision", "parallel"),
    [("qwen3", "bf16", ParallelConfig(tensor=2)), ("deepseek-v3", "fp32", ParallelConfig(pipeline=2))],
)
def test_the_sum_is_exported(tmp_path, family, precision, parallel):
    run_ranks(1, make_family, str(tmp_path / "model"), family)
    experts = ExpertsConfig(bias_update_rate=0.01 if "deepseek" in family else 0.0)
    lora = LoraConfig(rank=4, targets=TARGETS[family])
    given = settings(precision, parallel).model_copy(update={"experts": experts, "lora": lora})
    records, expected = run_trainers(str(tmp_path / "model"), given, trained, str(tmp_path))[0]
    store_run(f"file://{tmp_path}/runs", tmp_path, records)
    (made,) = run_ranks(1, export_run, f"file://{tmp_path}/runs", "run", str(tmp_path / "out"))
    assert made.tensors == len(records)  # the export has compared their digests
    if precision == "fp32":
        (found,) = run_ranks(1, hugging_face_logprobs, str(tmp_path / "out"), random_sequences(), 1.0)
        for ours, theirs in zip(expected, found, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=5e-6)
