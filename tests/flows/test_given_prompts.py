"""Runs over given prompts: the real loop over small workers, and the message of a later start with other prompts."""

import json
import tomllib
from pathlib import Path

import pyarrow as pa
import pytest

from storage.backends.root import Root
from storage.errors import InputError
from storage.kill_points import Point
from storage.manifest import Manifest, need
from storage.parts import read_table
from storage.schema import ROLLOUT
from tasks.checks import check_config
from tasks.config.document import apply_override, parse_config
from tasks.config.run import RunConfig
from tasks.data.tokenizer import StoredTexts
from tasks.stages.names import LOOP, Stage
from tasks.stages.prepared import prompts, shares, text_codec
from tasks.stages.views import Prepared
from tasks.stages.weight_sync import probe_sequences
from tests.small.driving import RUN, Killed, driver, killing
from tests.small.here import context_here

DOCUMENT = """
[run]
iterations = 2
[model.generate]
hidden = 32
intermediate = 32
heads = 2
[data]
[rollout]
prompts = 4
samples = 2
max_tokens = 6
[reward]
function = "characters"
[train]
max_length = 64
[train.optimizer]
learning_rate = 1e-3
[engine]
max_model_len = 32
"""


def write_jsonl(path: Path, start: int = 0, length: int = 4) -> str:
    records = [{"id": f"s{n}", "prompt": f"{n:0{length}d}+1=", "answer": str(n + 1)} for n in range(start, start + 8)]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


def config_of(data: dict, *settings: str) -> RunConfig:
    document = {**tomllib.loads(DOCUMENT), "data": data}
    for setting in settings:
        apply_override(document, setting)
    return parse_config(document, "test")


def prepared_of(root: Root) -> Manifest:
    return need(root, RUN, 0, Stage.PREPARE)


def test_a_run_without_held_out_prompts_needs_no_more_settings(root, tmp_path):
    process = driver(root, config_of({"train": write_jsonl(tmp_path / "a.jsonl")}), tmp_path / "scratch")
    check_config(process.config, root)
    process.drive()
    assert {stage for _, stage, _ in process.done} == set(LOOP) - {Stage.EVALUATE}
    assert need(root, RUN, 2, Stage.ROLLOUT).facts["cursor"] == 8


def test_an_evaluation_that_is_asked_for_needs_held_out_prompts(root, tmp_path):
    data = {"train": write_jsonl(tmp_path / "a.jsonl")}
    with pytest.raises(InputError, match=r"evaluate\.every is above 0, but there are no held-out prompts"):
        check_config(config_of(data, "evaluate.every=1"), root)
    check_config(config_of({**data, "hold_out": 2}, "evaluate.every=1"), root)


def test_held_out_prompts_are_never_drawn(root, tmp_path):
    data = {"train": write_jsonl(tmp_path / "a.jsonl"), "hold_out": 3}
    process = driver(root, config_of(data), tmp_path / "scratch")
    process.drive()
    held = set(held_out_ids(root, process.config))
    drawn = {
        name
        for n in (1, 2)
        for name in read_table(root, need(root, RUN, n, Stage.ROLLOUT), ROLLOUT)["prompt_id"].to_pylist()
    }
    assert len(held) == 3
    assert len(drawn) == 5
    assert not held & drawn


def held_out_ids(root: Root, config: RunConfig) -> list[str]:
    with context_here(root, config, Path(root.url.removeprefix("file://")) / "look", RUN) as context:
        return prompts(context, Prepared(prepared_of(root)), "held_out")["prompt_id"].to_pylist()


@pytest.mark.parametrize("killed", [False, True])
def test_a_mixture_is_drawn_by_its_weights(killed, root, tmp_path):
    first, second = write_jsonl(tmp_path / "a.jsonl"), write_jsonl(tmp_path / "b.jsonl", 100)
    config = config_of({"train": [{"source": first, "weight": 3}, {"source": second, "weight": 1}]})
    if killed:
        with pytest.raises(Killed):
            driver(root, config, tmp_path / "1", at=killing(Stage.ROLLOUT, 2, Point.MID_PART)).drive()
    driver(root, config, tmp_path / "2").drive()
    for iteration in (1, 2):
        names = read_table(root, need(root, RUN, iteration, Stage.ROLLOUT), ROLLOUT)["prompt_id"].to_pylist()
        assert sorted(name[0] for name in names) == ["a"] * 6 + ["b"] * 2
    assert [share.rows for share in shares(Prepared(prepared_of(root)), config.data)] == [8, 8]


def test_sources_without_weights_are_one_stream(root, tmp_path):
    data = {"train": [write_jsonl(tmp_path / "a.jsonl"), write_jsonl(tmp_path / "b.jsonl", 100)]}
    config = config_of(data, "rollout.prompts=16", "run.iterations=1")
    driver(root, config, tmp_path / "scratch").drive()
    names = read_table(root, need(root, RUN, 1, Stage.ROLLOUT), ROLLOUT)["prompt_id"].to_pylist()
    assert len(set(names)) == 16
    assert shares(Prepared(prepared_of(root)), config.data) == ()


def test_stop_tokens_are_those_the_run_was_prepared_with(root, tmp_path):
    config = config_of({"train": write_jsonl(tmp_path / "a.jsonl")}, 'rollout.stop_tokens=["=", 1]', "run.iterations=0")
    driver(root, config, tmp_path / "scratch").drive()
    manifest = prepared_of(root)
    assert manifest.facts["stop_tokens"] == [15, 1]
    with context_here(root, config, tmp_path / "look", RUN) as context:
        assert text_codec(context, Prepared(manifest)).stop_tokens == (15, 1)


@pytest.mark.parametrize(("setting", "left_out"), [("shown", [0, 1]), ("hidden", [0, 1, 2])])
def test_rewards_and_people_see_the_text_that_the_run_was_prepared_for(root, tmp_path, setting, left_out):
    config = config_of(
        {"train": write_jsonl(tmp_path / "a.jsonl")}, f"rollout.special_tokens={setting}", "run.iterations=0"
    )
    driver(root, config, tmp_path / "scratch").drive()
    manifest = prepared_of(root)
    assert manifest.facts["left_out_tokens"] == left_out
    with context_here(root, config, tmp_path / "look", RUN) as context:
        codec = text_codec(context, Prepared(manifest))
    texts = StoredTexts.of(root, manifest)
    assert codec.left_out == texts.left_out == set(left_out)
    sampled = pa.table({"prompt_id": ["s0"], "response_tokens": [[0, 3, 2, 4, 1]]})
    assert texts(sampled)[1].to_pylist() == codec.decode_column(sampled["response_tokens"])
    assert ("<unk>" in codec.decode_column(sampled["response_tokens"])[0]) == (setting == "shown")


def test_a_probe_without_answers_fits_into_the_engine(root, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"prompt": "{n:020d}"}}\n' for n in range(4)))
    config = config_of({"train": str(tmp_path / "a.jsonl")}, "run.iterations=0")
    driver(root, config, tmp_path / "scratch").drive()
    with context_here(root, config, tmp_path / "look", RUN) as context:
        probe = probe_sequences(context, Prepared(prepared_of(root)))
    assert [len(sequence) for sequence in probe] == [31] * 4


@pytest.fixture
def started(root, tmp_path):
    """A run whose prompts are stored, its configuration, and the file of these prompts."""
    path = tmp_path / "a.jsonl"
    config = config_of({"train": write_jsonl(path)}, "run.iterations=0")
    driver(root, config, tmp_path / "scratch").drive()
    return config, path


def test_a_run_continues_with_its_prompts_or_without_their_source(root, started):
    config, path = started
    check_config(config, root, prepared_of(root))
    path.unlink()
    check_config(config, root, prepared_of(root))


def test_other_content_at_the_source_is_refused_with_both_digests(root, started):
    config, path = started
    (stored,) = prepared_of(root).facts["data_digests"]["train"]
    write_jsonl(path, start=1)
    with pytest.raises(InputError, match=rf"has the content \w+ now, but .* prepared from {stored}, .* another --run"):
        check_config(config, root, prepared_of(root))


def test_prompts_that_come_later_are_refused(root, started):
    path = started[1]
    later = config_of({"train": str(path), "held_out": str(path)}, "run.iterations=0")
    with pytest.raises(InputError, match=r"data\.held_out is set, but run 'small' was prepared without it"):
        check_config(later, root, prepared_of(root))


def test_a_context_that_stored_prompts_do_not_fit_into_is_refused(root, started):
    path = started[1]
    path.unlink()
    shorter = config_of({"train": str(path)}, "run.iterations=0", "engine.max_model_len=12")
    with pytest.raises(InputError, match=r"prompt 's0' is too long: 7 tokens, and with rollout\.max_tokens = 6"):
        check_config(shorter, root, prepared_of(root))
