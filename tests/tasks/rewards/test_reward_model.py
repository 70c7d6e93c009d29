"""A reward model on an engine of the run: it scores the tokens of prompt and response, and its death gives no score."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from storage.backends.root import open_root
from storage.errors import InputError, WorkerLost
from storage.manifest import find, need
from storage.parts import read_table, row_views
from storage.schema import EVALUATION, REWARD, ROLLOUT
from storage.upkeep.verify import verify
from tasks.checks import check_config
from tasks.config.model import GeneratedModel, ModelSection
from tasks.data.models import classifier_config, fill_model_directory, folder_gives_values
from tasks.engine.protocol import EngineSpec, ValuesProtocol
from tasks.engine.vllm.classifier import pooling_arguments
from tasks.rewards.reward_model import RewardModel, valued
from tasks.rewards.scoring import notices
from tasks.stages.names import Stage
from tasks.stages.scored import judges_of
from tasks.stages.trial import try_reward
from tasks.stages.views import Prepared
from tasks.workers.interface import EngineHandle
from tests.small.config import small_config
from tests.small.driving import RUN, driver
from tests.small.here import GroupHere, WorkersHere, context_here

LONGEST, HIDDEN = 32, 16


def value(sequence) -> float:
    """A number that depends on each token and its place."""
    return float(np.float32(np.dot(np.arange(1, len(sequence) + 1) ** 2, np.asarray(sequence, np.int64) + 1) % 997))


class Valuing(ValuesProtocol):
    """Gives such numbers; `lost` at a call."""

    def __init__(self, lost=None):
        self.lost, self.asked = lost, []

    def values(self, sequences):
        if self.lost is not None and len(self.asked) == self.lost:
            raise WorkerLost("engine judge was killed")
        self.asked.append(len(sequences))
        return np.array([value(one) for one in sequences], np.float32)


class ScoringWorkers(WorkersHere):
    """Small workers, and an engine with a reward model."""

    def __init__(self, config, lost=None):
        super().__init__(config)
        self.engine = Valuing(lost)
        self.handle = EngineHandle(GroupHere([self.engine], self.calls.append), config.workers)

    def judge(self, model_dir):
        assert folder_gives_values(str(model_dir))
        return self.handle


def made(folder: Path, seed=7, **facts) -> Path:
    """Folder of a reward model with the tokens of the small run's model."""
    folder.mkdir()
    generated = GeneratedModel(layers=1, hidden=HIDDEN, intermediate=16, heads=2, max_positions=LONGEST)
    fill_model_directory(folder, ModelSection(generate=generated), seed)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file({**tensors, "score.weight": np.ones((1, HIDDEN), np.float32)}, folder / "model.safetensors")
    config = classifier_config(json.loads((folder / "config.json").read_text()), (1,))
    (folder / "config.json").write_text(json.dumps({**config, **facts}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return made(tmp_path_factory.mktemp("models") / "scores")


def config_of(model, *more):
    settings = (
        f'engines.judge.source="{model}"', 'reward.function="reward_model"', f"engines.judge.max_model_len={LONGEST}",
        f"engine.max_model_len={LONGEST}", "run.iterations=1", *more,
    )  # fmt: skip
    return small_config(settings)


def stored(root, stage, schema):
    return read_table(root, need(root, RUN, 1, stage), schema)


def test_the_reward_is_the_value_behind_the_whole_of_prompt_and_response(model, tmp_path):
    config, root = config_of(model), open_root(str(tmp_path / "root"))
    driver(root, config, tmp_path / "a", workers=ScoringWorkers(config)).drive()
    rollout, rewards = stored(root, Stage.ROLLOUT, ROLLOUT), stored(root, Stage.REWARD, REWARD)
    prompts, responses = row_views(rollout["prompt_tokens"]), row_views(rollout["response_tokens"])
    wanted = [value(np.concatenate(pair)) for pair in zip(prompts, responses, strict=True)]
    assert rewards["reward"].to_pylist() == wanted
    assert len(set(wanted)) > 4
    assert stored(root, Stage.EVALUATE, EVALUATION)["reward"].null_count == 0
    assert not (tmp_path / "root" / RUN / "exchanges").exists()
    with context_here(root, config, tmp_path / "b", RUN, workers=ScoringWorkers(config)) as context:
        judges = judges_of(context, Prepared(need(root, RUN, 0, Stage.PREPARE)))
        assert try_reward(root, RUN, 1, config.reward, judges).changed == 0


def test_a_killed_engine_gives_no_score_and_the_same_afterwards(model, tmp_path):
    config, whole, root = config_of(model), *(open_root(str(tmp_path / name)) for name in ("whole", "root"))
    driver(whole, config, tmp_path / "a", workers=ScoringWorkers(config)).drive()
    with pytest.raises(WorkerLost, match="was killed"):
        driver(root, config, tmp_path / "b", workers=ScoringWorkers(config, lost=1)).drive()
    assert find(root, RUN, 1, Stage.REWARD) is None
    driver(root, config, tmp_path / "c", workers=ScoringWorkers(config)).drive()
    assert stored(root, Stage.REWARD, REWARD).equals(stored(whole, Stage.REWARD, REWARD))
    assert verify(root, RUN).sound


def test_what_has_no_value_is_null_with_a_reason():
    asked = []
    model = RewardModel(4, lambda some: asked.extend(map(len, some)) or np.array([1.5, np.nan, np.inf], np.float32))
    scores = valued([np.ones(length, np.int32) for length in (2, 5, 4, 3)], model)
    assert [(one.reward, one.reason) for one in scores] == [
        (1.5, None), (None, "exception"), (None, "non_finite"), (None, "non_finite"),
    ]  # fmt: skip
    assert "5 tokens, and engines.judge.max_model_len is 4: raise it" in scores[1].detail
    assert asked == [2, 4, 3]
    with pytest.raises(InputError, match=r"no engine in this run: .* engines.judge.source"):
        valued([np.ones(2, np.int32)], None)


def test_an_engine_that_repeats_its_results_reads_one_sample_at_a_time():
    spec = EngineSpec(model_dir="scores", max_model_len=8, max_num_seqs=5)
    assert [pooling_arguments(one)["max_num_seqs"] for one in (spec, spec.model_copy(update={"together": False}))] == [
        1, 5,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (['engines.judge.source="nowhere"'], "engines.judge.source nowhere does not exist"),
        (["engine.max_model_len=128"], "engines.judge.max_model_len = 32, and the reward model has no score for these"),
        (['reward.function="judge"', 'reward.arguments.rubric="{response}"'],
         r'needs a chat model, and engines.judge.source is a Qwen3ForSequenceClassification: set "reward_model"'),
        (['reward.function="exact_match"'], "has no effect, because no reward asks that engine"),
        (["reward.arguments.scale=2"], "has no parameter 'scale'"),
        (["engines.judge.max_model_len=64"], "has a context of 32 tokens, but engines.judge.max_model_len is 64"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_before_the_run(model, tmp_path, settings, told):
    with pytest.raises(InputError, match=told):
        check_config(config_of(model, *settings), open_root(str(tmp_path)))


def test_folders_that_are_no_reward_model_of_this_run_are_refused(model, tmp_path):
    def refused(folder, told):
        with pytest.raises(InputError, match=told):
            check_config(config_of(folder), root)

    root = open_root(str(tmp_path / "root"))
    check_config(config := config_of(model), root)
    assert "its reward model is an engine" in notices(config.reward)[0]
    refused(made(tmp_path / "classes", id2label={"0": "a", "1": "b"}), "tells 2 classes apart")
    refused(made(tmp_path / "default", id2label=None), "tells 2 classes apart")
    refused(made(tmp_path / "causal", architectures=["Qwen3ForCausalLM"]), "reward_model' needs a reward model, and")
    folder = made(tmp_path / "headless")
    tensors = load_file(folder / "model.safetensors")
    score = tensors.pop("score.weight")
    save_file(tensors, folder / "model.safetensors")
    refused(folder, r"score.weight of the shape \[1, 16\], and the weights lack it: take a folder that")
    save_file({**tensors, "score.weight": np.ones((2, HIDDEN), np.float32)}, folder / "model.safetensors")
    refused(folder, r"have it with the shape \[2, 16\]")
    save_file({**tensors, "score.weight": score, "score.bias": np.ones(1, np.float32)}, folder / "model.safetensors")
    refused(folder, "score.bias, which vLLM adds and transformers does not: remove it")
    folder = made(tmp_path / "other")
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"7": 10', '"x": 10').replace('"7":10', '"x":10'))
    refused(folder, "another tokenizer than the model: token 10 is '7' .* Choose a reward model with the model's")
    with pytest.raises(InputError, match=r"has no model that scores: give the folder of a reward model as engines"):
        check_config(small_config(['reward.function="reward_model"']), root)


def test_the_padding_that_may_end_a_response_is_left_out():
    facts = {"architectures": ["LlamaForCausalLM"], "pad_token_id": 2, "num_labels": 2}
    assert classifier_config(facts, (1, 2))["pad_token_id"] is None
    kept = classifier_config(facts, (1,))
    assert (kept["pad_token_id"], kept["architectures"]) == (2, ["LlamaForSequenceClassification"])
    assert len(kept["id2label"]) == 1
    assert "num_labels" not in kept
