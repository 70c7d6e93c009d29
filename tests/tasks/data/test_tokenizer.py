"""Text becomes tokens as the makers of a model meant it, and token columns become texts a batch at a time."""

import json
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models

from storage.errors import InputError
from tasks.config.document import parse_config
from tasks.config.model import GeneratedModel
from tasks.data.backends import Chat, Makers, Plain
from tasks.data.generated import CHARACTERS, generate_tokenizer
from tasks.data.sources import codec_of
from tasks.data.tokenizer import StoredTexts, TextCodec
from tests.tasks.data.chat_model import BEGIN, CLOSE, END, chat_model, write

STOP = 999


@pytest.fixture(scope="module")
def codec():
    """A tokenizer of a thousand words; the last is special."""
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(1000)}, unk_token="w0"))
    words.add_special_tokens([f"w{STOP}"])
    return TextCodec(Plain(words), (STOP,), 10, left_out=frozenset([STOP]))


def column(lengths, value=None):
    """An array of lists of these lengths, of random tokens or of `value`."""
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    random = np.random.default_rng(0).integers(300, 1000, offsets[-1])
    tokens = random if value is None else np.full(offsets[-1], value)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens.astype(np.int32)))


@pytest.mark.parametrize("lengths", [[], [0], [3, 0, 1], [70_000, 1, 70_000], [40_000] * 5, [1] * 3000], ids=len)
def test_a_column_is_decoded_as_its_rows_are(codec, lengths):
    whole = column(lengths)
    expected = [codec.backend.tokenizer.decode(row, skip_special_tokens=True) for row in whole.to_pylist()]
    assert codec.decode_column(whole) == expected
    cut = len(lengths) // 3
    assert codec.decode_column(pa.chunked_array([whole.slice(0, cut), whole.slice(cut)])) == expected
    assert codec.decode_column(whole.slice(cut)) == expected[cut:]


def test_rows_of_any_kind_are_decoded(codec):
    assert codec.decode_batch([[1, 2], np.array([3, STOP], np.int32), (4,), []]) == ["w1 w2", "w3", "w4", ""]


@pytest.mark.slow
def test_no_column_becomes_lists_as_a_whole(codec):
    tokens = column([1000] * 1000, STOP)  # their text is empty
    tracemalloc.start()
    texts = codec.decode_column(pa.chunked_array([tokens]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert texts == [""] * 1000
    assert peak < tokens.nbytes  # as lists the column takes nine times as much


def test_a_generated_tokenizer_is_what_transformers_makes_of_it(tmp_path):
    generate_tokenizer(tmp_path, GeneratedModel())
    plain = TextCodec.from_directory(tmp_path).backend
    assert isinstance(plain, Plain)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    write(tmp_path / "tokenizer_config.json", {**config, "model_max_length": 128})
    makers = TextCodec.from_directory(tmp_path).backend
    assert isinstance(makers, Makers)
    texts = [CHARACTERS, "47+38=", "a?"]
    for special in (False, True):
        assert plain.encode(texts, special) == makers.encode(texts, special)
    assert plain.decode([[0, 1, 2, 5, 14]]) == makers.decode([[0, 1, 2, 5, 14]])
    assert (plain.size, plain.special, plain.token_id("+")) == (makers.size, makers.special, makers.token_id("+"))


def test_a_plain_text_begins_as_the_model_expects_and_does_not_end(tmp_path):
    codec = TextCodec.from_directory(chat_model(tmp_path))
    text = codec.encode("one")
    assert codec.begin == (BEGIN,)
    assert codec.opened(text) == [BEGIN, *text]  # the tokenizer would also put <|close|> behind it
    assert codec.opened(codec.encode("<|begin|>one")) == [BEGIN, *text]


def test_a_rendered_prompt_has_one_beginning(tmp_path):
    codec = TextCodec.from_directory(chat_model(tmp_path))
    text = codec.render(Chat([{"role": "user", "content": "one"}]), answering=True)
    tokens = codec.encode(text)
    assert tokens.count(BEGIN) == 1
    assert codec.visible(tokens) == ["<|begin|>", "<|user|>", "one", "<|end|>", "\n", "<|assistant|>"]


@pytest.mark.parametrize(
    ("config", "generation", "eos", "stop"),
    [
        (CLOSE, None, None, (CLOSE,)),
        (CLOSE, None, "<|end|>", (CLOSE, END)),
        ([CLOSE, 9], [9, 8], "<|end|>", (CLOSE, 9, 8, END)),
        (None, 7, None, (7,)),
        (None, None, "<|end|>", (END,)),
    ],
)
def test_stop_tokens_are_those_of_all_files(tmp_path, config, generation, eos, stop):
    chat_model(tmp_path, config={"eos_token_id": config}, eos_token=eos)
    if generation is not None:
        write(tmp_path / "generation_config.json", {"eos_token_id": generation})
    assert TextCodec.from_directory(tmp_path).stop_tokens == stop


def test_stop_tokens_can_be_given(tmp_path):
    chat_model(tmp_path, config={"eos_token_id": None}, eos_token=None)
    assert TextCodec.from_directory(tmp_path, ["<|end|>", 7]).stop_tokens == (END, 7)


@pytest.mark.parametrize("given", ["two tokens", "<|unknown|>", 100_000, -1])
def test_what_is_no_token_cannot_be_a_stop_token(tmp_path, given):
    with pytest.raises(InputError, match=r"rollout\.stop_tokens: .* is not a token of the model"):
        TextCodec.from_directory(chat_model(tmp_path), [given])


@pytest.mark.parametrize("given", [None, []])
def test_no_stop_token_at_all_is_refused(tmp_path, given):
    chat_model(tmp_path, config={"eos_token_id": None}, eos_token=None)
    with pytest.raises(InputError, match="no stop token is known"):
        TextCodec.from_directory(tmp_path, given)


def test_code_of_the_directory_is_never_run(tmp_path):
    chat_model(tmp_path, tokenizer_class="Mine", auto_map={"AutoTokenizer": ["mine.Mine", None]})
    (tmp_path / "mine.py").write_text("raise SystemExit('run')")
    with pytest.raises(InputError, match="reads without remote code") as caught:
        TextCodec.from_directory(tmp_path)
    assert str(tmp_path) not in str(caught.value)


def test_a_broken_tokenizer_is_refused_without_a_temporary_folder(tmp_path):
    chat_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="the tokenizer of the model cannot be read") as caught:
        TextCodec.from_directory(tmp_path)
    assert str(tmp_path) not in str(caught.value)


def test_a_tokenizer_is_read_once_in_a_process(tmp_path):
    chat_model(tmp_path / "first")
    chat_model(tmp_path / "second")
    first, second = (TextCodec.from_directory(tmp_path / name) for name in ("first", "second"))
    assert first.backend is second.backend
    assert first.identity == second.identity
    other = TextCodec.from_directory(chat_model(tmp_path / "second", config={"eos_token_id": END}))
    assert other.backend is not first.backend
    assert other.identity != first.identity


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({}, "<|assistant|>one two<|user|>"),
        ({"special_tokens": "hidden"}, "one two"),
        ({"stop_tokens": ["<|user|>"]}, "<|assistant|>one two<|close|><|end|>"),
    ],
)
def test_only_tokens_that_are_no_text_are_left_out(tmp_path, section, text):
    """Padding is <|system|> here; the other special tokens were sampled."""
    document = {
        "model": {"source": str(chat_model(tmp_path, pad_token="<|system|>"))},
        "data": {"train": "unused"},
        "rollout": section,
        "train": {"max_length": 9, "optimizer": {"learning_rate": 1.0}},
    }
    codec = codec_of(parse_config(document, "test"), tmp_path)
    sampled = codec.encode("<|begin|><|system|><|assistant|>one two<|close|><|user|><|end|>")
    assert codec.decode_batch([sampled]) == [text]
    stored = StoredTexts(Tokenizer.from_file(str(tmp_path / "tokenizer.json")), {}, codec.left_out)
    table = pa.table({"prompt_id": ["p"], "response_tokens": [sampled]})
    assert stored(table)[1].to_pylist() == [text]
