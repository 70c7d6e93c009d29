"""Bad prompts and tokenizers: the exit code, the message, and proof that nothing heavy was imported for it."""

import json

import pytest

from tasks.config.model import GeneratedModel
from tasks.data.backends import GENERATED
from tasks.data.generated import generate_model
from tests.tasks.data.chat_model import TEMPLATE

CONFIG = """\
[model.generate]
[data]
train = "prompts.jsonl"
[engine]
max_model_len = 64
[train]
max_length = 64
[train.optimizer]
learning_rate = 1e-3
"""
GOOD = '{"prompt": "1+1=", "answer": "2"}\n'
CHAT = '{"prompt": [{"role": "user", "content": "1+1"}]}\n'

# content of prompts.jsonl, settings, message
FILES = {
    "no such file": (
        None,
        [],
        ["prompts.jsonl does not exist", "give the path or URL of a JSONL, JSON, CSV or Parquet file"],
    ),
    "no such pattern": (GOOD, ["data.train=part-*.jsonl"], ["part-*.jsonl does not exist"]),
    "no such data set": (GOOD, ["data.train=org/words"], ["org/words does not exist as a file", "needs a split"]),
    "empty": ("", [], ["is empty: give at least one record"]),
    "not JSON": (GOOD + "{", [], ["prompts.jsonl, line 2: not valid JSON"]),
    "no object": ("[1]\n", [], ["line 1: a list where an object is expected"]),
    "not Parquet": (GOOD, ['data.train=[{source="prompts.jsonl", format="parquet"}]'], ["is not a Parquet file"]),
    "not CSV": ("id,prompt\n1\n", ['data.train={source="prompts.jsonl", format="csv"}'], ["line 2: fewer fields"]),
    "no such field": (
        GOOD,
        ["data.prompt_field=question"],
        ["field 'question' is missing", "fields are prompt, answer"],
    ),
    "a number": ('{"prompt": 5}\n', [], ["record 1: field 'prompt' is 5"]),
    "a list of answers": (
        GOOD + '{"prompt": "1", "answer": ["1"]}',
        [],
        ["prompts.jsonl, record 2: field 'answer' is ["],
    ),
    "half a character": ('{"prompt": "1", "x": "\\ud83d"}', [], ["prompts.jsonl, record 1: field 'x' is '\\ud83d'"]),
    "messages of Python": (
        """{"prompt": "[{'role': 'user'}]"}""",
        [],
        ["record 1: field 'prompt' looks like messages"],
    ),
    "no such field to leave out": (GOOD, ["data.leave_out=['x']"], ["no record has the field 'x'", "data.leave_out"]),
    "twice": ('{"id": 1, "prompt": "1"}\n' * 2, [], ["the id '1' occurs twice", "record 1 and", "record 2. Make ids"]),
    "too long": ('{"prompt": "%s"}\n' % ("1" * 60), [], ["is too long: 60 tokens", 'data.overlong = "drop"']),
    "nothing left": ('{"prompt": "%s"}\n' % ("1" * 60), ["data.overlong=drop"], ["all 1 prompts are too long"]),
    "messages for no chat model": (CHAT, [], ["the model's tokenizer has no chat template", "use a chat model"]),
    "a column that is not there": (
        GOOD,
        ["data.prompt='{question}'"],
        ["names the field 'question'", "prompt, answer"],
    ),
    "a template without a field": (
        GOOD,
        ["data.prompt=question"],
        ["data.prompt", "'question': put the name of a field in braces"],
    ),
    "half a brace": (GOOD, ["data.prompt='{question'"], ["data.prompt", "is not a template"]),
    "hold out all": (GOOD, ["data.hold_out=1"], ["data.hold_out = 1 leaves none of the 1 different prompts"]),
    "held out twice": (GOOD, ["data.hold_out=1", "data.held_out=a"], ["data.hold_out = 1 and data.held_out exclude"]),
    "nothing to evaluate": (GOOD, ["evaluate.every=1"], ["there are no held-out prompts: set data.hold_out"]),
    "one name twice": (GOOD, ['data.train=["prompts.jsonl", "prompts.jsonl"]'], ["two sources are called 'prompts'"]),
    "no source": (GOOD, ["data.train=[]"], ["data.train", "names no source"]),
    "unknown key": (GOOD, ['data.train=[{source="a", weigth=2}]'], ["data.train.0.weigth: unknown key", "weight"]),
    "no weight": (GOOD, ['data.train=[{source="a", weight=0}]'], ["data.train.0.weight", "greater than 0"]),
    "a secret": (GOOD, ['data.train=[{source="https://u:sk-4711@h/a"}]'], ["URL with credentials", "env:NAME"]),
    "no such token": (GOOD, ["rollout.stop_tokens=['</s>']"], ["rollout.stop_tokens: '</s>' is not a token"]),
    "no stop token": (GOOD, ["rollout.stop_tokens=[]"], ["no stop token is known"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("lines", "settings", "words"), FILES.values(), ids=FILES)
def test_bad_prompts_are_refused(command, tmp_path, lines, settings, words):
    (tmp_path / "run.toml").write_text(CONFIG)
    if lines is not None:
        (tmp_path / "prompts.jsonl").write_text(lines)
    before = {path.name for path in tmp_path.iterdir()}
    outcome = command(["check", "run.toml", *(f"--set={setting}" for setting in settings)], tmp_path)
    assert outcome.code == 2, outcome.said
    assert all(word in outcome.said for word in words), outcome.said
    assert "sk-4711" not in outcome.said
    assert outcome.imported == []
    assert {path.name for path in tmp_path.iterdir()} == before


MODELS = {
    "no tokenizer": ("tokenizer.json", ["has no tokenizer.json"]),
    "a refused role": (None, ["record 1: the tokenizer's chat template refuses the messages: unknown role"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("without", "words"), MODELS.values(), ids=MODELS)
def test_bad_tokenizers_are_refused(command, tmp_path, without, words):
    model = tmp_path / "model"
    model.mkdir()
    generate_model(model, GeneratedModel(max_positions=64), seed=0)
    (model / "tokenizer_config.json").write_text(json.dumps({**GENERATED, "chat_template": TEMPLATE}))
    if without is not None:
        (model / without).unlink()
    (tmp_path / "run.toml").write_text(CONFIG.replace("[model.generate]", '[model]\nsource = "model"'))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": [{"role": "judge", "content": "1"}]}))
    outcome = command(["check", "run.toml"], tmp_path)
    assert outcome.code == 2, outcome.said
    assert all(word in outcome.said for word in words), outcome.said
    assert "ratchet-tokenizer" not in outcome.said  # no temporary folder
    assert outcome.imported == []
