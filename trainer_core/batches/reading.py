"""The stored tables of an iteration, joined into what the trainer learns from."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.backends.root import Root
from storage.errors import StageFailed
from storage.manifest import Manifest
from storage.parts import read_table
from storage.schema import REWARD, ROLLOUT
from trainer_core.batches.sequences import Samples


def read_samples(root: Root, rollouts: Manifest, rewards: Manifest) -> Samples:
    """Join the stored rollout and reward tables of an iteration, in the rollout's order.

    Raises:
        StageFailed: if a rollout row has no reward row.
        StorageError: if stored bytes are not what the manifests say.
    """
    columns = ["prompt_id", "sample_id", "prompt_tokens", "response_tokens", "logprobs"]
    table = read_table(root, rollouts, ROLLOUT, columns)
    scores = _scores(read_table(root, rewards, REWARD, ["prompt_id", "sample_id", "reward"]))
    keys = list(zip(table["prompt_id"].to_pylist(), table["sample_id"].to_pylist(), strict=True))
    missing = [key for key in keys if key not in scores]
    if missing:
        raise StageFailed(f"{len(missing)} samples have no reward row, first {missing[0]}; run the reward stage again")
    prompt_lengths, response_lengths = _lengths(table, "prompt_tokens"), _lengths(table, "response_tokens")
    rewarded = [scores[key] for key in keys]
    return Samples(
        tokens=_interleave(table, prompt_lengths, response_lengths),
        prompt_lengths=prompt_lengths,
        response_lengths=response_lengths,
        engine_logprobs=_flat(table, "logprobs").astype(np.float32),
        rewards=np.array([reward or 0.0 for reward in rewarded], dtype=np.float32),
        groups=np.unique([prompt for prompt, _ in keys], return_inverse=True)[1].astype(np.int32),
        usable=np.array([reward is not None for reward in rewarded]) & (response_lengths > 0),
    )


def _scores(table: pa.Table) -> dict[tuple[str, int], float | None]:
    keys = zip(table["prompt_id"].to_pylist(), table["sample_id"].to_pylist(), strict=True)
    return dict(zip(keys, table["reward"].to_pylist(), strict=True))


def _flat(table: pa.Table, column: str) -> NDArray[np.generic]:
    return table[column].combine_chunks().flatten().to_numpy(zero_copy_only=False)


def _lengths(table: pa.Table, column: str) -> NDArray[np.int64]:
    return table[column].combine_chunks().value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)


def _interleave(
    table: pa.Table, prompt_lengths: NDArray[np.int64], response_lengths: NDArray[np.int64]
) -> NDArray[np.int32]:
    lengths = np.stack((prompt_lengths, response_lengths), axis=1).reshape(-1)  # (2 N,) prompt, response, ...
    is_response = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
    tokens = np.empty(len(is_response), dtype=np.int32)
    tokens[~is_response] = _flat(table, "prompt_tokens")
    tokens[is_response] = _flat(table, "response_tokens")
    return tokens
