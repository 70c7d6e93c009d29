"""Values of every type in every form: each is meant, or refused with file, record and field. None is guessed."""

import csv
import datetime
import decimal
import gzip
import io
import json
import tomllib
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.errors import InputError
from tasks.config.document import parse_config
from tasks.data.sources import prompts_of, text_codec
from tests.tasks.data.chat_model import chat_model
from tests.tasks.data.test_sources import LEAST

ASKED = [{"role": "user", "content": "hi"}]
SOLVED = [*ASKED, {"role": "assistant", "content": "2"}]
CHAT = "<|begin|><|user|>hi<|end|>\n<|assistant|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(chat_model(tmp_path_factory.mktemp("chat")))


@pytest.fixture
def rows(tmp_path, model):
    """Rows of the prompt table of a file with some content."""

    def made(name, content, **data):
        path = tmp_path / name
        if isinstance(content, pa.Table):
            pq.write_table(content, path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        config = parse_config(
            {**tomllib.loads(LEAST), "data": {"train": str(path), **data}, "model": {"source": model}}, "test"
        )
        return prompts_of(config, text_codec(config)).tables["train"].to_pylist()

    return made


def line(**fields):
    return json.dumps({"prompt": "1+1=", **fields}) + "\n"


def cell(text):
    stream = io.StringIO()
    csv.writer(stream).writerows([["prompt"], [text]])
    return stream.getvalue()


def column(value, kind=None, name="x"):
    return pa.table({"prompt": ["a"], name: pa.array([value], kind)})


def packed(*names):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in names:
            archive.writestr(name, line())
    return stream.getvalue()


MEANT = {
    "integer": (line(answer=2), "2"),
    "text": (line(answer=" 2"), " 2"),
    "integer beyond 64 bits": (line(answer=2**70), str(2**70)),
    "null": (line(answer=None), None),
    "nothing": (line(answer=""), None),
    "blanks": (line(answer=" \n"), None),
    "no width": (line(answer="\u200b\x00"), None),
    "message": (line(answer=SOLVED[1:]), "2"),
    "empty turn": (line(prompt=[*ASKED, {"role": "assistant", "content": ""}]), None),
}


@pytest.mark.parametrize(("content", "answer"), MEANT.values(), ids=MEANT)
def test_what_is_meant_as_an_answer(rows, content, answer):
    (row,) = rows("a.jsonl", content)
    assert row["answer"] == answer
    assert (row["answer_tokens"] is None) == (answer is None)


REFUSED = {
    # answers
    "list": ("a.jsonl", line() + line(answer=["2"]), "record 2: field 'answer' is ['2']"),
    "no list": ("a.jsonl", line(answer=[]), "field 'answer' is []"),
    "truth": ("a.jsonl", line(answer=True), "field 'answer' is True"),
    "float": ("a.jsonl", line(answer=2.0), "field 'answer' is 2.0"),
    "table": ("a.jsonl", line(answer={"x": 1}), "field 'answer' is {'x': 1}"),
    "question": ("a.jsonl", line(answer=ASKED), "field 'answer' is [{"),
    "conversation": ("a.jsonl", line(answer=SOLVED), "field 'answer' is [{"),
    "float of pandas": ("a.parquet", column(2.0, name="answer"), "record 1: field 'answer' is 2.0"),
    # ids
    "float id": ("a.jsonl", line(id=1.0), "record 1: field 'id' is 1.0"),
    "truth id": ("a.jsonl", line(id=True), "field 'id' is True"),
    "list id": ("a.jsonl", line(id=[1]), "field 'id' is [1]"),
    "one id": ("a.jsonl", "\n" + line(id=1) + line() + line(id="1"), "'1' occurs twice, in dataset {}, record 1 and"),
    # prompts
    "number": ("a.jsonl", line(prompt=1), "field 'prompt' is 1, but a text"),
    "blank": ("a.jsonl", line(prompt=" "), "field 'prompt' is ' '"),
    "no width": ("a.jsonl", line(prompt="\u200b"), "field 'prompt' is '\\u200b'"),
    "message": ("a.jsonl", line(prompt=ASKED[0]), "field 'prompt' is {"),
    # contents of no record
    "surrogate": ("a.jsonl", line(prompt="\ud83d"), "record 1: field 'prompt' is '\\ud83d', which has half of a surr"),
    "surrogate answer": ("a.jsonl", line(answer="\ud83d"), "field 'answer' is '\\ud83d'"),
    "surrogate id": ("a.jsonl", line(id="\ud83d"), "field 'id' is '\\ud83d'"),
    "surrogate inside": ("a.jsonl", line(x={"y": [1, {"z": "\udfff"}]}), "field 'x.y[1].z' is '\\udfff'"),
    "surrogate key": ("a.jsonl", line(**{"\ud83d": 1}), "has the key '\\ud83d'"),
    "infinite": ("a.jsonl", '{"prompt": "a", "x": 1e999}', "record 1: field 'x' is inf"),
    "bytes": ("a.parquet", column(b"x", name="answer"), "record 1: field 'answer' is a bytes"),
    "date": ("a.parquet", column(datetime.date(2020, 1, 1)), "field 'x' is a date"),
    "decimal": ("a.parquet", column(decimal.Decimal("1.50"), name="answer"), "field 'answer' is a Decimal"),
    "NaN in a column": ("a.parquet", column(float("nan")), "field 'x' is nan"),
    "far date": ("a.parquet", column(2**52, pa.timestamp("ms")), "record 1: field 'x' cannot be read (date value"),
    "numbers as keys": ("a.parquet", column([(1, 1)], pa.map_(pa.int64(), pa.int64())), "field 'x' has the key 1"),
    "too deep": ("a.jsonl", '{"prompt": "a", "x": %s}' % ("[" * 800 + "]" * 800), "record 1: it is nested too deeply"),
    # invalid JSON, and JSON with two readings
    "NaN": ("a.jsonl", '{"prompt": "a", "x": NaN}', "line 1: not valid JSON (NaN is not a number"),
    "key twice": ("a.jsonl", line() + '{"prompt": "a", "prompt": "b"}', "line 2: not valid JSON (the key 'prompt'"),
    "deeper": ("a.jsonl", '{"prompt": "a", "x": %s}' % ("[" * 10**5), "line 1: not valid JSON (nested too deeply"),
    "raw surrogate": ("a.jsonl", b'{"prompt": "\xed\xa0\xbd"}', "line 1: not valid JSON ('utf-8' codec"),
    "UTF-16": ("a.jsonl", line().encode("utf-16"), "line 1: not valid JSON ('utf-8' codec"),
    "NUL behind it": ("a.jsonl", line() + "\0\0", "line 2: not valid JSON"),
    "an array of lines": ("a.jsonl", "[{}]", 'A file that is one array has the format "json"'),
    "half an array": ("a.json", '[{"prompt": "a"}', "{}: not valid JSON (Expecting ','"),
    "no objects": ("a.json", "[1]", "element 1: a int where an object is expected"),
    "header twice": ("a.csv", "prompt,prompt\na,b\n", "the header has the field 'prompt' twice"),
    "CSV of another encoding": ("a.csv", b"prompt\n\xff\n", "not UTF-8"),
    "column twice": ("a.parquet", pa.table([["a"], ["b"]], ["prompt", "prompt"]), "has the field 'prompt' twice"),
    # files
    "no gzip": ("a.jsonl.gz", line(), "cannot be read as jsonl: Not a gzipped file"),
    "half a gzip": ("a.jsonl.gz", gzip.compress(line().encode())[:-9], "cannot be read as jsonl"),
    "damaged gzip": ("a.jsonl.gz", gzip.compress(line().encode())[:10] + b"\xff" * 20, "cannot be read as jsonl"),
    "damaged xz": ("a.jsonl.xz", b"\xfd7zXZ\x00junkjunk", "cannot be read as jsonl"),
    "no zip": ("a.jsonl.zip", b"PK", "cannot be read as jsonl"),
    "two in a zip": ("a.jsonl.zip", packed("a", "b"), "is an archive of 2 files"),
    "unknown packing": ("a.jsonl.7z", b"7z", "(.7z): unpack it"),
    "damaged Parquet": ("a.parquet", b"PAR1xxxxPAR1", "is not a Parquet file"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "fact"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(rows, name, content, fact, tmp_path):
    with pytest.raises(InputError) as caught:
        rows(name, content)
    assert fact.replace("{}", str(tmp_path / name)) in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


LOOKS = [
    repr(ASKED),
    repr([{"content": "hi", "role": "user"}]),
    f"array({ASKED!r}, dtype=object)",
    repr(SOLVED).replace("},", "}\n"),
    "[Message(role='user', content='hi')]",
    "- role: user\n  content: hi",
    "[{role: user, content: hi}]",
    repr([tuple(ASKED[0].items())]),
    str(json.dumps(ASKED).encode()),
    json.dumps(ASKED[0]),
    json.dumps(json.dumps(ASKED)),
    json.dumps([ASKED]),
    json.dumps([*ASKED, "x"]),
    json.dumps([{"from": "human", "value": "hi"}]),
    json.dumps(ASKED)[:-1],
    json.dumps([{"role": "user", "content": "\ud83d"}]),
    '[{"role": "user", "role": "x", "content": "hi"}]',
    f"\ufeff{json.dumps(ASKED)}",
]


@pytest.mark.slow
@pytest.mark.parametrize("text", LOOKS)
def test_messages_that_are_no_json_are_not_given_to_the_model_as_text(rows, text):
    with pytest.raises(
        InputError, match=r'record 1: field .prompt. looks like messages, but.*data\.prompt = "{prompt}"'
    ):
        rows("a.csv", cell(text))
    assert rows("a.csv", cell(text), prompt="{prompt}")[0]["prompt"] == text  # the repair


@pytest.mark.parametrize("text", [json.dumps(ASKED), f" {json.dumps(ASKED)} ", json.dumps(ASKED, indent=2)])
def test_messages_are_json_of_any_spacing(rows, text):
    assert rows("a.csv", cell(text))[0]["prompt"] == CHAT


@pytest.mark.parametrize(
    "text", ["[1, 2]", '[{"a": 1}] is?', "{{role}}: x", "The role: x, content: y", '"role" or "a"?']
)
def test_other_texts_with_brackets_are_texts(rows, text):
    assert rows("a.csv", cell(text))[0]["prompt"] == text


SAME = {
    "A.CSV": "prompt,answer\na,\nb,2\n",
    "A.TSV": "prompt\tanswer\na\t\nb\t2\n",
    "A.JSONL": '{"prompt": "a"}\n\n{"prompt": "b", "answer": "2"}\n\n',
    "bom.csv": "\ufeffprompt,answer\r\na,\r\n\r\nb,2\r\n",
    "bom.jsonl": '\ufeff{"prompt": "a"}\r\n \r\n{"prompt": "b", "answer": 2}',
    "one line.json": '[{"prompt": "a"}, {"prompt": "b", "answer": "2"}]',
    "many.Json": json.dumps([{"prompt": "a"}, {"prompt": "b", "answer": "2"}], indent=1),
    "lines.json": '\n{"prompt": "a"}\n{"prompt": "b", "answer": "2"}\n',
    "a.csv.GZ": gzip.compress(b"prompt,answer\na,\nb,2\n"),
    "a.parquet": pa.table({"prompt": ["a", "b"], "answer": [None, 2]}),
    **dict.fromkeys(("a?b.csv", "a#b.csv", "a*b.csv", "a[1].csv", "a::b.csv", "a b.csv"), "prompt,answer\na,\nb,2"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content"), SAME.items(), ids=SAME)
def test_every_form_and_name_gives_the_same(rows, name, content):
    assert [(row["prompt_id"], row["prompt"], row["answer"]) for row in rows(name, content)] == [
        ("1", "a", None),
        ("2", "b", "2"),
    ]


def test_a_null_of_a_column_is_not_in_messages_and_one_of_json_is(tmp_path):
    """A column has every key in every row, so tool calls have nulls where others have arguments."""
    template = "{{ messages[-1]['tool_calls'][0]['arguments'] | tojson }}{% if add_generation_prompt %}>{% endif %}"
    model = str(chat_model(tmp_path / "model", template=template))
    called = {"role": "user", "content": "", "tool_calls": [{"arguments": {"city": "Rome", "unit": None}}]}
    config = {**tomllib.loads(LEAST), "model": {"source": model}}
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": [called]}))
    pq.write_table(pa.Table.from_pylist([{"prompt": [called]}]), tmp_path / "a.parquet")
    found = []
    for name in ("a.jsonl", "a.parquet"):
        given = parse_config({**config, "data": {"train": str(tmp_path / name)}}, "test")
        found.append(prompts_of(given, text_codec(given)).tables["train"]["prompt"][0].as_py())
    assert found == ['{"city": "Rome", "unit": null}>', '{"city": "Rome"}>']


@pytest.mark.parametrize("value", [0.5, True, ["a"], {"a": 1}])
def test_a_template_takes_texts_and_integers(rows, value):
    assert rows("a.jsonl", json.dumps({"q": 5}), prompt="{q}=")[0]["prompt"] == "5="
    with pytest.raises(
        InputError, match=r"record 1: data\.prompt names the field 'q', which is .*: a text or an integer"
    ):
        rows("a.jsonl", json.dumps({"q": value}), prompt="{q}=")


def test_a_template_that_gives_nothing(rows):
    with pytest.raises(InputError, match=r"record 1: data\.prompt gives ' '"):
        rows("a.csv", "q,r\n,\n", prompt="{q} {r}")


def test_fields_can_be_left_out(rows, tmp_path):
    table = pa.table({"prompt": ["a"], "when": [datetime.date(2020, 1, 1)], "x": [1]})
    assert json.loads(rows("a.parquet", table, leave_out=["when"])[0]["record"]) == {"prompt": "a", "x": 1}
    assert json.loads(rows("a.csv", "prompt,x\na,1\n", leave_out=["x"])[0]["record"]) == {"prompt": "a"}
    with pytest.raises(InputError, match=r"a\.csv: no record has the field 'y', which data\.leave_out names"):
        rows("a.csv", "prompt,x\na,1\n", leave_out=["x", "y"])


def test_a_record_reaches_rewards_as_it_was_written(rows):
    record = {"prompt": "1+1=", "x": [2**70, 0.1, None, True, {"é": "\x00"}], "answer": ""}
    assert json.loads(rows("a.jsonl", json.dumps(record))[0]["record"]) == record


def test_answers_are_for_rewards_alone_if_that_is_said(rows):
    (row,) = rows("a.jsonl", line(answer=["2", "two"]), answer_field="")
    assert (row["answer"], json.loads(row["record"])["answer"]) == (None, ["2", "two"])
