import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from storage.errors import InputError
from tasks.config.data import GeneratedAddition
from tasks.config.model import GeneratedModel
from tasks.data.generated import CHARACTERS, character_tokenizer, forget_carries, generate_addition, generate_model
from tasks.data.tokenizer import TextCodec

SECTION = GeneratedAddition(held_out=100, warmup=2000, warmup_mistakes=0.75)


def tables(seed=0, section=SECTION):
    return generate_addition(section, seed)


@pytest.mark.parametrize(
    ("first", "second", "wrong"), [(47, 38, 75), (12, 34, 46), (99, 99, 88), (90, 15, 5), (7, 8, 5), (150, 75, 125)]
)
def test_a_sum_without_its_carries(first, second, wrong):
    assert forget_carries(first, second) == wrong


def test_answers_are_right_and_of_one_width():
    for record in tables()["train"] + tables()["held_out"]:
        first, second = map(int, record["id"].split("+"))
        assert record["prompt"] == f"{first}+{second}="
        assert int(record["answer"]) == first + second
        assert len(record["answer"]) == 3


def test_no_held_out_sum_is_seen_in_training_in_either_order():
    made = tables()
    seen = {frozenset(record["id"].split("+")) for name in ("train", "warmup") for record in made[name]}
    held = {frozenset(record["id"].split("+")) for record in made["held_out"]}
    assert len(made["held_out"]) == SECTION.held_out
    assert not seen & held


def test_the_share_of_mistaken_demonstrations():
    right = {record["id"]: record["answer"] for record in tables()["train"]}
    shown = tables()["warmup"]
    carrying = [r for r in shown if forget_carries(*map(int, r["id"].split("+"))) != int(right[r["id"]])]
    mistaken = sum(record["answer"] != right[record["id"]] for record in carrying) / len(carrying)
    assert len(shown) == SECTION.warmup
    assert mistaken == pytest.approx(0.75, abs=0.04)


def test_a_seed_gives_the_same_data_and_another_seed_other_data():
    assert tables(1) == tables(1)
    assert tables(1) != tables(2)


def test_holding_out_everything_is_refused():
    with pytest.raises(InputError, match="leaves none of the 55 sums"):
        tables(section=GeneratedAddition(min_operand=0, max_operand=9, held_out=100))


def test_the_tokenizer_is_one_token_a_character_and_back(tmp_path):
    generate_model(tmp_path, GeneratedModel(), seed=0)
    codec = TextCodec.from_directory(tmp_path)
    tokens = codec.encode(CHARACTERS)
    assert len(tokens) == len(set(tokens)) == len(CHARACTERS)
    assert codec.decode_batch([[*tokens, *codec.stop_tokens], [0, *tokens]]) == [CHARACTERS, CHARACTERS]
    assert codec.stop_tokens == (1,)


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_is_what_transformers_expects(tmp_path, tied):
    from transformers import AutoModelForCausalLM

    generate_model(tmp_path, GeneratedModel(tied_embeddings=tied, initializer_range=0.05), seed=3)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weight = model.model.layers[1].mlp.up_proj.weight.detach().numpy()
    assert weight.std() == pytest.approx(0.05, rel=0.05)


def test_a_seed_gives_the_same_bytes(tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        (tmp_path / name).mkdir()
        generate_model(tmp_path / name, GeneratedModel(), seed)
    files = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert files["a"] == files["b"]
    weights = [load_file(tmp_path / name / "model.safetensors")["model.embed_tokens.weight"] for name in "ac"]
    assert not np.array_equal(*weights)


def test_a_vocabulary_that_is_too_small(tmp_path):
    needed = character_tokenizer().get_vocab_size()
    with pytest.raises(InputError, match=f"smaller than the character tokenizer's {needed}"):
        generate_model(tmp_path, GeneratedModel(vocabulary=needed - 1), seed=0)


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json", "max_position_embeddings"])
def test_an_incomplete_model_directory_is_refused(tmp_path, missing):
    generate_model(tmp_path, GeneratedModel(), seed=0)
    if missing == "max_position_embeddings":
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {missing: None}))
    else:
        (tmp_path / missing).unlink()
    with pytest.raises(InputError, match=missing):
        TextCodec.from_directory(tmp_path)
