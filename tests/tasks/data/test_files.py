"""Records are read from files of several forms and places, one after another, with a digest of the content."""

import csv
import gzip
import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet
import pytest

from storage.errors import InputError
from tasks.config.data import DataSource
from tasks.data.files import name_of, opened, state

RECORDS = [{"id": f"p{n}", "prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(5)]


def write_jsonl(path, records=RECORDS):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


def write_lines(path, lines):
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def write_csv(path, records=RECORDS, delimiter=","):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, records[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(records)
    return str(path)


def read(source, **more):
    with opened(DataSource(source=str(source), **more)) as content:
        return [one.values for one in content.records()], content.digest


def test_every_form_gives_equal_records(tmp_path):
    pyarrow.parquet.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(Path(write_jsonl(tmp_path / "a.jsonl")).read_text())
    write_csv(tmp_path / "a.csv")
    write_csv(tmp_path / "a.tsv", delimiter="\t")
    for name in ("a.jsonl", "a.jsonl.gz", "a.csv", "a.tsv", "a.parquet"):
        assert read(tmp_path / name)[0] == RECORDS, name
    (tmp_path / "a.csv").rename(tmp_path / "table")
    assert read(tmp_path / "table", format="csv")[0] == RECORDS


def test_a_pattern_names_files_in_the_order_of_their_names(tmp_path):
    for number in (2, 1):
        write_jsonl(tmp_path / f"part-{number}.jsonl", [{"id": number}])
    assert read(tmp_path / "part-*.jsonl")[0] == [{"id": 1}, {"id": 2}]


def test_files_of_another_machine_are_read_too(tmp_path):
    with fsspec.open("memory://prompts/a.jsonl", "w") as file:
        file.write('{"id": 1}\n')
    with fsspec.open("memory://prompts/b.csv", "w") as file:
        file.write("id\n2\n")
    assert read("memory://prompts/*")[0] == [{"id": 1}, {"id": "2"}]


def test_the_digest_is_that_of_the_content(tmp_path):
    first, second = (write_jsonl(tmp_path / name) for name in ("a.jsonl", "b.jsonl"))
    assert read(first)[1] == read(second)[1]
    write_jsonl(tmp_path / "b.jsonl", RECORDS[::-1])
    assert read(first)[1] != read(second)[1]


def test_the_state_of_a_source_changes_with_its_files(tmp_path):
    source = DataSource(source=f"{tmp_path}/*.jsonl")
    seen = [state(source)]
    write_jsonl(tmp_path / "a.jsonl")
    seen.append(state(source))
    write_jsonl(tmp_path / "b.jsonl")
    seen.append(state(source))
    (tmp_path / "b.jsonl").write_text("{}")
    seen.append(state(source))
    assert len(set(seen)) == 4
    assert state(source) == seen[-1]


@pytest.mark.parametrize(
    ("name", "lines", "fact"),
    [
        ("a.jsonl", ['{"prompt": "a"}', "{broken"], "line 2: not valid JSON"),
        ("a.jsonl", ['{"prompt": "a"}', "", "[1, 2]"], "line 3: a list where an object is expected"),
        ("a.csv", ["id,prompt", "1,a,b"], "line 2: more fields than the header's 2"),
        ("a.csv", ["id,prompt", "1"], "line 2: fewer fields than the header's 2"),
        ("a.csv", ["id,prompt", '1,"a"b'], "line 2: not valid CSV"),
        ("a.parquet", ["{}"], "not a Parquet file"),
        ("a.jsonl.gz", ["{}"], "cannot be read as jsonl"),
    ],
)
def test_bad_files_are_refused_with_the_line(tmp_path, name, lines, fact):
    with pytest.raises(InputError, match=fact):
        read(write_lines(tmp_path / name, lines))


@pytest.mark.parametrize("url", ["/nowhere/prompts.jsonl", "/nowhere/*/prompts.jsonl", "unknownfs://x/prompts.jsonl"])
def test_missing_files_are_refused(url):
    with pytest.raises(InputError, match=r"prompts\.jsonl"):
        read(url)


def test_a_folder_is_refused_with_the_pattern_to_use(tmp_path):
    with pytest.raises(InputError, match=r"is a folder: name its files by a pattern, such as .*/\*\.jsonl"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("/data/gsm8k.train.jsonl", "gsm8k"),
        ("s3://bucket/math/part-*.parquet", "math"),
        ("https://host/words.csv?X-Sig=1", "words"),
        ("openai/gsm8k@main", "gsm8k"),
        ("https://host/words.csv#all", "words"),
        ("/data/words?.csv", "words?"),
        ("s3://bucket/words#1.csv", "words#1"),
        ("env:PROMPTS", "PROMPTS"),
    ],
)
def test_a_source_has_a_name(source, name):
    assert name_of(DataSource.model_construct(source=source)) == name
    assert name_of(DataSource.model_construct(source=source, name="own")) == "own"


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """A cache of `datasets` that holds org/words, as if it had been downloaded."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_jsonl(tmp_path / "words.jsonl")
    folder = tmp_path / "cache" / "org___words" / "main" / "0.0.0" / "0123456789abcdef"
    builder = datasets.load_dataset_builder(
        "json", data_files={"test": str(tmp_path / "words.jsonl")}, cache_dir=tmp_path
    )
    builder.download_and_prepare(output_dir=str(folder))
    for file in folder.glob("json-*.arrow"):
        file.rename(folder / file.name.replace("json-", "words-"))
    facts = json.loads((folder / "dataset_info.json").read_text())
    (folder / "dataset_info.json").write_text(json.dumps({**facts, "config_name": "main", "dataset_name": "words"}))
    return tmp_path


def test_a_data_set_of_the_hub_comes_from_its_cache(hub_cache):
    records, digest = read("org/words", subset="main", split="test")
    assert records == RECORDS
    fewer, other = read("org/words", subset="main", split="test[:2]")
    assert fewer == RECORDS[:2]
    assert other != digest


def test_what_the_cache_does_not_hold_is_not_downloaded(hub_cache):
    with pytest.raises(InputError, match=r"split test of the hub's data set cannot be had .*data\.download = true"):
        read("org/other", split="test")
    with pytest.raises(InputError, match="as a data set of the hub it needs a split"):
        read("org/words")
