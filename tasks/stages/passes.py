"""The figures of an evaluation: how often answers pass, the mean reward by data source, and what has no score."""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_ERRORS = ("exception", "exit", "no_number", "non_finite")


def pass_at_k(answers: int, passing: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of `k` answers passes.

    1 - C(n - c, k) / C(n, k) for c passing ones of n answers, as a product, which does not overflow: Chen et al. 2021,
    "Evaluating Large Language Models Trained on Code", equation 1 and figure 3.

    Raises:
        ValueError: there are fewer than `k` answers, or more pass than there are.
    """
    if not (0 <= passing <= answers and 1 <= k <= answers):
        raise ValueError(f"pass@{k} of {answers} answers, of which {passing} pass, is not defined")
    if answers - passing < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(answers - passing + 1, answers + 1)))


def ladder(samples: int) -> list[int]:
    """The values of k that are reported for so many samples: powers of two, and their number."""
    powers = [1 << power for power in range(samples.bit_length())]
    return sorted({*(k for k in powers if k <= samples), *([samples] if samples else [])})


def figures(table: pa.Table, samples: int, passes: NDArray[np.bool_] | None) -> dict[str, float]:
    """The metrics of an evaluation: mean rewards, and if it is known which answers pass, pass@k.

    An answer without a score counts neither as passing nor as failing: it is counted apart. A prompt with fewer than k
    scored answers is left out of pass@k.

    Args:
        table: EVALUATION_SAMPLES.
        samples: sampled answers that were asked for, to each prompt.
        passes: which of them pass, (rows,).
    """
    kind = table["greedy"].to_numpy(zero_copy_only=False)
    greedy, sampled = table.filter(pa.array(kind)), table.filter(pa.array(~kind))
    first, other = (None, None) if passes is None else (passes[kind], passes[~kind])
    found = {**_of("greedy", greedy, first), "prompts": float(greedy.num_rows)}
    if samples:
        found |= _of("sampled", sampled, other)
        found |= {} if other is None else _passes(sampled, samples, other)
    return found


def _of(kind: str, table: pa.Table, passes: NDArray[np.bool_] | None) -> dict[str, float]:
    """Figures of the greedy or of the sampled answers, all of them and those of each source."""
    rewards = _rewards(table)
    groups = {kind: np.ones(len(rewards), np.bool_), **{f"{kind}/{name}": rows for name, rows in _by_source(table)}}
    found: dict[str, float] = {}
    for name, rows in ((name, rows & np.isfinite(rewards)) for name, rows in groups.items()):
        if rows.any():
            found[f"{name}/reward"] = float(rewards[rows].mean())
        if rows.any() and passes is not None:
            found[f"{name}/pass@1"] = float(passes[rows].mean())
    reasons = table["reason"].to_pylist()
    return {
        **found,
        f"{kind}/timeouts": float(reasons.count("timeout")),
        f"{kind}/errors": float(sum(reasons.count(reason) for reason in _ERRORS)),
        f"{kind}/truncated": float(table["finish_reason"].to_pylist().count("length")),
    }


def _by_source(table: pa.Table) -> Iterable[tuple[str, NDArray[np.bool_]]]:
    sources = np.asarray(table["source"].to_pylist(), dtype=object)
    names = sorted(set(sources))
    return [(name, sources == name) for name in names] if len(names) > 1 else []


def _passes(sampled: pa.Table, samples: int, passes: NDArray[np.bool_]) -> dict[str, float]:
    """pass@k for more than one answer: the mean over prompts."""
    rewards = _rewards(sampled)
    groups: dict[str, list[int]] = {}
    for row, prompt in enumerate(sampled["prompt_id"].to_pylist()):
        groups.setdefault(prompt, []).append(row)
    scored = [passes[rows][np.isfinite(rewards[rows])] for rows in groups.values()]
    found: dict[str, float] = {}
    for k in ladder(samples):
        rates = [pass_at_k(len(one), int(one.sum()), k) for one in scored if len(one) >= k]
        if rates:
            found[f"sampled/pass@{k}"] = float(np.mean(rates))
    return found


def _rewards(table: pa.Table) -> NDArray[np.float64]:
    """(rows,) NaN where there is no score."""
    return table["reward"].to_numpy(zero_copy_only=False).astype(np.float64)
