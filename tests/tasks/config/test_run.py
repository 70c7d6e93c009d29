import tomllib

import pytest

from storage.errors import InputError
from tasks.config.document import load_config, merged, parse_config
from tasks.config.identity import changed_meaning
from tasks.config.run import RunConfig

MINIMAL = """
[model.generate]
[data.generate]
[train]
max_length = 32
[train.optimizer]
learning_rate = 1e-3
"""


def config_file(tmp_path, text=MINIMAL):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return str(path)


def test_a_minimal_document_and_overrides(tmp_path):
    overrides = ["train.parallel.pipeline=2", "reward.function=regex", 'reward.arguments.pattern="[0-9]+"']
    config = load_config(config_file(tmp_path), overrides)
    assert config.train.parallel.pipeline == 2
    assert config.reward.function == "regex"
    assert config.reward.arguments == {"pattern": "[0-9]+"}


def test_the_stored_document_reads_back_equal(tmp_path):
    config = load_config(config_file(tmp_path))
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("override", "fact"),
    [
        ("rollout.sample=4", "did you mean 'rollout.samples'"),
        ("train.parallel.pipline=2", "did you mean 'train.parallel.pipeline'"),
        ("trian.max_length=4", "did you mean 'train'"),
        ("rollout.samples=0", "greater than or equal to 1"),
        ("rollout.samples=many", "valid integer"),
        ("run.name=Bad Name", "cannot be used"),
        ("rollout", "section.key=value"),
        ("storage.keep_every=2", "keep_newest not given, whose rest"),
        ("rollout.temperature=0.001", "greater than or equal to 0.01"),
        ("train.policy.overlong={type='leave_out',length=17}", "overlong has no effect with responses of at most 16"),
        ("train.policy.overlong={type='penalty',length=20,buffer=4}", "at most 16 tokens, where it begins at 17"),
        ("train.policy.most_groups=32", "most_groups has no effect with rollout.prompts = 32, which are no more"),
        ("rollout.most_prompts=32", "most_prompts has no effect with rollout.prompts = 32, which are no fewer"),
        ("rollout.pause_tokens=4", 'pause_tokens has no effect with rollout.updates = "between"'),
        ("rollout.open_prompts=64", 'open_prompts has no effect with rollout.updates = "between"'),
        ("rollout.max_staleness=1", 'max_staleness has no effect with rollout.updates = "between", by which all'),
        ("model.download=true", "model.download has no effect with model.generate"),
        ("model.accept=['hidden_act']", "model.accept has no effect with model.generate: leave it out"),
        (
            "evaluate={every=0,prompts=4}",
            "evaluate.prompts has no effect with evaluate.every = 0: leave it out, or",
        ),
        (
            "warmup.batch_size=4",
            "warmup.batch_size has no effect with warmup.steps = 0: leave it out, or give it",
        ),
        ("warmup.optimizer={learning_rate=1}", "warmup.optimizer has no effect with warmup.steps = 0: leave it out"),
        ("data.generate.warmup_mistakes=0.5", "warmup_mistakes has no effect with warmup = 0: leave it out, or give"),
        ("data.prompt_field='q'", "data.prompt_field has no effect with data.prompt, which makes"),
        ("storage.keep_newest=0", "greater than or equal to 1"),
        ("storage.keep=1", "did you mean 'storage.keep"),
        ("rollout.samples.more=1", "valid integer"),
        ("train.policy.loss.type=gpso", "train.policy.loss.type: 'gpso' is not known; use one of 'clip', 'gspo'"),
        ("train.policy.loss.dual_limit=3", "train.policy.loss.type: this key is required; use one of 'clip', 'gspo'"),
        ("train.policy.loss={type='gspo', clip_hi=1}", "did you mean 'train.policy.loss.clip_high'"),
        ("train.policy.loss={type='gspo', clip_low=1}", "train.policy.loss.clip_low: Input should be less than 1"),
        ("train.policy.overlong.type=penalty", "train.policy.overlong.length: this key is required"),
    ],
)
def test_bad_values_name_fact_and_repair(tmp_path, override, fact):
    more = ["data.prompt='{prompt}'"] if "prompt_field" in override else []
    with pytest.raises(InputError) as caught:
        load_config(config_file(tmp_path), [override, *more])
    assert fact in str(caught.value)
    assert caught.value.exit_code == 2


def test_another_type_of_a_table_leaves_no_key_of_the_old_one(tmp_path):
    text = f'{MINIMAL}[train.policy]\nepochs = 2\n[train.policy.loss]\ntype = "gspo"\nclip_low = 0.5\n'
    given = ["train.policy.loss.clip_high=7", "train.policy.loss.type=cispo"]  # in any order
    loss = load_config(config_file(tmp_path, text), given).train.policy.loss
    assert loss.model_dump() == {"type": "cispo", "clip_low": 1.0, "clip_high": 7.0}
    kept = load_config(config_file(tmp_path, text), ["train.policy.loss.type=gspo"]).train.policy.loss
    assert kept.model_dump() == {"type": "gspo", "clip_low": 0.5, "clip_high": 4e-4}


def test_switching_something_off_on_the_command_line_removes_its_settings(tmp_path):
    text = f'{MINIMAL}[evaluate]\nprompts = 4\npass = "reward > 0"\n[warmup]\nsteps = 1\nbatch_size = 3\n'
    assert load_config(config_file(tmp_path, text), ["warmup.steps=2"]).warmup.batch_size == 3
    off = load_config(config_file(tmp_path, text), ["evaluate.every=0", "warmup.steps=0"])
    assert (off.evaluate.prompts, off.evaluate.passing, off.warmup.batch_size) == (256, "reward > 0", 64)
    changed = merged(tomllib.loads(text), {"evaluate": {"every": 0}, "warmup": {"steps": 0, "batch_size": 64}})
    assert (changed["evaluate"], changed["warmup"]["batch_size"]) == ({"pass": "reward > 0", "every": 0}, 64)
    with pytest.raises(InputError, match=r"evaluate\.prompts has no effect"):
        load_config(config_file(tmp_path, text), ["evaluate.prompts=3", "evaluate.every=0"])


def test_an_argument_called_type_is_like_any_other(tmp_path):
    given = ["reward.arguments.pattern=a", "reward.arguments.type=b"]
    assert load_config(config_file(tmp_path), given).reward.arguments == {"pattern": "a", "type": "b"}


@pytest.mark.parametrize("text", ["[run", "= 3", "a = 1\na = 2"])
def test_text_that_is_not_toml(tmp_path, text):
    with pytest.raises(InputError, match="not valid TOML"):
        load_config(config_file(tmp_path, text))


def test_a_missing_file():
    with pytest.raises(InputError, match="does not exist"):
        load_config("/nowhere/run.toml")


@pytest.mark.parametrize("path", [".", "nowhere://run.toml"])
def test_a_path_that_cannot_be_read(path):
    with pytest.raises(InputError, match="cannot be read"):
        load_config(path)


def test_source_and_generate_exclude_each_other(tmp_path):
    with pytest.raises(InputError, match="exactly one"):
        load_config(config_file(tmp_path), ["model.source=/some/model"])


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("train.parallel.tensor=2", True),
        ("engine.count=2", True),
        ("device.deterministic=true", True),
        ("run.iterations=9", True),
        ("train.micro_batch_size=3", True),
        ("storage.keep_newest=2", True),
        ("rollout.groups_per_part=3", True),
        ("workers.call_deadline_s=9", True),
        ("sync.max_mean_difference=1", True),
        ("sync.max_difference=1", True),
        ("sync.probe_sequences=2", True),
        ("rollout.temperature=0.5", False),
        ("model.generate.layers=4", False),
        ("train.policy.entropy_coefficient=0.1", False),
        ("run.seed=1", False),
    ],
)
def test_what_changes_a_runs_meaning(tmp_path, override, same):
    path = config_file(tmp_path)
    first, second = load_config(path), load_config(path, [override])
    assert (first.meaning() == second.meaning()) is same
    lines = changed_meaning(first.meaning(), second.meaning())
    assert bool(lines) is not same
    assert all(override.split("=")[0] in line for line in lines)


@pytest.mark.parametrize(
    "override",
    [
        "rollout.temperature=0.01",
        "train.policy.overlong={type='leave_out',length=16}",
        "train.policy.overlong={type='penalty',length=16,buffer=1}",
        "train.policy.most_groups=31",
        "rollout.most_prompts=33",
    ],
)
def test_what_just_has_an_effect_passes(tmp_path, override):
    load_config(config_file(tmp_path), [override])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["rollout.samples=1", "train.policy.loss={type='sft',best=true}"], "train.policy.loss.best has no effect"),
        (["rollout.samples=2", "train.policy.loss={type='dpo',pairs='all'}"], "loss.pairs has no effect with rollout"),
        (["rollout.most_prompts=40", "train.policy.most_groups=40"], "rollout.most_prompts = 40, which are no more"),
        (["engine.tensor=2", "engine.own_process=false"], "engine.own_process has no effect with engine.tensor = 2"),
        (
            ["engine.max_model_len=12", "train.policy.overlong={type='leave_out',length=16}"],
            "responses of at most 11 tokens, where it begins at 16",
        ),
    ],
    ids=str,
)
def test_what_other_sections_leave_without_effect(tmp_path, settings, named):
    with pytest.raises(InputError, match=named):
        load_config(config_file(tmp_path), settings)


def test_retention_is_asked_for(tmp_path):
    path = config_file(tmp_path)
    assert load_config(path).storage.keep_newest is None
    kept = load_config(path, ["storage.keep_newest=2", "storage.keep_every=10"]).storage
    assert (kept.keep_newest, kept.keep_every) == (2, 10)


def test_an_unknown_section_lists_every_fact_at_once():
    with pytest.raises(InputError) as caught:
        parse_config({"modle": {}, "train": {"max_length": 1}}, "x.toml")
    message = str(caught.value)
    assert "modle" in message
    assert "train.optimizer" in message
