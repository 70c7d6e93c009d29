"""`ratchet check` shows what a run would be, and neither starts nor writes anything."""

import json

import pytest

from flows.cli.app import execute
from flows.views.needs import needs_of
from tasks.config.document import parse_config

CONFIG = """\
[run]
iterations = 10
[model.generate]
[data]
train = "prompts.jsonl"
hold_out = 2
[engine]
max_model_len = 64
[train]
max_length = 64
[train.optimizer]
learning_rate = 1e-3
[storage]
keep_newest = 2
keep_every = 5
"""


@pytest.fixture
def checked(tmp_path, monkeypatch, capfd):
    """Checks the configuration in its folder and returns what is said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(6)))

    def check(*arguments):
        before = sorted(tmp_path.rglob("*"))
        assert execute(["check", "run.toml", *arguments]) == 0
        assert sorted(tmp_path.rglob("*")) == before
        return capfd.readouterr().out

    return check


def test_a_prompt_is_shown_with_its_tokens(checked):
    said = checked()
    assert "+|1|=" in said
    assert "stop tokens: 1 '<eos>'" in said
    assert "train            4 from prompts" in said
    assert "held_out         2 from hold_out" in said
    assert said.splitlines()[-1] == "the configuration can be run"


def test_the_result_as_json(checked):
    found = json.loads(checked("--json", "--set=data.overlong=drop", "--set=rollout.max_tokens=60"))
    assert "".join(token["text"] for token in found["example"]["tokens"]) == found["example"]["prompt"]
    assert [(one["table"], one["prompts"], one["dropped"]) for one in found["sources"]] == [
        ("train", 4, 0),
        ("held_out", 2, 0),
    ]
    assert (found["longest"], found["context"]) == (4, 64)
    assert found["needs"]["states_kept"] == 4  # 0, 5, 9 and 10


def test_what_processes_take():
    document = {
        "model": {"generate": {}},
        "data": {"generate": {}},
        "train": {
            "max_length": 128,
            "precision": "bf16",
            "optimizer": {"learning_rate": 1e-3},
            "parallel": {"tensor": 2, "context": 2, "data": 2},
        },
        "engine": {"kv_cache_mib": 3, "precision": "bf16"},
    }
    needs = needs_of(parse_config(document, "test"), "cpu", parameters=1000, prompt_bytes=7)
    assert needs.ranks == 8
    assert needs.rank_bytes == 500 * (2 + 4 + 12 / 4)
    assert needs.engine_bytes == 2000 + (3 << 20)
    assert (needs.stored_bytes, needs.state_bytes, needs.states_kept) == (2007, 14_000, 2)
