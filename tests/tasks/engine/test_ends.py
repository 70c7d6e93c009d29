"""Stop tokens and stop texts as a table over tokens."""

import random

import numpy as np

from tasks.engine.ends import END, Ends, complete_after

WORDS = ["a", "b", "ab", "\N{EURO SIGN}", "\N{GRINNING FACE}b", "aab", " ", "ba ba"]
SPLIT = [bytes([byte]) for byte in "\N{EURO SIGN}\N{GRINNING FACE}".encode()]
BYTES = [*(word.encode() for word in WORDS), *SPLIT, b""]
"""Of tokens, some of which hold a part of a sign."""


def ended(ends: Ends, line: int, tokens: list[int]) -> int | None:
    """Number of tokens up to the one at which the table ends a response."""
    for count, token in enumerate(tokens, 1):
        line = ends.table[line, token]
        if line == END:
            return count
    return None


def test_a_text_ends_a_response_with_the_token_that_completes_it_however_it_is_cut_into_tokens():
    generator, hits = random.Random(0), 0
    ends = Ends(len(BYTES) + 3, lambda: BYTES)
    for _ in range(300):
        texts = [
            "".join(generator.choices("ab \N{EURO SIGN}\N{GRINNING FACE}", k=generator.randrange(1, 6)))
            for _ in range(2)
        ]
        line = ends.first((), texts)
        tokens = generator.choices(range(len(BYTES) + 3), k=30)  # the last ones are unknown to the tokenizer
        expected = complete_after(tokens, texts, BYTES)
        assert ended(ends, line, tokens) == expected
        assert (ends.after(line, tokens) == END) == (expected is not None)
        hits += expected is not None
        ends.idle()
    assert 50 < hits < 250


def test_a_text_is_found_where_its_beginning_repeats():
    tokens = [0, 0, 0, 1, 0, 1, 1]  # aaabab b
    for text, count in (("aab", 4), ("abab", 6), ("abb", 7), ("aaaa", None)):
        ends = Ends(len(BYTES), lambda: BYTES)
        assert ended(ends, ends.first((), [text]), tokens) == complete_after(tokens, [text], BYTES) == count


def test_sets_of_stop_tokens_and_texts_do_not_meet():
    ends = Ends(len(BYTES), lambda: BYTES)
    plain, first, second, both = ends.first(()), ends.first([1]), ends.first([2], ["aa"]), ends.first([1], ["aa"])
    assert ends.first([1]) == first
    tokens = {"b": [0, 1], "ab": [0, 2], "aa": [0, 0]}
    found = {
        line: [name for name, one in tokens.items() if ended(ends, line, one)] for line in (plain, first, second, both)
    }
    assert found == {plain: [], first: ["b"], second: ["ab", "aa"], both: ["b", "ab", "aa"]}
    np.testing.assert_array_equal(ends.table[plain], plain)


def test_no_bytes_are_asked_for_without_a_stop_text():
    def refuse() -> list[bytes]:
        raise AssertionError

    assert Ends(4, refuse).first([3]) == 0
