"""Faults in judges that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_TESTS = ("tests/tasks/rewards/test_judge.py",)
_JUDGE, _ENGINE = "tasks/rewards/judge.py", "tasks/rewards/engine_judge.py"
_ON_ENGINE = ("tests/tasks/rewards/test_engine_judge.py",)

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
        "return Exchange(url=self.respondent.name, request=text,",
        "return Exchange(url=self.respondent.name, request=text + self.judge.api_key,",
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
    Mutant(
        "judge-death-is-a-failure",
        "the death of the engine that judges is a failure of the responses",
        _ENGINE,
        "                question.answer.set_exception(failure)\n",
        "                question.answer.set_exception(Unanswered(failed('exception', 'lost')))\n",
        _ON_ENGINE,
    ),
    Mutant(
        "judge-any-model",
        "another model that judges finds the answers of the one before",
        "tasks/stages/judging.py",
        "return value_digest([{name: part.digest for name, part in parts.items()}, precision])",
        "return value_digest([sorted(parts), precision])",
        _ON_ENGINE,
    ),
    Mutant(
        "judge-one-seed",
        "each further attempt asks for the same answer",
        _ENGINE,
        "value_digest([self.name, body, attempt])",
        "value_digest([self.name, body])",
        _ON_ENGINE,
    ),
    Mutant(
        "judge-seed-by-order",
        "the seed of an answer depends on what was asked before",
        _ENGINE,
        "row = self.questions.ask(self.start, prompt, seed, how)",
        "row = self.questions.ask(self.start, prompt, seed + self.questions._count, how)",
        _ON_ENGINE,
    ),
    Mutant(
        "judge-not-stored",
        "a run does not store the model that judges",
        "tasks/stages/prepare.py",
        "*store_judge(writer, config)",
        "",
        _ON_ENGINE,
    ),
    Mutant(
        "judge-asked-twice-alike",
        "an engine is asked again for the answer that it has just given",
        _JUDGE,
        "final = self.respondent.exact and not self.judge.temperature",
        "final = False",
        _ON_ENGINE,
    ),
)
