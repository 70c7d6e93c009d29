"""Ends of responses: stop tokens, and stop texts wherever they lie in the tokens. Imports numpy only.

A stop text is looked for in the bytes of a response's tokens, by the automaton of Aho and Corasick (1975). As every
token's bytes are known, so is the state to which it leads from each state: a step of any number of responses is one
look into a table."""

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

END = -1  # entry of the table for a token that ends the response
_KEPT = 8  # sets of stop tokens and texts that an idle engine remembers


class Ends:
    """Tables for sets of stop tokens and texts, one below the other."""

    def __init__(self, vocabulary: int, token_bytes: Callable[[], Sequence[bytes]]) -> None:
        """`token_bytes`, by id, are asked for when there is a stop text. Tokens beyond them add nothing to a text."""
        self._vocabulary, self._token_bytes = vocabulary, token_bytes
        self._first: dict[tuple[frozenset[int], frozenset[str]], int] = {}
        self.table = np.zeros((0, vocabulary), dtype=np.int32)
        """The line that holds after a token, (lines, V), or `END`."""

    def first(self, tokens: Iterable[int], texts: Sequence[str] = ()) -> int:
        """The line of a response without tokens, which these stop tokens and texts end."""
        key = frozenset(tokens), frozenset(texts)
        if key not in self._first:
            self._first[key] = len(self.table)
            empty = np.zeros((1, self._vocabulary), dtype=np.int32)
            lines = text_table(texts, self._token_bytes(), self._vocabulary) if texts else empty
            lines[lines != END] += len(self.table)
            lines[:, [token for token in key[0] if token < self._vocabulary]] = END
            self.table = np.concatenate([self.table, lines])
        return self._first[key]

    def after(self, line: int, tokens: Iterable[int]) -> int:
        """The line after tokens; `END` if one of them ends the response."""
        for token in tokens:
            line = int(self.table[line, token]) if line != END else END
        return line

    def idle(self) -> None:
        """No response is under way: forget sets if there are many."""
        if len(self._first) > _KEPT:
            self._first, self.table = {}, self.table[:0]


def text_table(texts: Sequence[str], tokens: Sequence[bytes], vocabulary: int) -> NDArray[np.int32]:
    """The state after each token for each state but the last, (states, V); `END` where a text is complete. In the first
    state nothing of a text was seen."""
    states = _states([text.encode() for text in texts])
    sizes = np.zeros(vocabulary, dtype=np.int64)
    sizes[: len(tokens)] = [len(token) for token in tokens[:vocabulary]]
    content = np.frombuffer(b"".join(tokens[:vocabulary]), dtype=np.uint8)
    starts, longest_first = np.cumsum(sizes) - sizes, np.argsort(-sizes, kind="stable")
    found = np.repeat(np.arange(len(states), dtype=np.int32)[:, None], vocabulary, axis=1)
    for place in range(int(sizes.max(initial=0))):
        some = longest_first[: np.count_nonzero(sizes > place)]
        found[:, some] = states[found[:, some], content[starts[some] + place]]
    return np.where(found == len(states) - 1, END, found)[:-1].astype(np.int32)


def _states(texts: Collection[bytes]) -> NDArray[np.int32]:
    """The state after each byte for each state, (states, 256): states are the beginnings of texts, the last one is that
    a text is complete, which it remains."""
    begun = sorted({text[:size] for text in texts for size in range(len(text))}, key=len)
    number = {beginning: state for state, beginning in enumerate(begun)}
    found = np.zeros((len(begun) + 1, 256), dtype=np.int32)
    found[-1] = len(begun)
    for beginning, state in number.items():
        for byte in set(b"".join(texts)):
            seen = beginning + bytes([byte])
            complete = any(seen.endswith(text) for text in texts)
            rests = (seen[size:] for size in range(len(seen) + 1))
            found[state, byte] = len(begun) if complete else next(number[rest] for rest in rests if rest in number)
    return found


def complete_after(tokens: Sequence[int], texts: Sequence[str], token_bytes: Sequence[bytes]) -> int | None:
    """Number of a response's tokens up to the one that completes a stop text; None if none is complete."""
    parts = [token_bytes[token] if token < len(token_bytes) else b"" for token in tokens]
    whole, looked_for = b"".join(parts), [text.encode() for text in texts]
    ends = [place + len(text) for text in looked_for if (place := whole.find(text)) >= 0]
    return int(np.searchsorted(np.cumsum([len(part) for part in parts]), min(ends))) + 1 if ends else None
