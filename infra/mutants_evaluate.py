"""Faults in what is measured and compared that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_PASSING = ("tests/tasks/rewards/test_passing.py",)
_CHANGES = ("tests/flows/views/test_changes.py",)
_CHOICE = ("tests/tasks/export/test_choice.py",)
_EVALUATION = ("tests/tasks/stages/test_evaluation.py",)

EVALUATE = (
    Mutant(
        "pass-by-the-sum",
        "an answer passes by its reward, whatever the condition names",
        "storage/filters.py",
        '        found = pc.map_lookup(column, pa.scalar(name), "first")',
        '        found = pc.field("reward")',
        _PASSING,
    ),
    Mutant(
        "pass-of-a-misspelt-component",
        "a component that no answer has is a pass rate of 0",
        "tasks/rewards/passing.py",
        "    if len(_rewards(table)):\n",
        "    if False:\n",
        _PASSING,
    ),
    Mutant(
        "pass-where-nothing-says-so",
        "a reward of 1 passes although others lie between 0 and 1",
        "tasks/rewards/passing.py",
        "not graded and np.isin(rewards, (0.0, 1.0)).all()",
        "not graded",
        _PASSING,
    ),
    Mutant(
        "best-by-the-mean-reward",
        "the mean reward is taken where there is no pass rate",
        "tasks/export/choice.py",
        '_METRICS = {PASSES: "pass_rate",',
        '_METRICS = {PASSES: "reward_mean",',
        _CHOICE,
    ),
    Mutant(
        "best-of-two-functions",
        "the best iteration is chosen among values of different reward functions",
        "tasks/export/choice.py",
        "_judged_by(one, measure) == _judged_by(newest, measure)",
        "True",
        _CHOICE,
    ),
    Mutant(
        "evaluations-of-two-functions-compared",
        "a change is that of the reward function",
        "flows/views/evaluations.py",
        "        by = (asked, one.scored_by)\n",
        '        by = (asked, "")\n',
        _EVALUATION,
    ),
    Mutant(
        "change-over-two-functions",
        "the last lines compare the first value of another reward function",
        "flows/views/changes.py",
        "there[keys.index(keys[-1])]",
        "there[0]",
        _CHANGES,
    ),
    Mutant(
        "change-of-a-long-run-over-two-functions",
        "of a long run the comparison begins anywhere",
        "flows/views/newest.py",
        "numbers[place : place + 1]",
        "numbers[:1]",
        _CHANGES,
    ),
    Mutant(
        "curve-joins-two-functions",
        "a curve goes on over another reward function",
        "flows/views/curves.py",
        "key=lambda row: [row.texts.get(name) for name in by]",
        "key=lambda row: 0",
        _CHANGES,
    ),
    Mutant(
        "weights-are-no-other-reward",
        "other arguments or weights of a reward count as the same function",
        "tasks/stages/scored.py",
        '    return value_digest([meaning({"reward": section.model_dump(mode="json")})["reward"], dict(sources)])\n',
        "    return value_digest([dict(sources)])\n",
        ("tests/flows/test_rewards_in_the_loop.py::test_what_changes_the_values_is_another_reward",),
    ),
    Mutant(
        "replaced-weights-are-compared",
        "an evaluation is compared with that of weights which a rerun has replaced",
        "flows/views/evaluations.py",
        "        if one.replaced:\n            made.append(one)\n            continue\n",
        "",
        ("tests/flows/test_redoing.py",),
    ),
    Mutant(
        "replaced-weights-are-not-labelled",
        "the evaluation of replaced weights looks like any other",
        "flows/cli/printing.py",
        'replaced=one.stage.startswith(PREFIX) and one.inputs.get("weights") not in current',
        "replaced=False",
        ("tests/flows/test_redoing.py",),
    ),
    Mutant(
        "samples-with-rewards-of-the-head",
        "samples of a revision are joined with the rewards of the head",
        "flows/views/samples.py",
        "    newest = names_of(store, run, revision).newest\n",
        "    newest = names_of(store, run, None).newest\n",
        ("tests/flows/test_redoing.py",),
    ),
    Mutant(
        "iteration-beyond-the-last",
        "iteration 8 of 6 is shown",
        "flows/views/progress.py",
        "    iterations = max(iterations, record.iteration)\n",
        "",
        ("tests/flows/views/test_progress.py",),
    ),
    Mutant(
        "evaluation-cut-at-the-context",
        "answers of an evaluation end where the context ends, silently",
        "tasks/stages/evaluation.py",
        "    check_asked_prompts(context.config, context.root, prepared.manifest, settings)\n",
        "",
        _EVALUATION,
    ),
)
