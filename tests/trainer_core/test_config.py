import pytest
from pydantic import ValidationError

from storage.errors import InputError
from trainer_core.config import OptimizerConfig, ParallelConfig, TrainerConfig, check_layout

MODEL = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}


@pytest.mark.parametrize(
    ("parallel", "model", "named"),
    [
        ({"pipeline": 3}, {}, ["layers (4)", "parallel.pipeline = 3", "[1, 2, 4]"]),
        (
            {"pipeline": 2, "virtual_pipeline": 4},
            {},
            ["layers of a rank (2)", "virtual_pipeline = 4", "[2], or leave it out"],
        ),
        (
            {"pipeline": 3, "layers_first_stage": 1},
            {},
            ["layers (4)", "pipeline = 3 and train.parallel.layers_first_stage = 1", "choose one of [2] for"],
        ),
        (
            {"pipeline": 2, "layers_first_stage": 1, "layers_last_stage": 2},
            {},
            ["layers_first_stage = 1 and train.parallel.layers_last_stage = 2", "[3] for train.parallel.layers_last"],
        ),
        (
            {"pipeline": 2, "virtual_pipeline": 2, "layers_last_stage": 3},
            {},
            ["layers of a rank (1)", "virtual_pipeline = 2", "2: leave it out"],
        ),
        ({"tensor": 3}, {}, ["attention heads (8)", "parallel.tensor = 3"]),
        ({"tensor": 4}, {}, ["key-value heads (2)", "parallel.tensor = 4", "[1, 2]"]),
        ({"tensor": 2}, {"intermediate_size": 95}, ["intermediate size (95)", "parallel.tensor = 2"]),
    ],
)
def test_an_impossible_layout_is_refused(parallel, model, named):
    with pytest.raises(InputError) as caught:
        check_layout(ParallelConfig(**parallel), {**MODEL, **model})
    assert all(text in str(caught.value) for text in named)


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"pipeline": 4},
        {"tensor": 2, "pipeline": 2, "data": 5},
        {"pipeline": 3, "layers_first_stage": 2},
        {"pipeline": 2, "layers_first_stage": 1, "layers_last_stage": 3},
        {"context": 3},
    ],
)
def test_a_possible_layout_is_taken(parallel):
    check_layout(ParallelConfig(**parallel), MODEL)


def test_heads_without_groups_are_their_own_key_value_heads():
    model = {name: value for name, value in MODEL.items() if name != "num_key_value_heads"}
    check_layout(ParallelConfig(tensor=8), model)


def test_the_world_is_the_product_of_the_layout():
    assert ParallelConfig(tensor=2, pipeline=3, data=4).world_size == 24
    assert ParallelConfig(tensor=2, context=3, pipeline=3, data=4).world_size == 72


def test_to_a_state_ranks_that_divide_sequences_are_replicas():
    layout = ParallelConfig(tensor=2, context=3, pipeline=2, data=2, layers_first_stage=3, sequence=True)
    assert layout.ranks == ParallelConfig(tensor=2, pipeline=2, data=6)


@pytest.mark.parametrize(
    "settings",
    [
        {"warmup_steps": 10, "decay_steps": 10},
        {"min_learning_rate": 2.0},
        {"learning_rate": -1.0},
        {"learning_rte": 1.0},
        {"min_learning_rate": 0.5},
        {"decay_steps": 7},
        {"decay": "linear", "min_learning_rate": 1.0},
    ],
)
def test_an_impossible_optimizer_is_refused(settings):
    with pytest.raises(ValidationError):
        OptimizerConfig(**{"learning_rate": 1.0, **settings})


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_a_decay_has_an_end(decay):
    OptimizerConfig(learning_rate=1.0, decay=decay, decay_steps=7, min_learning_rate=0.5)


def test_a_configuration_survives_json():
    config = TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-5), max_length=32)
    assert TrainerConfig.model_validate_json(config.model_dump_json()) == config


GAE = {"advantage": {"type": "gae"}}
CRITIC = {"learning_rate": 1e-3}
REWARDS = {"loss": {"type": "reward_model"}}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"policy": GAE}, ['policy.advantage.type = "gae" needs the values of a critic', "add the table critic"]),
        ({"critic": CRITIC}, ['critic has no effect with policy.advantage.type = "grpo"', 'type = "gae"']),
        ({"policy": GAE, "critic": CRITIC, "lora": {"rank": 4}}, ["trains all its weights", "leave critic or lora"]),
        ({"policy": {**GAE, "loss": {"type": "sft"}}, "critic": CRITIC}, ['with loss.type = "sft"', "leave it out"]),
        ({"policy": {**GAE, "loss": {"type": "dpo"}}, "critic": CRITIC}, ['with loss.type = "dpo"', "leave it out"]),
        (
            {"policy": {**GAE, "distill": {"teacher": "folder"}}, "critic": CRITIC},
            ["advantage has no effect with distill.reward_weight = 0", "leave it out"],
        ),
        (
            {"policy": GAE, "critic": {**CRITIC, "clip_values": 0.2}},
            ["clip_values = 0.2 has no effect with mini_batches = 1 and epochs = 1", "raise one of the two"],
        ),
        (
            {"policy": REWARDS},
            ['policy.loss.type = "reward_model" needs the values of a critic', "add the table critic"],
        ),
        (
            {"policy": REWARDS, "critic": {**CRITIC, "updates_alone": 3}},
            ['critic.updates_alone has no effect with policy.loss.type = "reward_model"', "leave it out"],
        ),
        ({"policy": {**REWARDS, "mini_batches": 2}, "critic": CRITIC}, ["mini_batches has no effect", "leave it out"]),
        ({"policy": {**REWARDS, "kl_coefficient": 0.1}, "critic": CRITIC}, ["kl_coefficient has no", "leave it out"]),
        (
            {"policy": REWARDS, "critic": CRITIC, "experts": {"replay": True}},
            ['experts.replay has no effect with policy.loss.type = "reward_model"', "default, experts.replay = false"],
        ),
        (
            {"policy": REWARDS, "critic": CRITIC, "experts": {"auxiliary_loss": 0.1}},
            ["experts.auxiliary_loss has no effect", "leave it out"],
        ),
        ({"policy": {"advantage": {"type": "gae", "gamma": 1.5}}, "critic": CRITIC}, ["gamma", "equal to 1"]),
    ],
)
def test_a_critic_that_is_missing_or_of_no_use_is_refused(given, named):
    document = {"optimizer": {"learning_rate": 1e-3}, "max_length": 8, **given}
    with pytest.raises(ValidationError) as refused:
        TrainerConfig.model_validate(document)
    assert [text for text in named if text not in str(refused.value)] == []


@pytest.mark.parametrize("given", [{"lora": {"rank": 4}}, {"precision": "bf16", "fp8": "tensorwise"}])
def test_a_teacher_has_neither_adapters_nor_fp8(given):
    least = {"optimizer": {"learning_rate": 1e-3}, "max_length": 8}
    teacher = TrainerConfig.model_validate({**least, **given}).of_teacher
    assert (teacher.lora, teacher.fp8) == (None, None)
    assert teacher.max_length == 8
