"""Responses of the small engine that grow, and go on from what is there."""

import pyarrow as pa

from storage.parts import row_views
from tasks.engine.protocol import COMPLETIONS, Begun, Increment


def responses_of(batch):
    """Tokens and log-probabilities of each response."""
    return [Begun(*one) for one in zip(*(row_views(pa.chunked_array([batch[at]])) for at in (0, 1)), strict=True)]


def grown(number, whole, there, tokens, version):
    """Increments of so many tokens, of the responses that have more than that left."""
    increments = []
    for row, response in enumerate(responses_of(whole)):
        first, end = there[row], there[row] + tokens
        if end < len(response.tokens):
            more = Begun(*(one[first:end] for one in response))
            increments.append(Increment(number, row, first, more, version))
            there[row] = end
    return increments


def going_on(whole, begun):
    """Responses that are what was begun, and behind it what is sampled now: at least a last token."""
    if not begun:
        return whole
    pairs = zip(begun, responses_of(whole), strict=True)
    made = [
        one.grown(Begun(*(values[min(len(one.tokens), len(values) - 1) :] for values in response)))
        for one, response in pairs
    ]
    columns = [pa.array([one[at] for one in made], COMPLETIONS.types[at]) for at in (0, 1)]
    return pa.RecordBatch.from_arrays([*columns, whole["finish_reason"]], schema=COMPLETIONS)
