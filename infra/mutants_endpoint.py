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
        "{self.seed}/{birth}/",
        "{self.seed}/",
        _TESTS,
    ),
    Mutant(
        "endpoint-noise-used-twice",
        "a question that is asked again after a lost answer has the noise of another branch",
        _SESSIONS,
        "birth = next(number for number in itertools.count() if number not in self._births[place])",
        "birth = len(self._births[place])",
        _TESTS,
    ),
    Mutant(
        "endpoint-late-answers",
        "an answer that comes after its function has returned is appended to the row",
        "tasks/endpoint/server.py",
        "if left := list(session.under_way.values()):",
        "if left := list(session.under_way.values())[:0]:",
        _DRIVING,
    ),
    Mutant(
        "endpoint-stop-text-doubled",
        "a text goes on behind a stop text that its client left out, so the policy reads another one",
        _SESSIONS,
        "self.messages[0].content + sampled)",
        "self.messages[0].content + answer.content)",
        _TESTS,
    ),
    Mutant(
        "endpoint-texts-appended-to-chats",
        "a plain text is appended to a chat whose first message it begins with",
        _SESSIONS,
        "or self.messages[0].role != end.messages[0].role:",
        ":",
        _TESTS,
    ),
    Mutant(
        "endpoint-stop-texts-unbounded",
        "the stop texts of one request take the memory of an engine",
        "tasks/endpoint/requests.py",
        "> STOP_BYTES:",
        "> 1 << 30:",
        _REFUSALS,
    ),
    Mutant(
        "calls-cubic",
        "an answer that repeats itself within an open call is read in cubic time, and every conversation waits",
        "tasks/environments/calls.py",
        "    pieces = [piece.partition(OPENED) for piece in text.split(_CLOSED)[:-1]]\n"
        "    return [inner.strip() for _, opened, inner in pieces if opened]\n",
        '    import re\n\n    return re.findall(rf"{OPENED}\\s*(.*?)\\s*{_CLOSED}", text, re.DOTALL)\n',
        ("tests/tasks/environments/test_readers.py",),
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
        "            kept = asyncio.run_coroutine_threadsafe(self._noted(event), self._loop)\n"
        "            await asyncio.shield(asyncio.wrap_future(kept))  # others are stored with it\n",
        "",
        _DRIVING,
    ),
    Mutant(
        "drive-failure-is-reward",
        "a function that fails has reward 0",
        "tasks/endpoint/driving.py",
        '                if failure.reason != "exception" or not session.at_limit:\n                    raise\n',
        "",
        _DRIVING,
    ),
    Mutant(
        "drive-failure-after-a-limit-is-reward",
        "a function that fails long after it was refused for a limit has reward 0",
        _SESSIONS,
        "self.last, self.at_limit = asked.branch, False",
        "self.last = asked.branch",
        _DRIVING,
    ),
)
