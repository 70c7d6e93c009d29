"""Faults in the endpoint that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_TESTS = ("tests/tasks/endpoint/test_endpoint.py",)
_REFUSALS = ("tests/tasks/endpoint/test_refusals.py",)
_DRIVING = ("tests/tasks/stages/test_driving.py",)
_SESSIONS = "tasks/endpoint/sessions.py"

ENDPOINT = (
    Mutant(
        "endpoint-tokenizes-again",
        "the engine is given another rendering of a history than the tokens that were sampled",
        _SESSIONS,
        "            return Asked(branch, history, texts, given, np.concatenate([branch.row.tokens, given]), "
        "more.text)\n",
        "            again = self.renderer.first(history.rendered(), history.shown_tools)\n"
        "            return Asked(branch, history, texts, given, np.asarray(again, np.int32))\n",
        _TESTS,
    ),
    Mutant(
        "endpoint-earlier-history-appended",
        "an answer to an earlier history is appended behind the later turns of a branch",
        _SESSIONS,
        "if end is branch.ends[-1] and not branch.taken:",
        "if not branch.taken:",
        _TESTS,
    ),
    Mutant(
        "endpoint-text-of-another-turn",
        "the text before an answer is taken to end with the answer before it, so that its turn is not appended",
        "tasks/environments/rendering.py",
        "return Following(self._codec.encode(rest), kept, whole)",
        "return Following(self._codec.encode(rest), kept, told)",
        _TESTS,
    ),
    Mutant(
        "endpoint-requests-at-once-share-a-branch",
        "two requests at once for one history append to the same branch",
        _SESSIONS,
        "if end is branch.ends[-1] and not branch.taken:",
        "if end is branch.ends[-1]:",
        _TESTS,
    ),
    Mutant(
        "endpoint-branches-share-noise",
        "two answers to one history are sampled with the same noise",
        _SESSIONS,
        "{self.seed}/{self._births[place]}/",
        "{self.seed}/",
        _TESTS,
    ),
    Mutant(
        "endpoint-edits-unnoticed",
        "an answer that a client has changed counts as the one that was sampled",
        "tasks/endpoint/requests.py",
        "return self == ours and",
        "return self.role == ours.role and",
        _TESTS,
    ),
    Mutant(
        "endpoint-sampling-unrecorded",
        "sampling parameters of a client have no effect, and nothing says so",
        "tasks/endpoint/server.py",
        "        session.override(other)\n",
        "",
        _TESTS,
    ),
    Mutant(
        "endpoint-accepts-ended-sessions",
        "the key of a session that has ended is accepted",
        "tasks/endpoint/server.py",
        "        del self._sessions[session.key]\n",
        "",
        _REFUSALS,
    ),
    Mutant(
        "branches-shared-prefix-trained-twice",
        "an answer that a branch took over from another one is trained in both",
        _SESSIONS,
        '            copy.observe(tokens[turn["begin"] : turn["end"]], turn["role"])\n',
        '            own = tokens[turn["begin"] : turn["end"]]\n'
        '            copy.answer(Answer(own, np.zeros(len(own), np.float32), "stop", 0))\n',
        _TESTS,
    ),
    Mutant(
        "branches-lost",
        "what was sampled in other branches than the last is neither stored nor trained",
        "tasks/endpoint/driving.py",
        ", branches=_others(session)",
        "",
        _DRIVING,
    ),
    Mutant(
        "branches-of-other-samples",
        "branches are trained with the reward of another sample",
        "trainer_core/batches/reading.py",
        'np.argsort(np.concatenate([owners, np.arange(len(keys))]), kind="stable")',
        "np.arange(len(owners) + len(keys))",
        ("tests/trainer_core/batches/test_reading.py",),
    ),
    Mutant(
        "branches-weigh-more",
        "a sample that branched weighs more than the others of its group",
        "trainer_core/objectives/selection.py",
        "samples = np.arange(count) if owners is None else owners",
        "samples = np.arange(count)",
        ("tests/trainer_core/objectives/test_selection.py",),
    ),
    Mutant(
        "endpoint-refusals-unbounded",
        "what a client sends is stored with the sample in full length, as the name of another model",
        "tasks/endpoint/requests.py",
        "super().__init__(shortened(message))",
        "super().__init__(message)",
        _REFUSALS,
    ),
    Mutant(
        "drive-answers-unrecorded",
        "an answer reaches a client before it is durable, and another one is sampled after a kill",
        "tasks/endpoint/driving.py",
        "            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._noted(event), self._loop))\n",
        "",
        _DRIVING,
    ),
    Mutant(
        "drive-failure-is-reward",
        "a function that fails has reward 0",
        "tasks/endpoint/driving.py",
        '                if failure.reason != "exception" or not any(session.counts[one] for one in _LIMITS):\n'
        "                    raise\n",
        "",
        _DRIVING,
    ),
)
