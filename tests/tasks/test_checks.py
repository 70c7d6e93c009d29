"""Errors that can be known are refused before anything starts, with the fact and the repair."""

import json
import re

import pytest

from storage.backends.root import open_root
from storage.errors import InputError, StorageUnavailable
from storage.ownership.scratch import socket_folder
from tasks.checks import check_config, model_facts
from tasks.config.document import load_config
from tasks.config.model import GeneratedModel
from tasks.data.generated import generate_model
from tasks.model_checks.fitness import check_fit
from tasks.workers.folders import check_folders

BASE = """
[model.generate]
max_positions = 64
[data.generate]
held_out = 32
[train]
max_length = 32
[train.optimizer]
learning_rate = 1e-3
[engine]
max_model_len = 32
"""


def config_with(tmp_path, *overrides, text=BASE):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load_config(str(path), overrides)


def given_data(tmp_path, lines, *more):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines))
    text = BASE.replace("[data.generate]\nheld_out = 32", f'[data]\ntrain = "{path}"')
    return config_with(tmp_path, "evaluate.every=0", *more, text=text)


def test_a_good_configuration_passes(tmp_path):
    check_config(config_with(tmp_path), open_root(str(tmp_path / "runs")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "fact"),
    [
        ("-tokens.advantages * tokens.logprobs", None),
        ("tokens.logprobs.sum()", "returns Tensor () of torch.float32 as loss"),
        ("os._exit(3)", "the code of the objective in train.policy ended its trial with exit code 3: noise"),
    ],
)
def test_an_objective_of_the_users_own_is_tried(tmp_path, body, fact):
    (tmp_path / "mine.py").write_text(f"import os\ndef loss(tokens): print('noise'); return {body}\n")
    config = config_with(tmp_path, "train.policy.loss.type=custom", "train.policy.loss.function=mine.py:loss")
    root = open_root(str(tmp_path / "runs"))
    if fact is None:
        check_config(config, root)
    else:
        with pytest.raises(InputError, match=re.escape(fact)):
            check_config(config, root)


@pytest.mark.parametrize(
    ("override", "fact"),
    [
        ("train.parallel.pipeline=3", "layers (2) cannot be divided by train.parallel.pipeline = 3"),
        ("train.parallel.tensor=3", "heads (4) cannot be divided by train.parallel.tensor = 3"),
        ("train.parallel.tensor=4", "key-value heads (2) cannot be divided by train.parallel.tensor = 4"),
        ("reward.function=no_such_reward", "'no_such_reward' is unknown"),
        ("reward.function=no.such:thing", "cannot be used: ModuleNotFoundError"),
        ("warmup.steps=5", "warmup.steps is above 0, but there are no solved examples"),
        ("train.policy.mini_batches=9999", "cannot be split into train.policy.mini_batches = 9999"),
        ("engine.max_model_len=65", "engine.max_model_len = 65 is longer than the model's context of 64"),
        ("train.max_length=24", "engine.max_model_len = 32 lets responses grow beyond train.max_length = 24"),
        ("device.kind=cuda", "no GPU is visible"),
        ("data.generate.held_out=100000", "leaves none of the 4095 sums for training"),
        ("reward.arguments.api_key=env:RATCHET_NO_SUCH", "RATCHET_NO_SUCH is not set"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, monkeypatch, override, fact):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(InputError) as caught:
        check_config(config_with(tmp_path, override), open_root(str(tmp_path / "runs")))
    assert fact in str(caught.value)


@pytest.fixture
def divided(tmp_path, monkeypatch):
    """Settings that divide sequences over two cards, on a machine that has these and Transformer Engine."""
    (tmp_path / "transformer_engine.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    return ["device.kind=cuda", "train.parallel.context=2", "train.precision=bf16"]


@pytest.mark.parametrize(
    ("override", "fact"),
    [
        ("device.deterministic=true", "device.deterministic asks for that one: set train.parallel.context = 1"),
        ("train.megatron.attention=unfused", "train.megatron.attention asks for that one"),
        ("train.precision=fp32", "Transformer Engine divides sequences in bf16 alone"),
    ],
)
def test_sequences_are_not_divided_for_kernels_that_cannot(tmp_path, divided, override, fact):
    root = open_root(str(tmp_path / "runs"))
    check_config(config_with(tmp_path, *divided), root)
    with pytest.raises(InputError) as caught:
        check_config(config_with(tmp_path, *divided, override), root)
    assert "train.parallel.context is 2" in str(caught.value)
    assert fact in str(caught.value)


@pytest.mark.parametrize(
    ("model", "fact"),
    [
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 4096},
            "(MistralForCausalLM) has a sliding window of 4096 tokens",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": True},
            "a sliding window of 4096 tokens",
        ),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window": 4096}, "has layers without full attention"),
    ],
)
def test_sequences_are_not_divided_for_models_that_see_only_a_part(tmp_path, divided, model, fact):
    config = config_with(tmp_path, *divided)
    facts = {key: value for key, value in model_facts(config).items() if key != "use_sliding_window"} | model
    check_fit(config, facts, "cpu", "the model")  # without Transformer Engine
    with pytest.raises(InputError) as caught:
        check_fit(config, facts, "cuda", "the model")
    assert fact in str(caught.value)
    assert "set train.parallel.context = 1" in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["loss.type=dpo"],
        ["advantage.type=rloo"],
        ["advantage.type=reinforce_pp", "advantage.baseline=true"],
        ["advantage.type=reinforce_pp", "leave_out_equal_groups=true"],
        ["loss.type=cispo"],
    ],
    ids=str,
)
def test_a_lone_sample_cannot_be_compared(tmp_path, settings):
    store, given = open_root(str(tmp_path / "runs")), [f"train.policy.{setting}" for setting in settings]
    with pytest.raises(InputError, match=r"rollout.samples is 1: raise it to 2 or more"):
        check_config(config_with(tmp_path, *given, "rollout.samples=1"), store)
    check_config(config_with(tmp_path, *given, "rollout.samples=2"), store)


@pytest.mark.parametrize("setting", ["loss.type=sft", "advantage.type=reinforce_pp"])
def test_what_compares_with_all_samples_takes_lone_ones(tmp_path, setting):
    given = [f"train.policy.{setting}", "rollout.samples=1"]
    check_config(config_with(tmp_path, *given), open_root(str(tmp_path / "runs")))


def test_further_prompts_are_drawn_only_where_groups_without_a_spread_are_left_out(tmp_path):
    store, given = open_root(str(tmp_path / "runs")), ("rollout.prompts=2", "rollout.most_prompts=4")
    with pytest.raises(InputError, match=r"most_prompts = 4 draws until 2 prompts .*set train.policy.leave_out_equal"):
        check_config(config_with(tmp_path, *given), store)
    check_config(config_with(tmp_path, *given, "train.policy.leave_out_equal_groups=true"), store)
    check_config(config_with(tmp_path, *given, "train.policy.loss.type=dpo"), store)


EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}
BIASED = {"architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 4}


@pytest.mark.parametrize(
    ("setting", "model", "fact"),
    [
        ("experts.auxiliary_loss=0.1", {}, "auxiliary_loss has no effect with a model without experts"),
        ("experts.bias_update_rate=0.1", {}, "bias_update_rate has no effect with a model without experts"),
        ("parallel.expert_tensor=1", {}, "train.parallel.expert_tensor has no effect with a model without experts"),
        ("experts.bias_update_rate=0.1", EXPERTS, "has no effect with a model whose routers have no biases"),
        ("experts.auxiliary_loss=0.1", EXPERTS, None),
        ("experts.replay=true", {}, "train.experts.replay has no effect with a model without experts"),
        ("experts.replay=true", EXPERTS, None),
        ("experts.bias_update_rate=0.1", BIASED, None),
    ],
)
def test_settings_of_experts_need_a_model_that_has_them(tmp_path, setting, model, fact):
    config = config_with(tmp_path, f"train.{setting}")
    facts = {**model_facts(config), **model}
    if fact is None:
        check_fit(config, facts, "cpu", "the model")
    else:
        with pytest.raises(InputError, match=fact):
            check_fit(config, facts, "cpu", "the model")


def test_fp8_training_takes_sizes_that_16_divides_and_transformer_engine(tmp_path):
    config = config_with(tmp_path, "train.fp8=tensorwise", "train.precision=bf16")
    with pytest.raises(InputError, match=r"not 200 \(intermediate_size of the model\): leave it out"):
        check_fit(config, {**model_facts(config), "intermediate_size": 200}, "cuda", "the model")
    with pytest.raises(InputError, match="is computed by Transformer Engine, which is not installed here"):
        check_fit(config, model_facts(config), "cuda", "the model")


@pytest.mark.parametrize("key", ["engine.quantization=fp8", "train.fp8=tensorwise"])
def test_models_whose_layout_is_not_proven_are_not_quantized(tmp_path, key):
    config = config_with(tmp_path, key, "engine.precision=bf16", "train.precision=bf16")
    with pytest.raises(InputError, match=r'"(fp8|tensorwise)" is proven for .*, and the model is Qwen3MoeForCausalLM'):
        check_fit(config, {**model_facts(config), **EXPERTS}, "cuda", "the model")


def test_a_mistral_that_says_nothing_has_the_window_of_transformers(tmp_path):
    config = config_with(tmp_path)
    facts = {**model_facts(config), "architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}
    facts.pop("use_sliding_window")
    longer = config.model_copy(update={"train": config.train.model_copy(update={"max_length": 4097})})
    check_fit(config, facts, "cpu", "the model")
    with pytest.raises(InputError, match="4097 is longer than the sliding window of 4096"):
        check_fit(longer, facts, "cpu", "the model")
    check_fit(longer, {**facts, "sliding_window": None}, "cpu", "the model")


@pytest.mark.parametrize(("setting", "whole"), [("top_p=0.9", 1), ("top_k=3", 0), ("min_p=0.1", 0)])
def test_log_probabilities_of_cut_off_distributions_are_not_corrected(tmp_path, setting, whole):
    config = config_with(tmp_path, f"rollout.{setting}", "train.policy.correction.type=truncate")
    repair = f"set rollout.{setting.split('=')[0]} to {whole}"
    with pytest.raises(InputError, match=rf"train.policy.correction cannot compare .* {repair}"):
        check_config(config, open_root(str(tmp_path / "runs")))


@pytest.mark.parametrize(
    ("setting", "fact"),
    [
        ('rollout.stop=[""]', "an empty text would end every response at once: leave it out"),
        (f'rollout.stop=["{"x" * 200}","{"é" * 30}"]', "have 260 bytes, and at most 256 are looked for: shorten them"),
        ("rollout.top_k=-1", "greater than or equal to 0"),
        ("rollout.min_p=1", "less than 1"),
    ],
)
def test_settings_of_sampling_that_have_no_meaning_are_refused(tmp_path, setting, fact):
    with pytest.raises(InputError, match=fact):
        config_with(tmp_path, setting)


@pytest.mark.parametrize(
    ("lines", "fact"),
    [
        (['{"prompt": "1+1=", "answer": "2"}', "{broken"], "line 2: not valid JSON"),
        ([], "is empty"),
        (['{"question": "1+1="}'], "field 'prompt' is missing"),
        (['{"prompt": "%s"}' % ("1" * 40)], "is too long: 40 tokens"),
    ],
)
def test_bad_data_is_refused_before_anything_starts(tmp_path, lines, fact):
    with pytest.raises(InputError) as caught:
        check_config(given_data(tmp_path, lines), open_root(str(tmp_path / "runs")))
    assert fact in str(caught.value)


def test_given_data_and_model_pass(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    generate_model(model, GeneratedModel(max_positions=64), seed=0)
    text = BASE.replace("[model.generate]\nmax_positions = 64", f'[model]\nsource = "{model}"')
    text = text.replace("[data.generate]\nheld_out = 32", f'[data]\ntrain = "{tmp_path}/p.jsonl"')
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    check_config(config_with(tmp_path, "evaluate.every=0", text=text), open_root(str(tmp_path / "runs")))


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_a_model_directory_without_a_model(tmp_path, name):
    (tmp_path / "empty").mkdir()
    text = BASE.replace("[model.generate]\nmax_positions = 64", f'[model]\nsource = "{tmp_path / name}"')
    with pytest.raises(InputError, match="give a Hugging Face directory"):
        check_config(config_with(tmp_path, text=text), open_root(str(tmp_path / "runs")))


def test_a_root_that_cannot_be_written(tmp_path):
    blocking = tmp_path / "file"
    blocking.write_text("not a folder")
    with pytest.raises(StorageUnavailable) as caught:
        check_config(config_with(tmp_path), open_root(str(blocking)))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("fault", ["absent", "a file"])
def test_a_temporary_folder_that_cannot_be_written(tmp_path, monkeypatch, fault):
    (tmp_path / "a file").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / fault))
    with pytest.raises(InputError, match="TMPDIR"):
        check_folders()


@pytest.mark.parametrize("variable", ["PREFECT_HOME", "HOME"])
@pytest.mark.parametrize("place", ["/proc/none", "a file/home"])
def test_a_home_that_cannot_be_written_is_named(tmp_path, monkeypatch, variable, place):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PREFECT_HOME", raising=False)
    check_folders()
    monkeypatch.setenv(variable, str(tmp_path / place))
    with pytest.raises(InputError, match=f"home folder {tmp_path / place}: .* Set {variable} to a folder"):
        check_folders()
    monkeypatch.setenv(variable, str(tmp_path))  # the printed repair
    check_folders()


def test_a_temporary_folder_with_a_long_path_is_no_obstacle(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    check_folders()
    with socket_folder() as folder:
        place = folder / "session_2026-11-25_14-40-06_123456_1234567" / "sockets" / "plasma_store"
        assert len(str(place)) <= 107
        assert folder.stat().st_mode & 0o777 == 0o700
        with socket_folder() as second:
            assert second != folder
    assert not folder.exists()


def test_a_root_with_credentials_in_its_url(tmp_path):
    root = open_root("s3://AKIA1:s3cret@bucket/runs")
    with pytest.raises(InputError, match="has credentials in its URL") as caught:
        check_config(config_with(tmp_path), root)
    assert "s3cret" not in str(caught.value)


def test_data_by_reference_is_read_where_the_environment_says(tmp_path, monkeypatch):
    place = tmp_path / "secret.jsonl"
    config = given_data(tmp_path, ['{"prompt": "1+1=", "answer": "2"}'], "data.train=env:RATCHET_TEST_URL")
    root = open_root(str(tmp_path / "runs"))
    monkeypatch.setenv("RATCHET_TEST_URL", str(place))
    with pytest.raises(InputError, match="dataset env:RATCHET_TEST_URL does not exist") as caught:
        check_config(config, root)
    assert "secret" not in str(caught.value)
    (tmp_path / "prompts.jsonl").rename(place)
    check_config(config, root)


def test_a_model_by_reference(tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    generate_model(model, GeneratedModel(max_positions=64), seed=0)
    monkeypatch.setenv("RATCHET_TEST_URL", str(model))
    text = BASE.replace("[model.generate]\nmax_positions = 64", '[model]\nsource = "env:RATCHET_TEST_URL"')
    check_config(config_with(tmp_path, text=text), open_root(str(tmp_path / "runs")))


def test_what_was_checked_is_not_read_again(tmp_path):
    # command line and flow both check, and tokenizing a large data set takes long
    config = given_data(tmp_path, ["{broken"])
    root, data = open_root(str(tmp_path / "runs")), tmp_path / "prompts.jsonl"
    with pytest.raises(InputError, match="not valid JSON"):
        check_config(config, root)
    data.write_text('{"prompt": "1+1=", "answer": "2"}')
    check_config(config, root)
    data.unlink()
    check_config(config, root)
    with pytest.raises(InputError, match="does not exist"):
        check_config(config.model_copy(update={"run": config.run.model_copy(update={"seed": 1})}), root)


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        (["train.policy.loss.type=dpo"], "cannot correct for"),
        ([], 'set train.policy.old_policy to "behaviour"'),
        (["train.policy.old_policy=behaviour", "engine.sleep=true"], "under engine.sleep one gives its memory"),
        (
            ["train.policy.old_policy=behaviour", "train.memory.offload_optimizer=true"],
            "under train.memory one gives its memory",
        ),
    ],
    ids=str,
)
def test_rollouts_ahead_need_a_correction_and_room(tmp_path, settings, fact):
    store = open_root(str(tmp_path / "runs"))
    with pytest.raises(InputError) as caught:
        check_config(config_with(tmp_path, *settings, "rollout.ahead=1"), store)
    assert "rollout.ahead = 1" in str(caught.value)
    assert fact in str(caught.value)
    check_config(config_with(tmp_path, *settings, "rollout.ahead=0"), store)


@pytest.mark.parametrize("setting", ["loss.type=sft", "correction.type=truncate", "old_policy=behaviour"])
def test_rollouts_ahead_go_with_what_corrects_for_older_weights(tmp_path, setting):
    given = [f"train.policy.{setting}", "rollout.ahead=1"]
    check_config(config_with(tmp_path, *given), open_root(str(tmp_path / "runs")))
