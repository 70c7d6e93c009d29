"""Faults in judges that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_TESTS = ("tests/tasks/rewards/test_judge.py",)
_JUDGE = "tasks/rewards/judge.py"

JUDGE = (
    Mutant(
        "judge-failure-is-a-number",
        "an answer without a score counts as 0",
        _JUDGE,
        '            raise ValueError(f"the answer has no score: {shown(said)}")\n',
        "            return 0.0\n",
        _TESTS,
    ),
    Mutant(
        "judge-asked-again",
        "a judge is asked again what it has answered",
        _JUDGE,
        "if (kept := self.exchanges.find(digest)) is None:",
        "if (kept := self.exchanges.find(digest)) is None or True:",
        _TESTS,
    ),
    Mutant(
        "judge-key-kept",
        "the key of a judge is stored with what it was asked",
        _JUDGE,
        "return Exchange(url=self.judge.url, request=text,",
        "return Exchange(url=self.judge.url, request=text + self.judge.api_key,",
        _TESTS,
    ),
    Mutant(
        "judge-exchange-unchecked",
        "a damaged exchange with a judge is not found by verify",
        "storage/upkeep/verify.py",
        "*flaws, *asked, *attempts,",
        "*flaws, *attempts,",
        _TESTS,
    ),
)
