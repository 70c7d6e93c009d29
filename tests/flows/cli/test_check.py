"""`ratchet check` shows the run that would start, and neither starts nor writes anything."""

import json
import tomllib

import pytest

from flows.cli.app import execute
from flows.views.checked import needs_of, notes_of, of_kind, of_kinds
from storage.backends.root import open_root
from tasks.config.document import load_config, parse_config
from tasks.data.sources import check_prompts, text_codec
from tasks.workers.placement import Parameters
from tests.small.config import small_config
from tests.small.driving import RUN, driver
from tests.tasks.data.chat_model import TEMPLATE, chat_model

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
    """Checks the configuration in its folder and returns the output."""
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
    assert "stop tokens: 1 '<eos>'\nalso left out of responses: 0 '<pad>'\n" in said
    assert "train            4 from prompts" in said
    assert "held_out         2 from hold_out" in said
    assert said.splitlines()[-1] == "the configuration can be run"


def test_what_the_warm_up_trains_on_is_shown_after_its_prompt(checked):
    settings = ("--set=data.warmup=prompts.jsonl", "--set=warmup.steps=1")
    said = checked(*settings)
    assert "first example of the warm-up, '1': 2 tokens are trained after 4:" in said
    assert "    prompt   0|+|1|=\n    trained  1|<eos>\n" in said
    solved = json.loads(checked(*settings, "--json"))["solved"]
    assert [token["text"] for token in solved["trained"]] == ["1", "<eos>"]


def test_a_root_that_cannot_be_written_is_refused(checked, tmp_path, capfd):
    (tmp_path / "taken").write_text("a file")
    assert execute(["check", "run.toml", f"--root={tmp_path}/taken/runs"]) == 2
    assert "taken/runs" in (said := capfd.readouterr().err) and "--root" in said


def test_a_root_with_too_little_space_is_noted(checked):
    assert "free, less than" not in checked()
    assert "note: file://" in (said := checked("--set=run.iterations=2000000000")) and "free, less than the" in said


@pytest.mark.parametrize("held", ["", "held_out"])
def test_one_record_of_each_kind_is_shown(tmp_path, held):
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE
    ask, told = [{"role": "user", "content": "1?"}], [{"role": "system", "content": "Add."}]
    records = [{"prompt": ask}, {"prompt": told + ask}, {"prompt": told + ask, "tools": [{"name": "get"}]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({**one, "answer": "2"}) + "\n" for one in records))
    document = tomllib.loads(CONFIG) | {"model": {"source": str(chat_model(tmp_path, template=template))}}
    warmup = {} if held else {"warmup": str(tmp_path / "a.jsonl")}
    config = parse_config(document | {"data": {"train": str(tmp_path / "a.jsonl"), "hold_out": 1, **warmup}}, "test")
    codec, prompts = text_codec(config), check_prompts(config)
    found = {one.kind: one for one in of_kinds(prompts, codec, ["1"])}
    assert {kind: one.prompt_id for kind, one in found.items()} == {"a system text": "2", "tools": "3"}
    assert all((one.trained is None) == bool(held) for one in found.values())
    assert of_kind(found["tools"])[0].startswith("first record with tools, '3': ")


def test_the_result_as_json(checked):
    found = json.loads(checked("--json", "--set=data.overlong=drop", "--set=rollout.max_tokens=60"))
    assert "".join(token["text"] for token in found["example"]["tokens"]) == found["example"]["prompt"]
    assert [(one["table"], one["prompts"], one["dropped"]) for one in found["sources"]] == [
        ("train", 4, 0),
        ("held_out", 2, 0),
    ]
    assert (found["longest"], found["context"]) == (4, 64)
    assert found["needs"]["states_kept"] == 4  # 0, 5, 9 and 10


@pytest.mark.parametrize(("ahead", "kept"), [(0, 4), (1, 4), (3, 6)])
def test_the_states_that_rollouts_ahead_may_need_are_counted(checked, ahead: int, kept: int):
    corrected = '--set=train.policy.old_policy="behaviour"'
    needs = json.loads(checked("--json", f"--set=rollout.ahead={ahead}", corrected))["needs"]
    assert needs["states_kept"] == kept  # 0, 5, and the newest: 9 and 10, or 7 to 10


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
    needs = needs_of(parse_config(document, "test"), "cpu", Parameters(1000), prompt_bytes=7)
    assert needs.ranks == 8
    assert needs.rank_bytes == 500 * (2 + 4 + 12 / 4)
    assert needs.engine_bytes == 2000 + (3 << 20)
    assert (needs.stored_bytes, needs.state_bytes, needs.states_kept) == (2007, 14_000, 2)
    critic = {"policy": {"advantage": {"type": "gae"}}, "critic": {"learning_rate": 1e-3}}
    config = parse_config(document | {"train": document["train"] | critic}, "test")
    needs = needs_of(config, "cpu", Parameters(1000, teacher=100), prompt_bytes=7)
    assert (needs.rank_bytes, needs.state_bytes) == (2 * 4500 + 50 * 2, 28_000)


def test_a_critic_that_learns_alone_in_all_iterations_is_told_of(checked):
    settings = [f"--set=train.{one}" for one in ("policy.advantage.type=gae", "critic.learning_rate=1e-3")]
    said = "train.critic.updates_alone = {} lets the critic learn alone in all 10 iterations"
    assert said.format(10) in checked(*settings, "--set=train.critic.updates_alone=10")
    assert said.format(9) not in checked(*settings, "--set=train.critic.updates_alone=9")


OWN = """
def parts(record, response):
    return {"right": response == record["answer"], "brief": len(response) < 3}

def of_another_field(record, response):
    return response in record["solution"]
"""


def test_the_reward_is_called_on_records_and_shown(checked, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    said = checked("--set=reward.function=own.py:parts", "--set=reward.weights.brief=0.5")
    assert "the reward on records of the run:" in said
    assert said.count("its own answer") == said.count("a wrong answer 'I do not know.': 0 (right 0, brief 0)") == 3
    assert said.count(": 1.5 (right 1, brief 1)") == 3
    assert "note: reward.try is false" in checked(
        "--set=reward.function=own.py:of_another_field", "--set=reward.try=false"
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["function=own.py:parts", "weights.rihgt=0.5"], ["6 of 6 calls", "there is a weight for rihgt"]),
        (["function=own.py:of_another_field"], ["KeyError: 'solution' (own.py, line 6)", "reward.try = false"]),
        (
            ["function=math_verify"],
            ["cannot read the answers of 1 records", "prompt 'odd'", "a brace that is not closed"],
        ),
    ],
)
def test_a_reward_that_cannot_score_the_records_is_refused(checked, tmp_path, capfd, settings, words):
    (tmp_path / "own.py").write_text(OWN)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"id": "odd", "prompt": "1/2=", "answer": "\\frac{1}{"}) + "\n")
    assert execute(["check", "run.toml", *(f"--set=reward.{setting}" for setting in settings)]) == 2
    said = capfd.readouterr().err
    assert all(word in said for word in words), said


TEXT, MESSAGES = '{"prompt": "one and"}', '{"prompt": [{"role": "user", "content": "one and"}]}'


@pytest.mark.parametrize(
    ("record", "settings", "noted"),
    [
        (TEXT, [], True),
        (TEXT, ["data.prompt={prompt} one"], True),
        (TEXT, ["data.chat=true"], False),
        (TEXT, ["data.chat=false"], False),
        (TEXT, ["data.system=Add."], False),
        (MESSAGES, [], False),
    ],
)
def test_a_text_without_the_template_is_noted_unless_that_is_said(tmp_path, record, settings, noted):
    source = chat_model(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text(f"{record}\n" * 4)
    text = CONFIG.replace("[model.generate]", f'[model]\nsource = "{source}"').replace("hold_out = 2\n", "")
    (tmp_path / "run.toml").write_text(text)
    config = load_config(str(tmp_path / "run.toml"), settings)
    codec = text_codec(config)
    assert bool(notes_of(config, codec, check_prompts(config).tables["train"])) == noted


def test_a_condition_names_a_component_that_the_reward_gives(checked, tmp_path, capfd):
    """The calls on records show it before the warm-up."""
    (tmp_path / "own.py").write_text(OWN)
    assert checked("--set=reward.function=own.py:parts", "--set=evaluate.pass=right >= 1")
    assert execute(["check", "run.toml", "--set=reward.function=own.py:parts", "--set=evaluate.pass=rigth >= 1"]) == 2
    assert "names rigth, which the reward does not give; its components are brief, right" in capfd.readouterr().err


@pytest.fixture(scope="module")
def continued(tmp_path_factory):
    """A run over small workers, in a root of its own."""
    folder = tmp_path_factory.mktemp("continued")
    root = open_root(str(folder / "root"))
    driver(root, small_config(["run.iterations=1"]), folder / "scratch").drive()
    return root


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 0, "it can be continued with this configuration, up to iteration 1"),
        (["--iterations=5"], 0, "up to iteration 5"),
        (["--set=evaluate.prompts=1"], 0, "with a model and prompts of its own"),
        (["--set=rollout.samples=4"], 2, "rollout.samples"),
        (["--set=evaluate.pass=right >= 1"], 2, "names right, which the reward does not give"),
        (["--run=other"], 2, "is continued under its own name"),
    ],
)
def test_a_run_that_there_is_is_checked_by_its_name(continued, capfd, words, code, said):
    before = {key: continued.read_bytes(key) for key in continued.keys("")}
    assert execute(["check", RUN, f"--root={continued.url}", *words]) == code
    out = capfd.readouterr()
    assert said in (out.err if code else out.out)
    assert {key: continued.read_bytes(key) for key in continued.keys("")} == before


def test_a_file_is_checked_against_the_run_that_it_would_continue(continued, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG.replace('train = "prompts.jsonl"\nhold_out = 2', "[data.generate]"))
    asked = ["check", "run.toml", f"--root={continued.url}"]
    assert execute([*asked, "--run=new"]) == 0
    assert execute([*asked, f"--run={RUN}"]) == 2
    assert "run was started with" in capfd.readouterr().err
