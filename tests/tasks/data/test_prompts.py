"""The stored tables of prompts: their content, and the prompts that are refused, dropped or held out."""

import dataclasses
import json

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from storage.errors import InputError
from tasks.config.data import DataSection
from tasks.config.model import GeneratedModel
from tasks.data.backends import Plain
from tasks.data.files import Read
from tasks.data.generated import generate_tokenizer
from tasks.data.prompts import Room, check_lengths, mapped, prompt_batches, split_off, twice
from tasks.data.rendering import Renderer
from tasks.data.tokenizer import TextCodec

RECORDS = [{"id": f"p{n}", "prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(5)]
WIDE = Room(1000, 4)


def characters() -> TextCodec:
    """A tokenizer with one id per character, so that lengths are obvious."""
    tokenizer = Tokenizer(models.WordLevel({chr(number): number for number in range(256)}, unk_token=chr(1)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return TextCodec(Plain(tokenizer), (0,), 1000, vocabulary=200)


def table_of(records, room=WIDE, qualifier=""):
    source = DataSection(train="unused").sources("train")[0]
    reads = [Read(f"record {number}", record) for number, record in enumerate(records, 1)]
    return mapped(prompt_batches(reads, Renderer(source, characters(), "train"), room, qualifier))


def prompts(*texts):
    return [{"prompt": text} for text in texts]


def test_the_stored_table():
    table = table_of(RECORDS)
    assert table["prompt_id"].to_pylist() == [record["id"] for record in RECORDS]
    assert table["prompt"].to_pylist() == [record["prompt"] for record in RECORDS]
    assert table["prompt_tokens"][1].as_py() == [ord(character) for character in "1+1="]
    assert table["answer_tokens"][0].as_py() == [ord("1"), 0]
    assert json.loads(table["record"][4].as_py()) == RECORDS[4]


def test_an_answer_that_the_tokenizer_cannot_write_is_not_trained():
    with pytest.raises(InputError, match=r"train, record 2: the tokenizer makes .* of the answer '2€', for want of"):
        table_of([{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1=", "answer": "2€"}])


def test_a_prompt_that_the_tokenizer_cannot_write_is_noted(tmp_path):
    generate_tokenizer(tmp_path, GeneratedModel())
    source = DataSection(train="unused").sources("train")[0]
    renderer = Renderer(source, TextCodec.from_directory(tmp_path), "train")
    reads = [Read(f"record {number}", {"prompt": text}) for number, text in enumerate(["1+1=", "1€=", "2", "é"], 1)]
    assert mapped(prompt_batches(reads, renderer, WIDE)).num_rows == 4
    (note,) = renderer.notes.sentences("train")
    assert (
        note == "train, record 2 and 1 more: the tokenizer lacks characters of the prompt, and gives '<unk>' for them"
    )


def test_an_answer_follows_the_tokens_of_its_prompt():
    """The tokenizer knows `==` as one token, but the model continues after `=`."""
    codec = dataclasses.replace(characters(), vocabulary=300)
    codec.backend.tokenizer.add_tokens(["=="])
    source = DataSection(train="unused").sources("train")[0]
    records = [{"prompt": "1+1=", "answer": "=2"}, {"prompt": "1+1", "answer": "==2"}]
    reads = [Read("", record) for record in records]
    table = mapped(prompt_batches(reads, Renderer(source, codec, "train"), WIDE))
    assert table["answer_tokens"].to_pylist() == [[ord("="), ord("2"), 0], [256, ord("2"), 0]]


def test_a_missing_id_is_the_number_of_the_record():
    assert table_of([*prompts("a", "b"), {"id": None, "prompt": "c"}])["prompt_id"].to_pylist() == ["1", "2", "3"]
    assert table_of(prompts("a"), qualifier="words/")["prompt_id"].to_pylist() == ["words/1"]


def test_an_id_that_occurs_twice_is_found():
    assert twice(table_of(RECORDS)) is None
    assert twice(table_of([*RECORDS, RECORDS[3], RECORDS[1]])) == "p1"


@pytest.mark.parametrize(("length", "fits"), [(4, True), (12, True), (13, False)])
def test_prompts_must_fit_into_the_context(length, fits):
    records = [{"id": "long", "prompt": "1" * length}]
    if fits:
        check_lengths(table_of(records, Room(16, 4)), 16, 4, "train")
        return
    for attempt in (lambda: table_of(records, Room(16, 4)), lambda: check_lengths(table_of(records), 16, 4, "train")):
        with pytest.raises(InputError, match=r"'long' is too long: 13 tokens"):
            attempt()


def test_a_solved_example_must_fit_into_what_is_trained():
    records = [{"id": "long", "prompt": "12345", "answer": "6789"}]
    assert table_of(records, Room(16, 4, max_length=10)).num_rows == 1
    with pytest.raises(InputError, match=r"'long' is too long: 10 tokens with its answer, but train\.max_length = 9"):
        table_of(records, Room(16, 4, max_length=9))


def test_prompts_that_are_too_long_are_dropped_if_that_is_wanted():
    table = table_of(prompts("1", "1" * 13, "1" * 12), Room(16, 4, drop=True))
    assert table["prompt_id"].to_pylist() == ["1", "3"]


def test_a_token_that_the_model_lacks_is_refused():
    with pytest.raises(InputError, match=r"token 228 \('ä'\).* embeddings for 200"):
        table_of(prompts("ä"))


@pytest.mark.parametrize("count", [1, 3])
def test_no_text_is_on_both_sides_of_a_split(count):
    table = table_of(prompts("a", "b", "a", "c", "d", "b", "a"))
    left, held, which = split_off(table, count, seed=0)
    texts = [side["prompt"].to_pylist() for side in (left, held)]
    assert len(texts[1]) == len(set(texts[1])) == count
    assert not set(texts[0]) & set(texts[1])
    assert set(texts[0]) | set(texts[1]) == set("abcd")
    assert table.filter(which).equals(left)


def test_a_split_follows_from_the_seed_and_the_texts():
    records = [{"id": str(number), "prompt": f"{number:03d}"} for number in range(40)]
    first = split_off(table_of(records), 10, seed=1)[1]["prompt"].to_pylist()
    assert sorted(split_off(table_of(records[::-1]), 10, seed=1)[1]["prompt"].to_pylist()) == first
    assert split_off(table_of(records), 10, seed=2)[1]["prompt"].to_pylist() != first


def test_a_split_that_leaves_nothing_is_refused():
    with pytest.raises(InputError, match=r"data\.hold_out = 2 leaves none of the 2 different prompts"):
        split_off(table_of(prompts("a", "b", "a")), 2, seed=0)


def test_a_table_of_many_batches_is_the_same_table():
    records = [{"id": str(number), "prompt": "x"} for number in range(3000)]
    table = table_of(records)
    assert np.array_equal(np.array(table["prompt_id"].to_pylist(), dtype=int), np.arange(3000))
    left, held, _ = split_off(table_of([*records, {"id": "y", "prompt": "y"}]), 1, seed=0)
    assert left.num_rows + held.num_rows in (2, 3001)
