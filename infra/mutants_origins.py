"""Faults in what stages are made from, and in how runs are begun and continued, that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_SOURCES = ("tests/flows/test_retraining_sources.py",)
_SELECTING = ("tests/tasks/stages/test_selecting.py",)
_EVALUATION = ("tests/tasks/stages/test_evaluation.py",)
_START = ("tests/tasks/config/test_failed_start.py",)

ORIGINS = (
    Mutant(
        "import-becomes-a-run",
        "the record of imported samples looks unused and is replaced",
        "tasks/config/stored.py",
        "    _document(root, run)\n    made = {",
        "    made = {",
        _START,
    ),
    Mutant(
        "lost-first-iteration-unbinds",
        "a run whose iteration 0 is lost takes another configuration",
        "tasks/config/stored.py",
        "        return not names(root, run).manifests\n",
        "        return True\n",
        _START,
    ),
    Mutant(
        "select-prompts-by-name",
        "a rollout counts as answering whatever prompts its run's name has now",
        "tasks/stages/selecting.py",
        "        if self.prepared is None or self.prepared.digest != made_from:\n",
        "        if self.prepared is None:\n",
        _SOURCES,
    ),
    Mutant(
        "select-mixes-revisions",
        "each rollout of a selection is of the head that there is when it is read",
        "tasks/stages/selecting.py",
        "        elif (head := find(self.root, self.run, iteration, Stage.ROLLOUT, seen)) is not None:\n",
        "        elif (head := find(self.root, self.run, iteration, Stage.ROLLOUT)) is not None:\n",
        _SELECTING,
    ),
    Mutant(
        "select-looks-twice",
        "a run that is named twice is seen from two heads",
        "tasks/stages/selecting.py",
        "        if (root.url, place.run) not in known:\n",
        "        if True:\n",
        _SELECTING,
    ),
    Mutant(
        "select-copies-all-prompts",
        "a selection holds every prompt of its sources",
        "tasks/stages/selecting.py",
        '        return table.filter(pc.is_in(table["prompt_id"], ',
        '        return table or table.filter(pc.is_in(table["prompt_id"], ',
        _SOURCES,
    ),
    Mutant(
        "deduplicate-without-lengths",
        "tokens that are divided otherwise between prompt and response are equal",
        "tasks/stages/selecting.py",
        "len(prompt).to_bytes(8) + prompt.tobytes()",
        "prompt.tobytes()",
        _SELECTING,
    ),
    Mutant(
        "retrain-relative-root",
        "a relative root in a selection follows the working directory",
        "tasks/config/retrain.py",
        "        return absolute(text)\n",
        "        return text\n",
        _SOURCES,
    ),
    Mutant(
        "rescore-mixes-versions",
        "scores of another version of a function are kept",
        "tasks/stages/rescore.py",
        "value_digest([self.selected.digest, settings, dict(self.made_of)])",
        "value_digest([self.selected.digest, settings])",
        _SOURCES,
    ),
    Mutant(
        "rescore-unwatched",
        "a function that changes between two shares is not noticed",
        "tasks/stages/rescore.py",
        "unchanged(score_responses(section, responses), self.made_of, what)",
        "score_responses(section, responses)",
        _SOURCES,
    ),
    Mutant(
        "evaluation-mixes-versions",
        "answers that another version of a function scored are kept",
        "tasks/stages/evaluation.py",
        "        dict(made_of),\n    ]\n",
        "    ]\n",
        _EVALUATION,
    ),
    Mutant(
        "evaluation-unwatched",
        "a function that changes between two parts of an evaluation is not noticed",
        "tasks/stages/evaluation.py",
        "unchanged(score_responses(self.context.config.reward, responses, patient=True), self.made_of, what)",
        "score_responses(self.context.config.reward, responses, patient=True)",
        _EVALUATION,
    ),
    Mutant(
        "evaluation-of-a-name",
        "an evaluation is stored in the run that has the name of the one it is of",
        "tasks/stages/evaluation.py",
        "        if there is None or there.digest != inputs[role]:\n",
        "        if there is None:\n",
        _EVALUATION,
    ),
    Mutant(
        "evaluation-in-a-removed-run",
        "an evaluation that is committed while its run is removed stays",
        "tasks/stages/evaluation.py",
        "        context.root.remove(published.key)\n",
        "        pass\n",
        _EVALUATION,
    ),
    Mutant(
        "functions-of-one-name",
        "of two files of one name only one counts as what scores are made of",
        "tasks/rewards/scoring.py",
        '            found[f"{part}: {name}"] = sources[part]\n',
        "            pass\n",
        ("tests/tasks/rewards/test_rewards.py",),
    ),
    Mutant(
        "retrain-begins-on-nothing",
        "a run is made before it is known that its selection can be trained on",
        "tasks/retraining.py",
        "    examine(config, root, Prepared(prepared), source, lambda _share: None)  # before anything is stored\n",
        "",
        _SOURCES,
    ),
)
