"""Samples of files as a run: what they become, and what is refused with its reason."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.backends.root import Root, open_root
from storage.errors import InputError
from storage.manifest import find, need
from storage.reader import read_stored_table
from storage.upkeep.catalog import runs
from storage.upkeep.verify import verify
from tasks.config.retrain import RetrainSection
from tasks.config.stored import stored_config
from tasks.importing.rows import ImportOrder
from tasks.importing.samples import import_samples
from tasks.stages.names import Stage
from tasks.stages.selecting import Selecting, rollouts

ROW = {"input_ids": [3, 4], "response_tokens": [5, 6, 7], "logprobs": [-0.5, -1.0, 0.0], "reward": 0.5}
COLUMNS = {"prompt_tokens": "input_ids"}


@pytest.fixture
def root(tmp_path) -> Root:
    return open_root(str(tmp_path / "runs"))


def jsonl(tmp_path, rows: list[Any], name: str = "a.jsonl") -> str:
    path = tmp_path / name
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def order(*files: str, **given) -> ImportOrder:
    return ImportOrder(files, **{"run": "ext", "columns": COLUMNS, "temperature": 1.0, **given})


def samples(root: Root, iteration: int = 1) -> list[dict[str, Any]]:
    return read_stored_table(root, need(root, "ext", iteration, Stage.ROLLOUT)).to_pylist()


def test_rows_become_samples_of_a_run(root, tmp_path):
    rows = [ROW, {**ROW, "reward": None, "other": 3}, {**ROW, "input_ids": [9], "finish_reason": "length"}]
    rows[0] = {**ROW, "finish_reason": "stop"}
    rows[1]["finish_reason"] = "stop"
    made = import_samples(root, order(jsonl(tmp_path, rows)))
    assert (made.samples, made.groups, made.scored, made.columns["prompt_tokens"]) == (3, 2, 2, "input_ids")
    found = samples(root)
    assert [one["prompt_tokens"] for one in found] == [[3, 4], [3, 4], [9]]
    assert [one["sample_id"] for one in found] == [0, 1, 0]
    assert found[0]["prompt_id"] == found[1]["prompt_id"] != found[2]["prompt_id"]
    assert [one["finish_reason"] for one in found] == ["stop", "stop", "length"]
    assert {(one["run"], one["iteration"], one["temperature"], one["weight_version"]) for one in found} == {
        ("ext", 1, 1.0, -1)
    }
    rewards = read_stored_table(root, need(root, "ext", 1, Stage.REWARD)).to_pylist()
    assert [(one["reward"], one["status"]) for one in rewards] == [(0.5, "ok"), (None, "error"), (0.5, "ok")]
    assert verify(root, "ext").findings == ()


def test_each_file_is_an_iteration_and_parquet_gives_the_same(root, tmp_path):
    first = jsonl(tmp_path, [ROW] * 3)
    second = str(tmp_path / "b.parquet")
    pq.write_table(pa.Table.from_pylist([ROW] * 3), second)
    assert import_samples(root, order(first, second)).iterations == 2
    differing = {"iteration"}
    pairs = zip(samples(root, 1), samples(root, 2), strict=True)
    assert all({k for k in one if one[k] != other[k]} == differing for one, other in pairs)


def test_imported_samples_can_be_selected(root, tmp_path):
    import_samples(root, order(jsonl(tmp_path, [{**ROW, "reward": n / 10} for n in range(8)])))
    section = RetrainSection(start="run@1", select=("ext",), where="reward > 0.35", samples=2)
    selecting = Selecting(section)
    shares = [share for rollout in rollouts(root, section) for share in selecting.add(rollout)]
    shares += selecting.rest()
    assert [round(row["reward"], 3) for share in shares for row in share.to_pylist()] == [0.4, 0.5, 0.6, 0.7]


def test_it_is_done_once_and_completed_after_a_crash(root, tmp_path):
    files = jsonl(tmp_path, [ROW]), jsonl(tmp_path, [ROW, ROW], "b.jsonl")
    import_samples(root, order(*files))
    before = need(root, "ext", 2, Stage.ROLLOUT)
    root.remove(need(root, "ext", 2, Stage.REWARD).key)
    root.remove(before.key)
    import_samples(root, order(*files))
    assert need(root, "ext", 2, Stage.ROLLOUT).digest == before.digest
    assert find(root, "ext", 2, Stage.REWARD) is not None
    with pytest.raises(InputError, match="another name"):
        import_samples(root, order(files[0]))


def test_without_logprobs_they_are_not_a_number(root, tmp_path):
    row = {name: value for name, value in ROW.items() if name != "logprobs"}
    file = jsonl(tmp_path, [row])
    with pytest.raises(InputError, match=r"no logprobs: .* --without-logprobs"):
        import_samples(root, order(file))
    import_samples(root, order(file, logprobs=False))
    assert np.isnan(samples(root)[0]["logprobs"]).all()
    assert len(samples(root)[0]["logprobs"]) == 3


def test_an_imported_run_says_that_it_has_no_configuration(root, tmp_path):
    import_samples(root, order(jsonl(tmp_path, [ROW])))
    with pytest.raises(InputError, match="holds imported samples"):
        stored_config(root, "ext")


@pytest.mark.parametrize(
    ("rows", "given", "words"),
    [
        ([{"text": "hi"}], {"columns": {}}, "no prompt_tokens: samples are trained on as the token ids"),
        ([ROW], {"columns": {"prompt_tokens": "ids"}}, "no column 'ids' .* its columns are input_ids"),
        ([ROW], {"columns": {**COLUMNS, "rewards": "reward"}}, "a sample has no rewards, only"),
        ([ROW], {"temperature": None}, "temperature the samples were drawn"),
        ([ROW, {**ROW, "logprobs": [-1.0]}], {}, "sample 2: logprobs has another length"),
        ([{**ROW, "logprobs": [-1.0, 0.1, -1.0]}], {}, "sample 1: a log-probability is above 0"),
        ([ROW, {**ROW, "input_ids": [3, None]}], {}, "sample 2: prompt_tokens holds a null"),
        ([ROW, {**ROW, "response_tokens": None}], {}, "sample 2: response_tokens is null"),
        ([{**ROW, "input_ids": ["a"]}], {}, "'input_ids' cannot become prompt_tokens"),
        ([{**ROW, "input_ids": [1.5]}], {}, "'input_ids' cannot become prompt_tokens"),
        ([{**ROW, "input_ids": [2**40]}], {}, "'input_ids' cannot become prompt_tokens"),
        ([ROW, "{no"], {}, "line 2: it is not JSON"),
        ([ROW, "[1]"], {}, "line 2: it is a list"),
        ([{**ROW, "sample_id": 1}] * 2, {}, "occurs twice"),
        ([ROW, {**ROW, "reward": "high"}], {}, "different kinds"),
        ([], {}, "no samples in it"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_the_reason(root, tmp_path, rows, given, words):
    with pytest.raises(InputError, match=words):
        import_samples(root, order(jsonl(tmp_path, rows), **given))
    assert runs(root) == []


@pytest.mark.parametrize(
    ("name", "words"), [("a.csv", "end with .jsonl or .parquet"), ("gone.jsonl", "does not exist")]
)
def test_other_files_are_refused(root, tmp_path, name, words):
    with pytest.raises(InputError, match=words):
        import_samples(root, order(str(tmp_path / name)))


def test_a_damaged_parquet_file_is_refused(root, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and more")
    with pytest.raises(InputError, match="cannot be read"):
        import_samples(root, order(str(tmp_path / "a.parquet")))
