import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from storage.errors import InputError
from tasks.config.data import DataSection
from tasks.data.prompts import check_lengths, draw, prompt_table, read_records, repetitions
from tasks.data.tokenizer import TextCodec

RECORDS = [{"id": f"p{n}", "prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(5)]
SECTION = DataSection(train="unused")


class Characters:
    """A tokenizer with one id per character, so that lengths are obvious."""

    stop_tokens = (0,)
    context = 16

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]


@pytest.fixture
def codec() -> TextCodec:
    return Characters()  # type: ignore[return-value]


def write_jsonl(path, lines):
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_jsonl_and_parquet_give_equal_records(tmp_path):
    jsonl = write_jsonl(tmp_path / "a.jsonl", [json.dumps(record) for record in RECORDS])
    pyarrow.parquet.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    assert read_records(jsonl) == read_records(str(tmp_path / "a.parquet")) == RECORDS


@pytest.mark.parametrize(
    ("lines", "fact"),
    [
        ([], "is empty"),
        (['{"prompt": "a"}', "{broken"], "line 2"),
        (['{"prompt": "a"}', "", "[1, 2]"], "line 3"),
    ],
)
def test_bad_files_are_refused_with_the_line(tmp_path, lines, fact):
    with pytest.raises(InputError, match=fact):
        read_records(write_jsonl(tmp_path / "bad.jsonl", lines))


@pytest.mark.parametrize("url", ["/nowhere/prompts.jsonl", "unknownfs://x/prompts.jsonl"])
def test_missing_files_are_refused(url):
    with pytest.raises(InputError, match=r"prompts\.jsonl"):
        read_records(url)


def test_a_file_that_only_claims_to_be_parquet(tmp_path):
    with pytest.raises(InputError, match="not a Parquet file"):
        read_records(write_jsonl(tmp_path / "a.parquet", ["{}"]))


def test_the_stored_table(codec):
    table = prompt_table(RECORDS, SECTION, codec, "train")
    assert table["prompt_id"].to_pylist() == [record["id"] for record in RECORDS]
    assert table["answer_tokens"][0].as_py() == [ord("1"), 0]
    assert json.loads(table["record"][4].as_py()) == RECORDS[4]


@pytest.mark.parametrize(
    ("records", "fact"),
    [
        ([{"id": "a", "question": "?"}], "field 'prompt' is None"),
        ([{"prompt": ""}], "field 'prompt' is ''"),
        ([{"id": 1, "prompt": "a"}, {"id": 1, "prompt": "b"}], "record 2: id '1' occurs twice"),
    ],
)
def test_bad_records_are_refused(codec, records, fact):
    with pytest.raises(InputError) as caught:
        prompt_table(records, SECTION, codec, "train")
    assert fact in str(caught.value)


@pytest.mark.parametrize(("prompt", "fits"), [("1+1=", True), ("1" * 12, True), ("1" * 13, False)])
def test_prompts_must_fit_into_the_context(codec, prompt, fits):
    table = prompt_table([{"id": "long", "prompt": prompt}], SECTION, codec, "train")
    if fits:
        check_lengths(table, 16, 4, "train")
        return
    with pytest.raises(InputError, match=r"'long' is too long: 13 tokens"):
        check_lengths(table, 16, 4, "train")


def test_every_pass_draws_each_prompt_once():
    rows = draw(rows=7, cursor=0, count=21, seed=3, shuffle=True).reshape(3, 7)
    assert [sorted(turn) for turn in rows.tolist()] == [list(range(7))] * 3
    assert rows[0].tolist() != rows[1].tolist()


@pytest.mark.parametrize("cursor", [0, 3, 7, 20])
def test_the_cursor_alone_is_the_state(cursor):
    whole = draw(rows=7, cursor=0, count=40, seed=3, shuffle=True)
    np.testing.assert_array_equal(
        draw(rows=7, cursor=cursor, count=5, seed=3, shuffle=True), whole[cursor : cursor + 5]
    )


@pytest.mark.parametrize(
    ("rows", "before"),
    [([], []), ([4, 2, 7], [0, 0, 0]), ([4, 2, 4, 4, 2, 7], [0, 0, 1, 2, 1, 0]), ([1, 1, 1], [0, 1, 2])],
)
def test_repetitions_within_a_draw(rows, before):
    assert repetitions(np.array(rows, dtype=np.int64)).tolist() == before


def test_a_draw_over_the_end_of_a_pass_names_every_sample_once():
    rows = draw(rows=10, cursor=6, count=12, seed=0, shuffle=True)
    assert len(set(rows.tolist())) < len(rows)
    names = set(zip(rows.tolist(), repetitions(rows).tolist(), strict=True))
    assert len(names) == len(rows)
