"""Bytes of tokens, by kind of tokenizer."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from storage.errors import InputError
from tasks.data.backends import Plain, token_bytes
from tasks.data.generated import character_tokenizer

TEXT = "a \N{EURO SIGN}\N{GRINNING FACE}\n\x00\N{LATIN SMALL LETTER E WITH ACUTE} z"


def byte_level() -> Tokenizer:
    """A token for each byte, and a few of several."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {sign: number for number, sign in enumerate([*signs, "ab", "\u0120a"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("\u0120", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def pieces() -> Tokenizer:
    """Words with a sign for the space before them, and bytes for the rest."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["\u2581", "a", "\u2581a", "z", "\u2581z", "<unk>"]
    tokenizer = Tokenizer(
        models.BPE(
            {one: number for number, one in enumerate([*bytes_, *words])},
            [("\u2581", "a"), ("\u2581", "z")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.mark.parametrize("tokenizer", [byte_level(), pieces()], ids=["byte-level", "pieces"])
def test_bytes_of_tokens_are_those_of_their_texts_also_where_a_sign_is_split(tokenizer):
    backend = Plain(tokenizer)
    found = token_bytes(backend)
    assert len(found) == backend.size
    text = TEXT if isinstance(tokenizer.decoder, decoders.ByteLevel) else TEXT.replace(" ", "\u2581")
    (tokens,) = backend.encode([text])
    assert b"".join(found[token] for token in tokens) == TEXT.encode()
    assert len(tokens) > len(TEXT)


def test_special_tokens_have_their_texts():
    backend = Plain(byte_level())
    assert token_bytes(backend)[backend.token_id("<|end|>") or 0] == b"<|end|>"
    assert token_bytes(backend)[backend.token_id("\u0120a") or 0] == b" a"


def test_tokens_of_a_generated_model_have_the_bytes_of_their_signs():
    backend = Plain(character_tokenizer())
    found = token_bytes(backend)
    assert [found[token] for token in backend.encode(["1+2="])[0]] == [b"1", b"+", b"2", b"="]


def test_a_tokenizer_whose_tokens_change_the_text_before_them_is_refused():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")])
    with pytest.raises(InputError, match=r"no text can end a response with this tokenizer: its token 1 changes .*'c'"):
        token_bytes(Plain(tokenizer))
