"""Faults in settings of sampling that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_ROWS = ("tests/tasks/engine/vllm/test_scheduler.py::test_requests_that_come_and_go_get_the_tokens_of_their_own_seeds",)
_ENDS = ("tests/tasks/engine/test_ends.py",)

SAMPLING = (
    Mutant(
        "stop-texts-within-a-token",
        "a stop text is found only within one token",
        "tasks/engine/ends.py",
        "np.repeat(np.arange(len(states), dtype=np.int32)[:, None], vocabulary, axis=1)",
        "np.zeros((len(states), vocabulary), dtype=np.int32)",
        _ENDS,
    ),
    Mutant(
        "stop-texts-of-ends-of-tokens",
        "a stop text that is complete before the end of a token is forgotten",
        "tasks/engine/ends.py",
        "    found[-1] = len(begun)\n",
        "",
        _ENDS,
    ),
    Mutant(
        "stop-texts-begun-once",
        "what may be the beginning of a stop text is given up where the text does not go on, not begun again",
        "tasks/engine/ends.py",
        "for size in range(len(seen) + 1))",
        "for size in (0, len(seen)))",
        _ENDS,
    ),
    Mutant(
        "bytes-of-whole-signs",
        "a token that is a part of a sign has the bytes of the replacement for it",
        "tasks/data/backends.py",
        "_raw(backend.token_text(token)) or added.encode() if _UNDECODED in added else added.encode()",
        "added.encode()",
        ("tests/tasks/data/test_token_bytes.py",),
    ),
    Mutant(
        "stop-texts-forgotten-with-a-row",
        "a row that loses its blocks forgets what it has seen of a stop text",
        "tasks/engine/vllm/scheduler.py",
        "        response.line = left.line\n",
        "",
        _ROWS,
    ),
    Mutant(
        "stop-texts-without-first-tokens",
        "tokens that are sampled with a prompt are not looked at for stop texts",
        "tasks/engine/vllm/scheduler.py",
        "        response.line = self._ends.after(response.line, tokens)\n",
        "",
        _ROWS,
    ),
    Mutant(
        "stop-texts-unknown-to-rollouts",
        "a rollout samples without the stop texts of the configuration",
        "tasks/stages/samples.py",
        "include=set(Sampling.model_fields)",
        'include=set(Sampling.model_fields) - {"stop"}',
        ("tests/flows/test_iteration.py",),
    ),
    Mutant(
        "top-k-unknown-to-rollouts",
        "a rollout samples from all tokens, whatever the configuration says",
        "tasks/stages/samples.py",
        "include=set(Sampling.model_fields)",
        'include=set(Sampling.model_fields) - {"top_k"}',
        ("tests/flows/test_iteration.py",),
    ),
    Mutant(
        "stop-texts-unknown-to-evaluations",
        "greedy answers go on after a stop text",
        "tasks/stages/evaluate.py",
        "stop_token_ids=stop, stop=section.stop)",
        "stop_token_ids=stop)",
        ("tests/flows/test_iteration.py",),
    ),
    Mutant(
        "min-p-unknown-to-evaluations",
        "sampled answers are drawn without the share that was asked for",
        "tasks/stages/evaluation.py",
        '{"temperature", "top_p", "top_k", "min_p"}',
        '{"temperature", "top_p", "top_k"}',
        ("tests/tasks/stages/test_evaluation.py",),
    ),
    Mutant(
        "min-p-not-checked",
        "a run corrects log-probabilities of tokens that were drawn from the likelier ones",
        "tasks/checks.py",
        '    check_sampling(policy, config.rollout.min_p, "rollout.min_p", 0)\n',
        "",
        ("tests/tasks/test_checks.py",),
    ),
    Mutant(
        "own-engines-go-on",
        "responses of a user's own engine go on after a stop text",
        "tasks/engine/base.py",
        "responses = [self._ended(one, stop) for one in sampled] if stop else sampled",
        "responses = sampled",
        ("tests/tasks/engine/test_own.py",),
    ),
)
