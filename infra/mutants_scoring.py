"""Faults in the calling of rewards, in gold answers and in secrets that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_CALLING = ("tests/tasks/rewards/test_calling.py",)
_SECRETS = ("tests/tasks/rewards/test_secrets.py",)
_ANSWERS = ("tests/tasks/rewards/test_answers.py",)
_TRYING = ("tests/tasks/rewards/test_trying.py",)
_CHECK = ("tests/flows/cli/test_check.py",)
_CORRECTED = ("tests/flows/test_corrections.py",)
_REFUSED = (
    "tests/bad_input/test_rewards.py::test_a_bad_reward_is_refused_before_anything_heavy[a field that is not there]"
)
_LAZY = (
    "tests/tasks/rewards/test_isolation.py::test_what_the_first_call_loads_is_charged_to_no_sample_also_after_a_restart"
)

SCORING = (
    Mutant(
        "reward-bound-by-position",
        "a record is given to the first parameter, whatever it is called",
        "tasks/rewards/calling.py",
        "        given = {**dict(zip(names, values, strict=False)), **arguments}\n",
        "        return function(*values[: len(names)], **arguments)\n        given = {}\n",
        _CALLING,
    ),
    Mutant(
        "reward-of-any-signature",
        "a function of another framework's signature is accepted",
        "tasks/rewards/calling.py",
        "    if flaws:\n",
        "    if False:\n",
        _CALLING,
    ),
    Mutant(
        "first-call-is-charged",
        "the first sample of a process is charged with what the function loads",
        "tasks/rewards/worker.py",
        "(beyond_s if cold else 0.0)",
        "0.0",
        (_LAZY,),
    ),
    Mutant(
        "only-the-first-process-is-cold",
        "after a restart a sample is charged with what the function loads",
        "tasks/rewards/worker.py",
        "            fresh, cold, begun = current.fresh, current.cold, time.monotonic()\n",
        "            fresh, cold, begun = current.fresh, current.cold and not self._needed_s, time.monotonic()\n",
        (_LAZY,),
    ),
    Mutant(
        "an-error-is-a-first-result",
        "a first call that raises before it loads anything ends the time for loading",
        "tasks/rewards/worker.py",
        "self.cold and _SCORE.search(answer) is None",
        "False",
        (_LAZY,),
    ),
    Mutant(
        "what-a-later-call-loads-is-charged",
        "a sample is charged with what is loaded after a call that needed nothing",
        "tasks/rewards/worker.py",
        "                if not cold and beyond_s > deadline_s:\n",
        "                if False:\n",
        (_LAZY,),
    ),
    Mutant(
        "hanging-holds-up-the-run",
        "a function that always hangs has the time for loading again for each sample",
        "tasks/rewards/worker.py",
        "                self._allowance_s /= 2 if cold else 1\n",
        "",
        (
            "tests/tasks/rewards/test_isolation.py::test_a_function_that_always_hangs_has_less_and_less_time_beyond_its_deadline",
        ),
    ),
    Mutant(
        "scoring-inherits-everything",
        "a scoring process is given every secret of the environment",
        "tasks/config/environment.py",
        "for name, value in child_python_path().items() if _for_scoring(name, value)}",
        "for name, value in child_python_path().items()}",
        _SECRETS,
    ),
    Mutant(
        "only-references-are-hidden",
        "a secret of the environment that no argument refers to is shown and stored",
        "tasks/config/environment.py",
        "for name, value in others for form in secret_texts(name, value)}",
        "for name, value in others[:0] for form in secret_texts(name, value)}",
        _SECRETS,
    ),
    Mutant(
        "names-of-components-are-not-cleaned",
        "a secret is stored as the name of a component",
        "tasks/rewards/pool.py",
        "{_clean(name): one for name, one in score.components.items()}",
        "{name: one for name, one in score.components.items()}",
        _SECRETS,
    ),
    Mutant(
        "lost-keeper-costs-a-sample",
        "a sample loses its score when the process that keeps its deadline is killed",
        "tasks/rewards/pool.py",
        "        if self._lost:  # by a signal",
        "        if False:  # by a signal",
        ("tests/tasks/rewards/test_isolation.py",),
    ),
    Mutant(
        "stopped-function-costs-a-sample",
        "a sample loses its score when a signal stops the process of its function",
        "tasks/rewards/worker.py",
        "if stopped and not before:",
        "if stopped and before:",
        ("tests/tasks/rewards/test_isolation.py",),
    ),
    Mutant(
        "shortened-before-it-is-cleaned",
        "a scoring process cuts a secret in two that only its owner knows",
        "tasks/rewards/words.py",
        "_ROOM = 8 * LONGEST",
        "_ROOM = LONGEST",
        _SECRETS,
    ),
    Mutant(
        "gold-read-as-prose",
        "a gold answer in bare LaTeX is what its first number is",
        "tasks/rewards/answers.py",
        'found = parse(f"${text}$", [config], fallback_mode="no_fallback", parsing_timeout=None)',
        "found = parse(text, parsing_timeout=None)",
        _ANSWERS,
    ),
    Mutant(
        "words-are-products",
        "a word is the product of its letters, in any order",
        "tasks/rewards/answers.py",
        "    if _is_text(bare, plain):\n",
        "    if False:\n",
        _ANSWERS,
    ),
    Mutant(
        "unreadable-gold-is-wrong",
        "a gold answer that cannot be read scores 0",
        "tasks/rewards/math.py",
        "    gold = gold_answer(record, field)\n",
        "    try:\n        gold = gold_answer(record, field)\n    except ValueError:\n        return 0.0\n",
        _ANSWERS,
    ),
    Mutant(
        "units-are-no-matter",
        "12 m is 12 cm",
        "tasks/rewards/answers.py",
        "    if name in _KNOWN and other in _KNOWN and (name, power) != (other, its):\n",
        "    if False:\n",
        _ANSWERS,
    ),
    Mutant(
        "golds-are-not-read",
        "a gold answer that cannot be read is found when it is sampled for",
        "tasks/checks.py",
        "    check_golds(config.reward,",
        "    check_golds(RewardSection(),",
        _CHECK,
    ),
    Mutant(
        "reward-is-not-called",
        "a reward that scores nothing is found after minutes",
        "tasks/checks.py",
        "check_components([call.score for call in reward_calls(config)], config",
        "check_components([], config",
        (_REFUSED,),
    ),
    Mutant(
        "stored-records-are-not-tried",
        "a run is continued with a reward that scores nothing",
        "tasks/checks.py",
        "        called = config.scores and config.retrain is None and",
        "        called = False and",
        ("tests/tasks/test_preflight.py",),
    ),
    Mutant(
        "no-wrong-answer-is-tried",
        "a reward is called with right answers alone",
        "tasks/rewards/trying.py",
        "[*texts, (False, WRONG)]",
        "texts",
        _TRYING,
    ),
    Mutant(
        "what-was-read-is-corrected",
        "a run takes other settings after stages have read them",
        "tasks/config/stored.py",
        "trained or prepared or read else",
        "trained or prepared else",
        _CORRECTED,
    ),
    Mutant(
        "nothing-is-corrected",
        "a run that failed for a misspelt weight can never go on",
        "tasks/config/stored.py",
        "trained or prepared or read else lines\n",
        "trained or prepared or read else []\n",
        _CORRECTED,
    ),
    Mutant(
        "former-configuration-is-forgotten",
        "what was made before a correction is of another configuration",
        "tasks/config/stored.py",
        '        kept = record.model_copy(update={"former": former, ',
        '        kept = record.model_copy(update={"former": former[:0], ',
        _CORRECTED,
    ),
    Mutant(
        "former-configuration-returns",
        "a configuration from before a correction takes the place of the one that stages were made under since",
        "tasks/config/stored.py",
        "record.digest not in (stored.first, *stored.former)",
        "record.digest != stored.first",
        _CORRECTED,
    ),
    Mutant(
        "try-is-not-obeyed",
        "a reward that costs or acts is called before the run in spite of reward.try = false",
        "tasks/rewards/trying.py",
        "    if not section.tried or own_judges(section):\n",
        "    if own_judges(section):\n",
        _TRYING,
    ),
)
"""Faults, each of which breaks a promise of docs/rewards.md or docs/operations.md."""
