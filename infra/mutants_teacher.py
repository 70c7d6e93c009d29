"""Faults in distillation that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_CORE = ("tests/trainer_core/phases/test_distillation.py",)
_LOOP = ("tests/flows/test_distilling.py",)

TEACHER = (
    Mutant(
        "policy-as-its-own-teacher",
        "the teacher's scores are those of the policy",
        "trainer_core/trainer.py",
        "return self._teacher[1].logprobs(samples, temperature)",
        "return self._passes.score(samples, np.flatnonzero(samples.usable), temperature).logprobs",
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
        "    check_tokens(folder, tokens(), kind)\n",
        "",
        _LOOP,
    ),
    Mutant(
        "teacher-may-change",
        "a run continues with another teacher than the one it has stored",
        "tasks/preflight.py",
        "    if teacher is not None and config.retrain is None:",
        "    if teacher is not None and config.retrain is not None:",
        _LOOP,
    ),
)
