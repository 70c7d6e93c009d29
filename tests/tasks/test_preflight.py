"""A run is continued with its first settings, or refused with both values and the command that forks it."""

import os
import shlex

import pyarrow as pa
import pytest

from flows.cli.app import execute
from storage.backends.root import open_root
from storage.errors import InputError
from storage.manifest import Part, commit
from storage.parts import PartWriter
from storage.schema import PROMPTS
from tasks.checks import check_config, prepared_stage
from tasks.config.document import load_config
from tasks.config.stored import record_config
from tasks.stages.names import Stage
from tests.bad_input import models
from tests.bad_input.test_models import CONFIG
from tests.storage.tables import manifest

RUN = "run"
PROMPT = {"prompt": "1+1=", "prompt_tokens": [1], "answer": "2", "record": '{"answer": "2"}'}

FACTS = {"data_digests": {}, "cursor": 0, "stop_tokens": [2], "left_out_tokens": [2], "train_rows": [2]}


@pytest.fixture
def folder(tmp_path):
    """A run with three iterations, whose model was read from `model`."""
    return made(tmp_path)


def made(tmp_path, more=""):
    models.make(tmp_path / "model")
    (tmp_path / "run.toml").write_text(f"{CONFIG}[evaluate]\nevery = 0\n{more}")
    root, config = open_root(str(tmp_path / "runs")), load_config(str(tmp_path / "run.toml"))
    digest = record_config(root, RUN, config)
    writer = PartWriter(root, RUN, 0, Stage.PREPARE)

    def stored(name: str) -> Part:
        part = writer.write_bytes(name, (tmp_path / "model" / name).read_bytes())
        return part.model_copy(update={"name": f"model/{name}"})

    parts = tuple(stored(path.name) for path in sorted((tmp_path / "model").iterdir()))
    train = pa.Table.from_pylist([{**PROMPT, "prompt_id": name} for name in "ab"], PROMPTS)
    parts += (writer.write_table("train.arrow", train, PROMPTS),)
    prepared = commit(root, manifest(Stage.PREPARE, 0, parts, config_digest=digest, facts=FACTS))
    for iteration in range(3):
        inputs = {"prepare": prepared.digest}
        for stage in (Stage.ROLLOUT, Stage.REWARD) if iteration else ():
            scored = commit(root, manifest(stage, iteration, config_digest=digest, inputs=inputs))
            inputs = {**inputs, str(stage): scored.digest}
        state = (PartWriter(root, RUN, iteration, Stage.TRAIN).write_bytes("state", b"weights"),)
        trained = commit(root, manifest(Stage.TRAIN, iteration, state, config_digest=digest, inputs=inputs))
        commit(root, manifest(Stage.WEIGHT_SYNC, iteration, config_digest=digest, inputs={"train": trained.digest}))
    return tmp_path


def check(folder, *settings):
    root = open_root(str(folder / "runs"))
    check_config(load_config(str(folder / "run.toml"), settings), root, prepared_stage(root, RUN))


def test_what_is_unchanged_is_continued(folder):
    check(folder)
    check(folder, "engine.max_num_seqs=2", "run.iterations=9")


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.rename(model.parent / "elsewhere"),
        lambda model: [path.unlink() for path in model.iterdir()],
        lambda model: (model / "notes.txt").write_text("nothing of the model"),
        lambda model: [os.utime(path) for path in model.iterdir()],
    ],
    ids=["away", "empty", "another file", "touched"],
)
def test_a_model_that_is_away_or_the_same_is_no_matter(folder, change):
    change(folder / "model")
    check(folder)


CHANGES = {
    "other weights": (
        lambda model: models.tensor("model.norm.weight", None)(model),
        "model-00001-of-00002.safetensors was there",
    ),
    "one bit": (
        lambda model: flip(model / "model-00002-of-00002.safetensors"),
        "model-00002-of-00002.safetensors had the digest",
    ),
    "configuration": (models.config(rms_norm_eps=1e-5), "config.json had"),
    "a file is gone": (models.without("tokenizer.json"), "tokenizer.json was there when the run was started"),
}


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES)
def test_another_model_is_refused(folder, change, words):
    change(folder / "model")
    with pytest.raises(InputError, match=r"is not the model that run 'run' was started with") as caught:
        check(folder)
    assert words in str(caught.value)
    assert "start a new run with another --run" in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "values"),
    [("rollout.top_p=0.9", ("1.0", "0.9")), ("engine.precision=bf16", ("'fp32'", "'bf16'"))],
)
def test_the_command_makes_the_fork_that_has_the_setting(folder, setting, values):
    with pytest.raises(InputError, match="was started with different settings") as caught:
        check(folder, setting)
    key = setting.partition("=")[0]
    was, now = values
    assert f"{key}: the run was started with {was}, but is now given {now}" in str(caught.value)
    command = shlex.split(str(caught.value).splitlines()[-1])
    assert command[:3] == ["ratchet", "fork", f"{RUN}@2"]
    assert execute(command[1:]) == 0
    root = open_root(str(folder / "runs"))
    forked = load_config(str(folder / "run.toml"), [setting])
    check_config(forked, root, prepared_stage(root, f"{RUN}-fork"))


def test_a_fork_cannot_change_what_iteration_0_fixed(folder):
    with pytest.raises(InputError, match="or start a new run with another --run"):
        check(folder, "warmup.steps=7", "rollout.top_p=0.9")


@pytest.mark.slow
def test_the_reward_is_called_on_the_stored_records(tmp_path):
    (tmp_path / "own.py").write_text("def score(record, response):\n    return float(response == record['answer'])\n")
    folder = made(tmp_path, '[reward]\nfunction = "own.py:score"\n')
    check(folder)
    (tmp_path / "own.py").write_text("def score(record, response):\n    return record['solution']\n")
    with pytest.raises(InputError, match="was called on 2 records before the run, and 4 of 4 calls have no score"):
        check(folder)
    check(folder, "reward.try=false")
