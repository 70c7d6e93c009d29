"""Faults in the calling of rewards, in gold answers and in secrets that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_CALLING = ("tests/tasks/rewards/test_calling.py",)
_SECRETS = ("tests/tasks/rewards/test_secrets.py",)
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
        "(max(self._allowance_s, self._needed_s) if cold else 0.0)",
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
        "shortened-before-it-is-cleaned",
        "a scoring process cuts a secret in two that only its owner knows",
        "tasks/rewards/words.py",
        "_ROOM = 8 * LONGEST",
        "_ROOM = LONGEST",
        _SECRETS,
    ),
)
"""Each breaks a promise of docs/rewards.md or docs/operations.md."""
