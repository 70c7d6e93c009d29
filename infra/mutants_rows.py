"""Faults in a step over rows that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_ROWS = ("tests/tasks/engine/vllm/test_scheduler.py::test_requests_that_come_and_go_get_the_tokens_of_their_own_seeds",)
_COUNTER = ("tests/tasks/engine/vllm/test_counter.py",)

ROWS = (
    Mutant(
        "rows-past-their-end",
        "a row goes on for a token more than the request may have",
        "tasks/engine/vllm/rows.py",
        "(sampled + 1 >= self.table[LIMIT, at])",
        "(sampled >= self.table[LIMIT, at])",
        _ROWS,
    ),
    Mutant(
        "stops-of-the-first",
        "every row ends at the stop tokens of the first",
        "tasks/engine/vllm/rows.py",
        "self._ends.table[self.table[LINE, at], tokens]",
        "self._ends.table[0, tokens]",
        _ROWS,
    ),
    Mutant(
        "rows-without-a-sign-of-life",
        "steps over rows send no message until a response ends",
        "tasks/engine/vllm/scheduler.py",
        "            messages[0] = EngineCoreOutputs()\n",
        "            pass\n",
        _ROWS,
    ),
    Mutant(
        "rows-without-blocks",
        "a row writes a token beyond its blocks of the key-value cache",
        "tasks/engine/vllm/scheduler.py",
        "table[COMPUTED, at] >= table[ROOM, at]",
        "table[COMPUTED, at] > table[ROOM, at]",
        _ROWS,
    ),
    Mutant(
        "rows-forget-steps-under-way",
        "a row that loses its blocks forgets the token that a step is sampling",
        "tasks/engine/vllm/scheduler.py",
        "request.num_computed_tokens, request.num_output_placeholders = left.computed, left.flying",
        "request.num_computed_tokens, request.num_output_placeholders = left.computed, 0",
        _ROWS,
    ),
    Mutant(
        "rows-lose-what-they-sampled",
        "a row that loses its blocks loses what it has sampled",
        "tasks/engine/vllm/scheduler.py",
        "        response.tokens.frombytes(left.tokens.tobytes())\n",
        "",
        _ROWS,
    ),
    Mutant(
        "same-steps-with-new-rows",
        "steps count as steps of the same requests when one of them has ended",
        "tasks/engine/vllm/rows.py",
        "        self.table = self.table[:, stay]\n        self._planned = None\n",
        "        self.table = self.table[:, stay]\n",
        _ROWS,
    ),
    Mutant(
        "noise-of-the-step",
        "a token's noise depends on how long this engine has sampled its response, not on its position",
        "tasks/engine/vllm/on_cpu.py",
        "self.optimistic_seq_lens_cpu[: len(names)].numpy().astype(np.int64) - 1",
        "np.array([len(self.requests[name].output_token_ids) for name in names])",
        (
            "tests/tasks/engine/vllm/test_engine.py::test_a_response_goes_on_from_its_beginning_as_if_nothing_had_happened",
        ),
    ),
    Mutant(
        "noise-of-half-a-seed",
        "a token's noise depends on the lower half of its sample's seed",
        "tasks/engine/vllm/counter.py",
        "k0, k1 = key & _LOW, key >> _HALF",
        "k0, k1 = key & _LOW, key & _LOW",
        _COUNTER,
    ),
    Mutant(
        "entries-share-their-noise",
        "four entries of the vocabulary have the noise of the first",
        "tasks/engine/vllm/counter.py",
        "        found[:, :, number] = word.reshape",
        "        found[:, :, number] = four[0].reshape",
        _COUNTER,
    ),
    Mutant(
        "cards-have-their-own-noise",
        "the kernel for cards counts from the token, not from the one before",
        "tasks/engine/vllm/draw.py",
        "second = zero + position.to(tl.uint32)",
        "second = zero + 1 + position.to(tl.uint32)",
        _COUNTER,
    ),
    Mutant(
        "cards-choose-the-last-of-equals",
        "of equal logits the kernel for cards chooses the last",
        "tasks/engine/vllm/draw.py",
        "tl.min(tl.minimum(tl.minimum(f0, f1), tl.minimum(f2, f3)), axis=0))",
        "tl.max(tl.where(l0 == value, entry, 0), axis=0))",
        _COUNTER,
    ),
    Mutant(
        "log-probabilities-of-a-tile",
        "the kernel for cards leaves tiles of the vocabulary out of the log-probability",
        "tasks/engine/vllm/draw.py",
        "total = tl.sum(totals * tl.exp(largest - most), axis=0)",
        "total = tl.max(totals * tl.exp(largest - most), axis=0)",
        _COUNTER,
    ),
)
