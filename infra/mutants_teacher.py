"""Faults in distillation that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_CORE = ("tests/trainer_core/phases/test_distillation.py",)
_TOP = ("tests/trainer_core/phases/test_distilling_top.py",)
_LOOP = ("tests/flows/test_distilling.py",)
_KILLED = ("tests/faults/test_beside_the_policy.py",)

TEACHER = (
    Mutant(
        "policy-as-its-own-teacher",
        "the teacher's scores are those of the policy",
        "trainer_core/trainer.py",
        "return self._teacher[1].scores(samples, temperature)",
        "return TeacherScores(self._passes.score(samples, np.flatnonzero(samples.usable), temperature).logprobs)",
        _CORE,
    ),
    Mutant(
        "away-from-the-teacher",
        "the reverse KL has the other sign",
        "trainer_core/objectives/losses.py",
        "config.coefficient * bounded_log_ratio(upper, lower)",
        "config.coefficient * bounded_log_ratio(lower, upper)",
        _CORE,
    ),
    Mutant(
        "distillation-without-its-coefficient",
        "the coefficient of distillation is ignored",
        "trainer_core/objectives/losses.py",
        "config.coefficient * bounded_log_ratio(upper, lower)",
        "bounded_log_ratio(upper, lower)",
        _CORE,
    ),
    Mutant(
        "unusable-samples-are-taught",
        "the teacher scores samples that are not trained on",
        "trainer_core/phases/teacher.py",
        "np.flatnonzero(samples.usable)",
        "np.arange(len(samples))",
        _CORE,
    ),
    Mutant(
        "likeliest-tokens-of-one-rank",
        "the likeliest tokens are those of a tensor-parallel rank's own columns",
        "trainer_core/model/vocab_parallel.py",
        "        keys = _gathered(keys, group)  # (R, count * tp)\n",
        "        pass\n",
        _TOP,
    ),
    Mutant(
        "other-tokens-do-not-count",
        "the tokens that a teacher finds less likely are left out of the KL",
        "trainer_core/objectives/losses.py",
        "return known + rest * bounded_log_ratio(rest.log(), theirs.log())",
        "return known",
        _TOP,
    ),
    Mutant(
        "tokens-of-other-ranks",
        "a tensor-parallel rank leaves out the log-probabilities of tokens that others hold",
        "trainer_core/model/vocab_parallel.py",
        "            dist.all_reduce(chosen, group=group)\n        normalizer",
        "            pass\n        normalizer",
        _TOP,
    ),
    Mutant(
        "likeliest-tokens-of-other-samples",
        "the stored tokens of a sample are those of other places",
        "tasks/stages/teaching.py",
        ".offsets.to_numpy() * top.tokens.shape[1])",
        ".offsets.to_numpy())",
        _LOOP,
    ),
    Mutant(
        "teacher-scores-again",
        "the scores of a teacher that are stored already are not found",
        "tasks/stages/teaching.py",
        "if (part := find_piece(work.writer, piece)) is None:",
        "if (part := find_piece(work.writer, f'{piece}-')) is None:",
        _LOOP,
    ),
    Mutant(
        "teacher-of-another-tokenizer",
        "the tokens of a teacher are not compared with the model's",
        "tasks/model_checks/objective.py",
        "    check_tokens(folder, facts, own, tokens(), kind)\n",
        "",
        _LOOP,
    ),
    Mutant(
        "teacher-may-change",
        "a run continues with another teacher than the one it has stored",
        "tasks/preflight.py",
        "    if config.retrain is None or selected is not None:",
        "    if selected is not None:",
        _LOOP,
    ),
    Mutant(
        "teacher-of-a-retraining-may-change",
        "a retraining continues with another teacher than the one it has stored",
        "tasks/preflight.py",
        "    if config.retrain is None or selected is not None:",
        "    if config.retrain is None:",
        _LOOP,
    ),
    Mutant(
        "teacher-unchecked-until-it-is-stored",
        "a retraining that was ended before it stored its teacher stores any",
        "tasks/checks.py",
        "if config.retrain is not None and selected is None:",
        "if False:",
        _LOOP,
    ),
    Mutant(
        "scores-lost-by-a-kill",
        "a state that is trained on scores of an earlier process does not name them",
        "tasks/stages/teaching.py",
        "    return found, (part,)\n",
        '    return found, (part,) if "scores" in locals() else ()\n',
        _KILLED,
    ),
)
