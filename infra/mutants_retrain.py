"""Faults in training on stored samples that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_FILTERS = ("tests/storage/test_filters.py",)
_SELECTING = ("tests/tasks/stages/test_selecting.py",)
_LOOP = ("tests/flows/test_retraining.py",)
_IMPORT = ("tests/tasks/importing",)

RETRAIN = (
    Mutant(
        "filter-null-is-false",
        "not of an unknown comparison is true",
        "storage/filters.py",
        '            return _Value(~self._truth(self._expression(_NOT)), "truth", place)\n',
        '            return _Value(pc.coalesce(~self._truth(self._expression(_NOT)), True), "truth", place)\n',
        _FILTERS,
    ),
    Mutant(
        "filter-float64",
        "a number is compared with a float32 column as it is written, not as it was stored",
        "storage/filters.py",
        "        if column.type == pa.float32() and isinstance(other.literal, int | float):\n",
        "        if False:\n",
        _FILTERS,
    ),
    Mutant(
        "select-joins-by-place",
        "scores are joined with samples by their place in the tables",
        "storage/selection.py",
        "        rows = pc.index_in(sample_keys(samples), value_set=keys)",
        "        rows = pa.array(range(samples.num_rows))",
        _SELECTING,
    ),
    Mutant(
        "select-scores-of-another-revision",
        "a rollout that was done again is selected with the newest scores, of whichever rollout",
        "storage/selection.py",
        "for one in every if rollout.digest in one.inputs.values()",
        "for one in every",
        _SELECTING,
    ),
    Mutant(
        "select-groups-by-prompt",
        "samples of one prompt are one group, whatever iteration sampled them",
        "tasks/stages/selecting.py",
        "        groups = codes[order].astype(np.int64) + self.groups\n",
        "        groups = codes[order].astype(np.int64)\n",
        _SELECTING,
    ),
    Mutant(
        "select-doubles-forks",
        "what a fork shares with its parent is selected twice",
        "tasks/stages/selecting.py",
        "            origin = manifest.digest if manifest.origin is None else manifest.origin.digest\n",
        "            origin = manifest.digest\n",
        _SELECTING,
    ),
    Mutant(
        "select-keeps-everything",
        "all selected samples are in memory until the last is read",
        "tasks/stages/selecting.py",
        "        yield from self._shares(self.section.samples + self.section.samples // 2)\n\n    def rest",
        "        yield from ()\n\n    def rest",
        _SELECTING,
    ),
    Mutant(
        "select-any-tokenizer",
        "token ids beyond the model's vocabulary are trained on, and responses that are too long",
        "tasks/stages/select.py",
        "    _check_fit(config, json.loads(",
        "    _ignored = (config, json.loads(",
        _LOOP,
    ),
    Mutant(
        "retrain-same-share",
        "every iteration of an epoch trains on the first share",
        "tasks/config/retrain.py",
        "        epoch, place = divmod(iteration - 1, shares)\n",
        "        epoch, place = (iteration - 1) // shares, 0\n",
        ("tests/tasks/config/test_retrain.py",),
    ),
    Mutant(
        "retrain-uncorrected",
        "stored samples count as drawn from the trainer's own policy",
        "tasks/forking.py",
        '    return merged(document, {"train": {"policy": {"correction": {"type": "truncate"}}}})\n',
        "    return document\n",
        _LOOP,
    ),
    Mutant(
        "retrain-moving-window",
        "--newer-than counts from each start, not from the first",
        "tasks/forking.py",
        "(recorded or since).isoformat()",
        "since.isoformat()",
        _LOOP,
    ),
    Mutant(
        "retrain-starts-engines",
        "engines are started for a run that samples nothing",
        "tasks/stages/held_state.py",
        "    if context.config.retrain is None and not config.memory.in_use:\n",
        "    if not config.memory.in_use:\n",
        _LOOP,
    ),
    Mutant(
        "import-other-lengths",
        "log-probabilities of other tokens than the response's are imported",
        "tasks/importing/rows.py",
        "column.refuse(given != lengths_of(responses), ",
        "column.refuse(given == -1, ",
        _IMPORT,
    ),
    Mutant(
        "import-without-logprobs",
        "samples without log-probabilities are imported without being asked for",
        "tasks/importing/rows.py",
        "is None and self.order.logprobs:\n",
        "is False:\n",
        _IMPORT,
    ),
    Mutant(
        "retrain-without-logprobs",
        "importance is corrected with log-probabilities that are not numbers",
        "tasks/stages/select.py",
        "    if ranges.without_logprobs and policy.needs_advantages:\n",
        "    if False:\n",
        _LOOP,
    ),
    Mutant(
        "lineage-of-any-share",
        "every step of a retraining has used every selected sample",
        "storage/upkeep/lineage.py",
        "            held = any(one.facts.get(SHARE) in shares.get(digest, ()) for digest in made_of)\n",
        "            held = any(digest in shares for digest in made_of)\n",
        _LOOP,
    ),
)
