"""Samples and examples read from the stored tables of an iteration."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from storage.backends.root import Root
from storage.errors import StageFailed
from storage.manifest import Manifest, Part
from storage.parts import read_parts, read_table
from storage.schema import BRANCHES, REWARD, ROLLOUT, SELECTION
from trainer_core.batches.sequences import Samples, SupervisedExamples

_SAMPLE_BITS = 32  # of a key; a sample's number is int32


_COLUMNS = ["prompt_id", "sample_id", "prompt_tokens", "response_tokens", "sampled", "logprobs"]


def read_samples(root: Root, rollouts: Manifest, rewards: Manifest | None, routes: bool = False) -> Samples:
    """Join the stored rollout and reward tables of an iteration, in the rollout's order, each row after the other
    branches of its sample; without rewards all are 0. With `routes` the samples have those of the engine. Raises
    StageFailed: a rollout row has no reward row, a branch no row, or a usable sample no routes. Raises StorageError:
    stored bytes do not match the manifests."""
    columns = [*_COLUMNS, *(["routes"] * routes)]
    table, branches = _with_branches(root, rollouts, read_table(root, rollouts, ROLLOUT, columns), columns)
    if rewards is None:
        groups = table["prompt_id"].combine_chunks().dictionary_encode().indices.to_numpy()
        return _samples(table, np.zeros(table.num_rows, dtype=np.float32), groups, branches)
    scores = read_table(root, rewards, REWARD, ["prompt_id", "sample_id", "reward"])
    keys, offered = _keys(table, scores)
    places = _places(table, keys, offered, "reward row, first {}; run the reward stage again")
    rewarded = scores["reward"].to_numpy()[places]  # (N,), NaN without a score
    return _samples(table, rewarded, keys >> _SAMPLE_BITS, branches)


def read_selected(root: Root, share: Part, scores: Part | None, rewarded: bool = True, routes: bool = False) -> Samples:
    """Samples of one share of a selection, and with the `scores` of a table with the same rows, if they were scored
    again; where samples are not to be `rewarded`, all have 0. With `routes` the samples have those of the engine.
    Raises StageFailed: the scores are not those of the share, or a usable sample has no routes. Raises StorageError:
    stored bytes do not match the manifests."""
    table = read_parts(root, [share], SELECTION, [*_COLUMNS, "group", "reward", *(["routes"] * routes)])
    scored = table if scores is None else read_parts(root, [scores], REWARD, ["prompt_id", "sample_id", "reward"])
    names = ["prompt_id", "sample_id"]
    if not scored.select(names).combine_chunks().equals(table.select(names).combine_chunks()):
        raise StageFailed(f"the scores {scores} are not those of the samples {share.name}: do the stage again")
    without = np.zeros(table.num_rows, dtype=np.float32)
    given = scored["reward"].to_numpy() if rewarded else without  # (N,), NaN without a score
    return _samples(table, given, table["group"].to_numpy())


def solved_examples(prompts: pa.Table) -> SupervisedExamples:
    """Rows of a prompt table that have an answer, in order."""
    solved = prompts.filter(prompts["answer_tokens"].is_valid())
    prompt_lengths, answer_lengths = _lengths(solved, "prompt_tokens"), _lengths(solved, "answer_tokens")
    prompts, answers = _flat(solved, "prompt_tokens"), _flat(solved, "answer_tokens")
    tokens = _interleave(prompts, answers, prompt_lengths, answer_lengths)
    return SupervisedExamples(tokens, prompt_lengths, answer_lengths)


def _with_branches(
    root: Root, rollouts: Manifest, table: pa.Table, columns: list[str]
) -> tuple[pa.Table, NDArray[np.int64] | None]:
    """The table with the other branches of each sample before its row, and `Samples.branches`."""
    if BRANCHES not in rollouts.part_names:
        return table, None
    others = read_parts(root, [rollouts.part(BRANCHES)], ROLLOUT, columns)
    keys, theirs = _keys(table, others)
    owners = _places(others, theirs, keys, "row, but a branch, first {}: `ratchet verify` shows more")
    order = np.argsort(np.concatenate([owners, np.arange(len(keys))]), kind="stable")
    counts = np.bincount(owners, minlength=len(keys)) + 1
    return pa.concat_tables([others, table]).take(order), counts


def _samples(
    table: pa.Table, rewarded: NDArray[np.float32], groups: NDArray[np.int64], branches: NDArray[np.int64] | None = None
) -> Samples:
    prompt_lengths, lengths = _lengths(table, "prompt_tokens"), _lengths(table, "response_tokens")
    tokens, sampled = _flat(table, "response_tokens"), _flat(table, "sampled").astype(np.bool_)
    logprobs = _flat(table, "logprobs").astype(np.float32)
    response_lengths, gaps = lengths, None
    if not sampled.all():
        response_lengths, gaps, kept = _counted(sampled, lengths)
        lengths, tokens, logprobs = kept, tokens[_leading(lengths, kept)], logprobs[sampled]
    usable = np.isfinite(rewarded) & (response_lengths > 0)
    return Samples(
        tokens=_interleave(_flat(table, "prompt_tokens"), tokens, prompt_lengths, lengths),
        prompt_lengths=prompt_lengths,
        response_lengths=response_lengths,
        gaps=gaps,
        engine_logprobs=logprobs,
        rewards=np.where(np.isfinite(rewarded), rewarded, np.float32(0)) + np.float32(0),  # without a negative zero
        groups=np.unique(groups, return_inverse=True)[1].astype(np.int32),
        branches=branches,
        usable=usable,
        routes=_routes(table, prompt_lengths + lengths - 1, usable) if "routes" in table.column_names else None,
    )


def _routes(table: pa.Table, positions: NDArray[np.int64], usable: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """(sum of positions, bytes) routes of usable samples, 0 of others. Raises StageFailed: one has none, or too few."""
    column = table["routes"].combine_chunks()
    sizes = pc.fill_null(pc.binary_length(column), 0).to_numpy()  # pyright: ignore[reportAttributeAccessIssue]
    width = int((sizes[usable] // positions[usable]).max(initial=1))
    odd = usable & (sizes != positions * width)
    if odd.any() or not width:
        row = int(np.argmax(odd))
        sample = table["prompt_id"][row].as_py(), table["sample_id"][row].as_py()
        raise StageFailed(
            f"train.experts.replay = true, but sample {sample} has {sizes[row]} bytes of routes for {positions[row]} "
            "tokens: sample with train.experts.replay = true, or set it to false"
        )
    found = np.zeros((positions.sum(), width), dtype=np.uint8)
    held = np.frombuffer(b"".join(one.as_py() for one in column.filter(pa.array(usable))), np.uint8)
    found[np.repeat(usable, positions)] = held.reshape(-1, width)
    return found


def _counted(
    sampled: NDArray[np.bool_], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The sampled tokens of responses with these lengths: their number, (N,); the tokens right before each that were
    not sampled; and the length of each response up to its last sampled token, (N,)."""
    starts = np.cumsum(lengths) - lengths
    places = np.flatnonzero(sampled)
    rows = np.repeat(np.arange(len(lengths)), lengths)[places]
    counts = np.bincount(rows, minlength=len(lengths))
    before = np.append(0, places[:-1] + 1)[: len(places)]  # place after the sampled token before
    ends = starts.copy()
    ends[rows] = places + 1  # the last one stays
    return counts, places - np.maximum(before, starts[rows]), ends - starts


def _leading(lengths: NDArray[np.int64], kept: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mask of the first `kept` tokens of responses with these lengths, (sum of lengths,)."""
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return within < np.repeat(kept, lengths)


def _keys(*tables: pa.Table) -> list[NDArray[np.int64]]:
    """One number per row of each table, equal for the same sample and ordered by prompt id, then sample id."""
    names = pa.chunked_array([chunk for table in tables for chunk in table["prompt_id"].chunks], pa.string())
    encoded = names.combine_chunks().dictionary_encode()
    ranks = np.empty(len(encoded.dictionary), dtype=np.int64)
    order = pc.sort_indices(encoded.dictionary)  # pyright: ignore[reportAttributeAccessIssue] - made at import
    ranks[order.to_numpy()] = np.arange(len(ranks))
    samples = np.concatenate([table["sample_id"].to_numpy() for table in tables])
    keys = (ranks[encoded.indices.to_numpy()] << _SAMPLE_BITS) + samples
    return np.split(keys, np.cumsum([table.num_rows for table in tables])[:-1])


def _places(table: pa.Table, keys: NDArray[np.int64], offered: NDArray[np.int64], lacking: str) -> NDArray[np.int64]:
    """Position of each key in `offered`, the last if it occurs twice. Raises StageFailed with what is `lacking` if it
    is missing."""
    order = np.argsort(offered, kind="stable")
    last = np.searchsorted(offered, keys, side="right", sorter=order) - 1
    found = np.isin(keys, offered)
    if not found.all():
        first = table.slice(int(np.argmin(found)), 1)
        sample = first["prompt_id"][0].as_py(), first["sample_id"][0].as_py()
        missing = np.count_nonzero(~found)
        raise StageFailed(f"{missing} samples have no {lacking.format(sample)}")
    return order[last]


def _flat(table: pa.Table, column: str) -> NDArray[np.generic]:
    return table[column].combine_chunks().flatten().to_numpy(zero_copy_only=False)


def _lengths(table: pa.Table, column: str) -> NDArray[np.int64]:
    return table[column].combine_chunks().value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)


def _interleave(
    prompts: NDArray, responses: NDArray, prompt_lengths: NDArray[np.int64], response_lengths: NDArray[np.int64]
) -> NDArray[np.int32]:
    lengths = np.stack((prompt_lengths, response_lengths), axis=1).reshape(-1)  # (2 N,) prompt, response, ...
    is_response = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
    tokens = np.empty(len(is_response), dtype=np.int32)
    tokens[~is_response] = prompts
    tokens[is_response] = responses
    return tokens
