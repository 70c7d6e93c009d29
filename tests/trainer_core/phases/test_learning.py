"""Three families of objectives teach the demo's model to carry.

Beside every change the tutorial shows a run that learns, and `test_objectives.py` that steps are those of plain code.
"""

import pytest

from tests.trainer_core.phases.demo import make_demo_model, taught
from tests.trainer_core.ranks import run_trainers
from trainer_core.config import OptimizerConfig, PolicyConfig, TrainerConfig

# of the policy gradient, of the likelihood, of preferences
OBJECTIVES = {
    "gspo": {"loss": {"type": "gspo"}, "loss_aggregation": "sequence", "advantage": {"type": "rloo"}},
    "sft": {"loss": {"type": "sft"}},
    "dpo": {"loss": {"type": "dpo", "beta": 0.5}},
}
WARM_UP = OptimizerConfig(learning_rate=2e-3, warmup_steps=20, beta2=0.98, weight_decay=0.01)


@pytest.mark.full
def test_each_family_improves_the_demo(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    make_demo_model(model)
    settings = TrainerConfig(optimizer=OptimizerConfig(learning_rate=2e-4), micro_batch_tokens=4096, max_length=16)
    objectives = {name: PolicyConfig.model_validate({**given, "mini_batches": 4}) for name, given in OBJECTIVES.items()}
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "start").mkdir()
    (found,) = run_trainers(
        str(model), settings, taught, str(model), objectives, (300, 128, WARM_UP), 6, str(tmp_path / "weights")
    )
    for name, (before, after) in found.items():
        assert before < 0.4, name
        assert after > before + 0.15, (name, found)
