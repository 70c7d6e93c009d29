"""Samples of files as a run: their stored form, and refusals with the reason."""

import datetime
import decimal
import itertools
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.views.samples import scored_samples
from storage.backends.root import Root, open_root
from storage.errors import InputError
from storage.manifest import find, need
from storage.turns import ended_by, sampled_by
from storage.upkeep.archive import compact
from storage.upkeep.catalog import runs
from storage.upkeep.verify import verify
from tasks.config.retrain import RetrainSection
from tasks.config.stored import stored_config
from tasks.export.order import choose
from tasks.importing.rows import ImportOrder, mapped
from tasks.importing.samples import import_samples
from tasks.stages.names import WORKFLOW, Stage
from tasks.stages.selecting import Selecting, rollouts
from tests.storage.tables import read_stored_table

ROW = {"input_ids": [3, 4], "response_tokens": [5, 6, 7], "logprobs": [-0.5, -1.0, 0.0], "reward": 0.5}
COLUMNS = {"prompt_tokens": "input_ids"}
TURNS = [
    {"role": "tool", "begin": 0, "end": 2, "results": '["2"]', "seconds": 0.5},
    {"role": "assistant", "begin": 2, "end": 3, "finish_reason": "stop"},
]


@pytest.fixture
def root(tmp_path) -> Root:
    return open_root(str(tmp_path / "runs"))


def jsonl(tmp_path, rows: list[Any], name: str = "a.jsonl") -> str:
    path = tmp_path / name
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def order(*files: str, **given) -> ImportOrder:
    return ImportOrder(files, **{"run": "ext", "columns": COLUMNS, "temperature": 1.0, **given})


def samples(root: Root, iteration: int = 1, run: str = "ext") -> list[dict[str, Any]]:
    return read_stored_table(root, need(root, run, iteration, Stage.ROLLOUT)).to_pylist()


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
    assert [ended_by(one) for one in found] == ["stop", "stop", "length"]
    assert {(one["run"], one["iteration"], one["temperature"], one["position"]) for one in found} == {
        ("ext", 1, 1.0, -1)
    }
    assert all((one["weight_version"], one["sampled"]) == ([-1] * 3, [True] * 3) for one in found)
    rewards = read_stored_table(root, need(root, "ext", 1, Stage.REWARD)).to_pylist()
    assert [(one["reward"], one["status"]) for one in rewards] == [(0.5, "ok"), (None, "error"), (0.5, "ok")]
    table = scored_samples(root.url, "ext", texts=True)
    assert (table["reward"].to_pylist(), table["response"].null_count) == ([0.5, None, 0.5], 3)
    assert verify(root, "ext").findings == ()


def test_each_file_is_an_iteration_and_parquet_gives_the_same(root, tmp_path):
    first = jsonl(tmp_path, [ROW] * 3)
    second = str(tmp_path / "b.parquet")
    pq.write_table(pa.Table.from_pylist([ROW] * 3), second)
    assert import_samples(root, order(first, second)).iterations == 2
    differing = {"iteration"}
    pairs = zip(samples(root, 1), samples(root, 2), strict=True)
    assert all({k for k in one if one[k] != other[k]} == differing for one, other in pairs)


def test_turns_are_imported_from_either_form_and_from_an_archive(root, tmp_path):
    row = {**ROW, "sampled": [False, False, True], "weight_version": [-1, -1, 4], "turns": TURNS}
    other = {**ROW, "sampled": [True, True, True], "weight_version": 3, "turns": [{**TURNS[1], "begin": 0}]}
    lists = {**other, "weight_version": [3, 3, 3]}
    parquet = str(tmp_path / "b.parquet")
    pq.write_table(pa.Table.from_pylist([row, lists]), parquet)
    import_samples(root, order(jsonl(tmp_path, [row, other]), parquet))
    import_samples(root, order(parquet, run="one"))
    archive = compact(root, WORKFLOW, "one")
    again = order(f"{root.url}/{archive.key}", run="again", columns={}, temperature=None)
    import_samples(root, again)
    found = [*samples(root, 1), *samples(root, 2), *samples(root, 1, "again")]
    for turned, plain in itertools.batched(found, 2):
        assert (turned["sampled"], turned["weight_version"]) == ([False, False, True], [-1, -1, 4])
        assert [{name: one[name] for name in one if one[name] is not None} for one in turned["turns"]] == TURNS
        assert (plain["weight_version"], ended_by(plain), sampled_by(plain)) == ([3, 3, 3], "stop", (3,))


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


def test_samples_without_a_score_leave_no_part_of_scores(root, tmp_path):
    assert import_samples(root, order(jsonl(tmp_path, [{**ROW, "reward": None}]))).scored == 0
    assert verify(root, "ext").findings == ()
    with pytest.raises(InputError, match="Imported samples have no weights"):
        choose(root, "ext")


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "given", "words"),
    [
        ([{"text": "hi"}], {"columns": {}}, "no prompt_tokens: samples are trained on as the token ids"),
        ([ROW], {"columns": {"prompt_tokens": "ids"}}, "no column 'ids' .* its columns are input_ids"),
        ([ROW], {"columns": {**COLUMNS, "rewards": "reward"}}, "a sample has no rewards, only"),
        ([ROW], {"temperature": None}, "temperature the samples were drawn"),
        ([ROW, {**ROW, "logprobs": [-1.0]}], {}, "sample 2: logprobs has another length"),
        ([{**ROW, "logprobs": [-1.0, 0.1, -1.0]}], {}, "sample 1: logprobs has a value above 0"),
        (
            [{**ROW, "logprobs": [-1.0, -1e300, -1.0]}],
            {},
            "sample 1: logprobs has a value above 0 or not finite",
        ),
        (
            [ROW, {**ROW, "input_ids": [3, None]}],
            {},
            r"sample 2: prompt_tokens \(column 'input_ids'\) is \[3, None\], but",
        ),
        ([ROW, {**ROW, "response_tokens": None}], {}, "sample 2: response_tokens is null"),
        ([{**ROW, "input_ids": ["a"]}], {}, r"is \['a'\], but a list of integers is expected"),
        ([{**ROW, "input_ids": [1.5]}], {}, r"is \[1.5\], but a list of integers"),
        ([{**ROW, "input_ids": [True]}], {}, r"is \[True\], but a list of integers"),
        ([{**ROW, "input_ids": "12"}], {}, "is '12', but a list of integers"),
        ([{**ROW, "input_ids": [2**31]}], {}, "holds a number that is not a token id"),
        ([{**ROW, "input_ids": [-1]}], {}, "holds a number that is not a token id"),
        ([ROW, {**ROW, "input_ids": [2**63]}], {}, "sample 2: prompt_tokens .* cannot be stored"),
        ([{**ROW, "input_ids": []}], {}, "prompt_tokens .* is empty"),
        ([{**ROW, "response_tokens": [], "logprobs": []}], {}, "response_tokens is empty"),
        ([ROW, "", "{no"], {}, "line 3: not valid JSON"),
        ([ROW, "[1]"], {}, "line 2: a list where an object is expected"),
        ([ROW, {**ROW, "reward": float("nan")}], {}, "line 2: not valid JSON .*NaN"),
        ([{**ROW, "sample_id": 1}] * 2, {}, "occurs twice"),
        ([{**ROW, "sample_id": -3}], {}, "sample 1: sample_id is -3"),
        ([{**ROW, "sample_id": 1.0}], {}, "sample_id is 1.0, but an integer"),
        ([{**ROW, "sample_id": "3"}], {}, "sample_id is '3', but an integer"),
        ([{**ROW, "sample_id": 2**31}], {}, "sample_id is 2147483648"),
        ([ROW, {**ROW, "reward": "high"}], {}, "sample 2: reward is 'high', but a number, a truth value or null"),
        ([{**ROW, "reward": 1e39}], {}, r"reward is not finite as float32"),
        ([{**ROW, "reward": 10**400}], {}, "sample 1: reward cannot be stored"),
        ([{**ROW, "prompt_id": 1.0}], {}, "prompt_id is 1.0, but a text or an integer"),
        ([{**ROW, "prompt_id": True}], {}, "prompt_id is True"),
        ([{**ROW, "prompt_id": ["a"]}], {}, r"prompt_id is \['a'\]"),
        ([{**ROW, "prompt_id": ""}], {}, "prompt_id is empty"),
        ([{**ROW, "prompt_id": "a"}, {**ROW, "prompt_id": None}], {}, "sample 2: prompt_id is null"),
        ([{**ROW, "prompt_id": "a"}, {**ROW, "prompt_id": "\ud83d"}], {}, "sample 2: prompt_id cannot be stored"),
        (
            [{**ROW, "prompt_id": 7}, {**ROW, "prompt_id": "7", "input_ids": [9]}],
            {},
            "sample 2: prompt_id is '7', as of sample 1",
        ),
        ([{**ROW, "finish_reason": "eos"}], {}, "finish_reason is none of stop, length, abort"),
        ([{**ROW, "finish_reason": 1}], {}, "finish_reason is 1, but a text"),
        ([ROW, {**ROW, "seed": 2**63}], {}, "sample 2: seed"),
        ([{**ROW, "seed": 2**63}], {}, "sample 1: seed cannot be stored"),
        ([{**ROW, "seed": -2}], {}, "seed is -2"),
        ([{**ROW, "weight_version": 2**40}], {}, "weight_version holds none from -1 to"),
        ([{**ROW, "weight_version": [1, 2]}], {}, "weight_version has another length than response_tokens"),
        ([{**ROW, "sampled": [True]}], {}, "sampled has another length than response_tokens"),
        ([{**ROW, "sampled": [1, 0, 1]}], {}, r"sampled is \[1, 0, 1\], but a list of truth values"),
        ([{**ROW, "turns": []}], {}, "turns does not cover response_tokens"),
        ([{**ROW, "turns": [{"role": "assistant", "begin": 0, "end": 2}]}], {}, "turns does not cover"),
        ([{**ROW, "turns": [{**TURNS[0], "begin": 1}, TURNS[1]]}], {}, "turns does not cover"),
        ([{**ROW, "turns": [TURNS[0], {**TURNS[1], "begin": 1}]}], {}, "turns does not cover"),
        ([{**ROW, "turns": TURNS}, {**ROW, "turns": [TURNS[1]]}], {}, "sample 2: turns does not cover"),
        ([{**ROW, "turns": [{"begin": 0, "end": 3}]}], {}, "turns holds a turn without role"),
        ([{**ROW, "turns": ["a"]}], {}, "but a list of turns"),
        ([{**ROW, "temperature": -1.0}], {}, "temperature is -1.0"),
        ([{**ROW, "temperature": "1"}], {}, "temperature is '1', but a number"),
        ([{**ROW, "temperature": True}], {}, "temperature is True, but a number"),
        ([{**ROW, "top_p": 0.0}], {}, "top_p is 0.0"),
        ([{**ROW, "top_p": 2.0}], {}, "top_p is 2.0"),
        ([{**ROW, "top_p": 1e-60}], {}, "top_p is 1e-60"),
        ([ROW], {"temperature": -1.0}, "--temperature -1.0 cannot be used"),
        ([ROW], {"temperature": float("nan")}, "--temperature nan"),
        (['{"input_ids": [1], "input_ids": [2]}'], {}, "line 1: not valid JSON .*'input_ids' occurs twice"),
        ([], {}, "no samples in it"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_the_reason(root, tmp_path, rows, given, words):
    with pytest.raises(InputError, match=words):
        import_samples(root, order(jsonl(tmp_path, rows), **given))
    assert [path for path in (tmp_path / "runs").rglob("*") if path.is_file() or path.name == "ext"] == []


def column(name: str, value: Any, kind: pa.DataType | None = None) -> pa.Table:
    """Two samples, as a table with `value` in a column of the second."""
    good = {**ROW, "prompt_id": "a", "sample_id": 0, "seed": 1, "temperature": 1.0, "finish_reason": "stop"}
    table = pa.Table.from_pylist([good, {**good, "sample_id": 1}])
    return table.set_column(table.schema.names.index(name), name, pa.array([table[name][0].as_py(), value], kind))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (column("seed", 2**63, pa.uint64()), "sample 2: seed cannot be stored"),
        (column("seed", None), "sample 2: seed is null"),
        (column("temperature", float("nan")), "sample 2: temperature is nan"),
        (column("reward", float("nan")), "sample 2: reward is not finite"),
        (column("reward", float("-inf")), "sample 2: reward is not finite"),
        (column("logprobs", [-1.0, None, -1.0]), "sample 2: logprobs holds a null"),
        (
            column("logprobs", [-1.0, float("nan"), -1.0]),
            "sample 2: logprobs has a value above 0 or not finite",
        ),
        (column("input_ids", [-1]), "sample 2: prompt_tokens .* not a token id"),
    ],
)
def test_columns_of_parquet_that_are_refused(root, tmp_path, table, words):
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=words):
        import_samples(root, order(str(tmp_path / "a.parquet")))
    assert runs(root) == []


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("input_ids", pa.array([[3.0, 4.0]]), "is of the type list<.*double>, but a list of integers"),
        ("input_ids", pa.array(["34"]), "is of the type string, but a list of integers"),
        ("sample_id", pa.array([0.0]), "is of the type double, but an integer"),
        ("prompt_id", pa.array([b"a"]), "is of the type binary, but a text or an integer"),
        ("prompt_id", pa.array([b"\xff"]).view(pa.string()), "sample 1: prompt_id cannot be stored"),
        ("temperature", pa.array([decimal.Decimal("1.0")]), "is of the type decimal.*, but a number"),
        ("temperature", pa.array(["1.0"]), "is of the type string, but a number"),
        ("seed", pa.array([datetime.date(2020, 1, 1)]), "is of the type date32.*, but an integer"),
        ("finish_reason", pa.array([1]), "is of the type int64, but a text"),
    ],
)
def test_types_of_parquet_that_are_refused(root, tmp_path, name, values, words):
    table = pa.Table.from_pylist([ROW])
    if name in table.schema.names:
        table = table.drop_columns(name)
    pq.write_table(table.append_column(name, values), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=rf"a\.parquet, sample 1: .*{words}" if "sample" not in words else words):
        import_samples(root, order(str(tmp_path / "a.parquet")))


def test_types_that_are_meant(root, tmp_path):
    rows = [
        {**ROW, "prompt_id": 7, "reward": True},
        "",
        {**ROW, "prompt_id": "7", "reward": None, "logprobs": [-1, 0, -2]},
        "",
    ]
    file = jsonl(tmp_path, rows, "A.JSONL")
    wide = {
        "input_ids": pa.array([[3, 4]] * 2, pa.large_list(pa.uint16())),
        "response_tokens": pa.array([[5, 6, 7]] * 2, pa.list_(pa.int8(), 3)),
        "logprobs": pa.array([[-0.5, -1.0, 0.0]] * 2, pa.list_(pa.float16())),
        "prompt_id": pa.array(["a", "a"]).dictionary_encode(),
        "sample_id": pa.array([1, 0], pa.uint64()),
        "reward": pa.nulls(2),
        "temperature": pa.array([0, 0]),
    }
    pq.write_table(pa.table(wide), tmp_path / "b.parquet")
    array = tmp_path / "c.json"
    array.write_text(json.dumps([ROW, ROW], indent=1))
    import_samples(root, order(file, str(tmp_path / "b.parquet"), str(array)))
    assert [(one["prompt_id"], one["sample_id"]) for one in samples(root)] == [("7", 0), ("7", 1)]
    rewards = read_stored_table(root, need(root, "ext", 1, Stage.REWARD)).to_pylist()
    assert [one["reward"] for one in rewards] == [1.0, None]
    assert [(one["sample_id"], one["logprobs"], one["temperature"]) for one in samples(root, 2)] == [
        (1, [-0.5, -1.0, 0.0], 0.0),
        (0, [-0.5, -1.0, 0.0], 0.0),
    ]
    assert len(samples(root, 3)) == 2


MANY = 8192  # rows of a batch


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"sample_id": 0}, "sample 0 of prompt 'a' occurs twice"),
        ({"sample_id": MANY, "input_ids": [9]}, f"sample {MANY + 1}: prompt_id is 'a', as of sample 1"),
        ({"sample_id": -1}, f"sample {MANY + 1}: sample_id is -1"),
        ({"sample_id": MANY, "seed": 3}, f"sample {MANY + 1}: it has seed, and samples before it have not"),
    ],
)
def test_samples_of_different_batches_are_of_one_file(root, tmp_path, last, words):
    rows = [{**ROW, "prompt_id": "a", "sample_id": number} for number in range(MANY)]
    with pytest.raises(InputError, match=words):
        import_samples(root, order(jsonl(tmp_path, [*rows, {**rows[0], **last}])))


def test_a_file_or_a_property_is_given_once(root, tmp_path):
    file = jsonl(tmp_path, [ROW])
    (tmp_path / "link.jsonl").symlink_to(file)
    for other in (file, f"{tmp_path}/./a.jsonl", f"{tmp_path}/link.jsonl"):
        with pytest.raises(InputError, match="is named twice"):
            import_samples(root, order(file, other))
    with pytest.raises(InputError, match="reward is to be both 'a' and 'b'"):
        mapped(["reward=a", "reward=b"])


def test_what_is_refused_in_a_later_file_leaves_nothing(root, tmp_path):
    good, bad = jsonl(tmp_path, [ROW]), jsonl(tmp_path, [{**ROW, "seed": "x"}], "b.jsonl")
    with pytest.raises(InputError, match=r"b\.jsonl, sample 1"):
        import_samples(root, order(good, bad))
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.is_file() or path.name == "ext"]
    import_samples(root, order(good))


@pytest.mark.parametrize(
    ("name", "words"), [("a.csv", r"end with \.jsonl, \.json or \.parquet"), ("gone.jsonl", "does not exist")]
)
def test_other_files_are_refused(root, tmp_path, name, words):
    with pytest.raises(InputError, match=words):
        import_samples(root, order(str(tmp_path / name)))


def test_a_damaged_parquet_file_is_refused(root, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and more")
    with pytest.raises(InputError, match="is not a Parquet file"):
        import_samples(root, order(str(tmp_path / "a.parquet")))
