"""Engines of a user's own: the example through the calls of the stages, and what a user's code may do wrong."""

import contextlib

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from storage.errors import InputError, SyncMismatch
from tasks.config.code_version import PROJECT_ROOT
from tasks.config.model import GeneratedModel
from tasks.config.run import EngineSection
from tasks.data.generated import generate_tokenizer
from tasks.engine.own import OwnEngine, find_engine, load_engine
from tasks.engine.protocol import Begun, EngineIdentity, EngineSpec, Sampling, weights_digest
from tasks.engine.start import start_engine
from tasks.model_checks.objective import check_engine
from tasks.stages.proof import proven
from tests.tasks.engine_update import assert_unusable, deliver, plan_of
from trainer_core.protocol import Sent
from trainer_core.user_code import source_digest

EXAMPLE = f"{PROJECT_ROOT}/infra/examples/engine.py:LastToken"
VOCABULARY = 12
PROMPTS, SEEDS = [[3, 4], [5], [6, 7, 8], [5]], [1, 2, 3, 4]


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    names = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    shapes = ((VOCABULARY, 8), (VOCABULARY, 8), (8,))
    return {name: torch.randn(shape, generator=generator) for name, shape in zip(names, shapes, strict=True)}


@pytest.fixture
def spec(tmp_path):
    save_file(weights(0), tmp_path / "model.safetensors")
    return EngineSpec(model_dir=str(tmp_path), max_model_len=32)


@pytest.fixture
def engine(spec):
    return start_engine(spec, None, find_engine(EXAMPLE, ""))


def updated(engine, folder, seed, version, in_flight="abort"):
    """An update up to its commit, proven as by the stage."""
    folder.mkdir()
    arrived, sent = deliver(engine, folder, weights(seed), version, in_flight=in_flight, arena_bytes=512)
    digests = proven(plan_of(weights(seed), version, 512), [Sent(sent, {})], {0: arrived})
    return engine.commit_update(version, weights_digest(digests)), digests


def same(one, other):
    return one.to_pylist() == other.to_pylist()


def test_the_example_samples_scores_and_takes_weights_that_are_proven(engine, tmp_path):
    before = engine.generate(PROMPTS, SEEDS, Sampling(max_tokens=6))
    assert engine.held() == {}
    identity, digests = updated(engine, tmp_path / "one", 1, 1)
    assert identity == engine.identity() == EngineIdentity(weight_version=1, weights_digest=weights_digest(digests))
    assert engine.held() == digests
    after = engine.generate(PROMPTS, SEEDS, Sampling(max_tokens=6))
    assert not same(before, after)
    for prompt, row in zip(PROMPTS, after.to_pylist(), strict=True):
        assert row["finish_reason"] == "length"
        (scored,) = engine.score([prompt + row["response_tokens"]])
        np.testing.assert_allclose(scored[len(prompt) - 1 :], row["logprobs"], rtol=1e-6)
    updated(engine, tmp_path / "two", 0, 2)
    assert same(engine.generate(PROMPTS, SEEDS, Sampling(max_tokens=6)), before)


def test_samples_depend_on_prompt_and_seed_alone_and_batches_are_collected(engine):
    sampling = Sampling(max_tokens=9, stop_token_ids=(2, 9))
    whole = engine.generate(PROMPTS, SEEDS, sampling)
    for number, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True)):
        engine.enqueue(number, [np.array(prompt, np.int32)], [seed], sampling)
    found = []
    while collected := engine.collect(0.1).finished:
        found += collected
    assert [one.number for one in found] == [0, 1, 2, 3]
    assert [row for one in found for row in one.completions.to_pylist()] == whole.to_pylist()
    greedy = Sampling(max_tokens=5, temperature=0)
    assert same(engine.generate(PROMPTS, SEEDS, greedy), engine.generate(PROMPTS, SEEDS[::-1], greedy))


def test_a_response_ends_with_the_token_that_completes_a_stop_text(engine, tmp_path):
    """Tokens 3 to 12 are the digits."""
    generate_tokenizer(tmp_path, GeneratedModel())
    whole = engine.generate(PROMPTS, SEEDS, Sampling(max_tokens=9)).to_pylist()
    found = engine.generate(PROMPTS, SEEDS, Sampling(max_tokens=9, stop=("4", "5", "6"))).to_pylist()
    for row, without in zip(found, whole, strict=True):
        tokens = without["response_tokens"]
        ends = [place for place, token in enumerate(tokens, 1) if token in (7, 8, 9)][:1]
        size = ends[0] if ends else len(tokens)
        expected = {name: without[name][:size] for name in ("response_tokens", "logprobs")}
        assert row == {**expected, "finish_reason": "stop" if ends else "length"}
    assert {row["finish_reason"] for row in found} >= {"stop"}


@pytest.mark.parametrize(("in_flight", "collected"), [("abort", []), ("wait", [None]), ("keep", [1])])
def test_an_update_drops_finishes_or_keeps_what_is_queued(engine, tmp_path, in_flight, collected):
    engine.enqueue(0, PROMPTS, SEEDS, Sampling(max_tokens=3))
    updated(engine, tmp_path / "update", 1, 1, in_flight)
    assert [one.weight_version for one in engine.collect(0.1).finished] == collected


def test_weights_that_did_not_arrive_whole_are_not_used(engine, tmp_path):
    updated(engine, tmp_path / "one", 1, 1)
    wrong = weights(2) | {"lm_head.weight": torch.zeros(3, 8)}
    with pytest.raises(SyncMismatch, match=r"lm_head.weight with the shape \(3, 8\), and the engine has .*\(12, 8\)"):
        deliver(engine, tmp_path, wrong)
    assert engine.identity().weight_version == 1
    (tmp_path / "two").mkdir()

    def break_off(bucket, _):
        if bucket.number:
            raise ValueError("the rank failed")

    with pytest.raises(SyncMismatch, match="the rank failed"):
        deliver(engine, tmp_path / "two", weights(2), 2, before=break_off, arena_bytes=512)
    assert_unusable(engine)
    assert not engine.abort_update("it failed")
    assert engine.held() == {}
    updated(engine, tmp_path / "three", 3, 3)
    assert engine.identity().weight_version == 3
    with pytest.raises(SyncMismatch, match="were not received"):
        engine.commit_update(4, "other")
    engine.refuse("of a test")
    assert_unusable(engine)


def test_a_parameter_that_changed_is_not_the_one_that_was_committed(engine, tmp_path):
    _, digests = updated(engine, tmp_path / "one", 1, 1)
    engine._engine.parameters()["lm_head.weight"][0, 0] += 1
    assert {name for name, digest in engine.held().items() if digest != digests[name]} == {"lm_head.weight"}


BASE = """
from ratchet import BaseEngine, Response
import numpy as np, torch


class Mine(BaseEngine):
    def parameters(self):
        return {"one": torch.zeros(1)}

    def sample(self, prompts, seeds, sampling):
        return [Response([1], [-0.5], "stop") for _ in prompts]

    def logprobs(self, sequences):
        return [np.zeros(len(one) - 1, np.float32) for one in sequences]
"""


def written(tmp_path, text):
    (tmp_path / "mine.py").write_text(text)
    return f"{tmp_path}/mine.py:Mine"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such", r"fails: ModuleNotFoundError: No module named 'no_such' \(mine\.py, line 1\)"),
        ("raise SystemExit(3)", r"fails: SystemExit: 3 \(mine\.py, line 1\)"),
        ("Mine = 3", "is of type int: expected a class"),
        ("class Other: pass", "has no 'Mine'"),
        ("\nclass Mine: pass", r"no method 'identity' \(mine\.py, line 2\): expected `def identity\(self\)`"),
        (
            BASE.replace("def sample", "def samples"),
            r"no method 'sample' \(mine\.py, line 6\): expected `def sample\(self, prompts, seeds, sampling\)`",
        ),
        (BASE.replace("def sample", "async def sample"), r"has `async def sample\(.*line 10\): expected `def sample\("),
        (BASE.replace("return [R", "yield [R"), r"has `def sample\(.*\)` with yield \(mine\.py, line 10\): expected"),
        (
            BASE.replace("(self, sequences)", "(self)"),
            r"has `def logprobs\(self\)` \(mine\.py, line 13\): expected `def logprobs\(",
        ),
        (
            f"{BASE}\n    def __init__(self): pass\n",
            r"is made with \(\) \(mine\.py, line 6\): expected `def __init__\(self, spec\)`",
        ),
    ],
)
def test_an_engine_that_is_not_one_is_refused_before_the_run(tmp_path, text, said):
    name = written(tmp_path, text)
    with pytest.raises(InputError, match=f"engine.function 'mine.py:Mine' .*{said}"):
        load_engine(find_engine(name, ""))


def test_the_check_before_the_run_imports_it_elsewhere(tmp_path):
    check_engine(EngineSection())
    light = BASE.replace(", torch", "")
    name = written(tmp_path, light.replace("    def sample", "    print('said at its import')\n\n    def sample"))
    check_engine(EngineSection(function=name, source=source_digest(find_engine(name, ""))))
    with pytest.raises(InputError, match=r"'mine.py:Mine' has no method 'sample' .*\. Nothing was started"):
        check_engine(EngineSection(function=written(tmp_path, light.replace("def sample", "def samples"))))


def test_an_engine_whose_source_changed_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"engine\.function 'mine.py:Mine' has changed"):
        find_engine(written(tmp_path, BASE), "of another")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("for _ in prompts]", "for _ in prompts[1:]]", r"0 responses to 1 prompts from generate"),
        ("[-0.5]", "[-0.5, 1]", "another number of log-probabilities than of tokens from generate"),
        ("[-0.5]", "[float('nan')]", "log-probabilities that are not finite from generate"),
        ('"stop"', '"done"', "finish_reason 'done', not one of stop, length, abort, from generate"),
        ("len(one) - 1", "len(one)", r"arrays of \[2\] log-probabilities, not \[1\], from score"),
        ("np.float32", "np.float64", "a list, not a list of float32 arrays, from score"),
        ("return [R", "raise KeyError('x')\n        return [R", r"fails: KeyError: 'x' \(mine\.py, line 11\)"),
        ("    def logprobs", "    def identity(self): return 3\n    def logprobs", r"a int, .* \(mine\.py, line 13\)"),
    ],
)
def test_a_wrong_answer_is_refused_with_the_line(tmp_path, old, new, said):
    assert old in BASE
    engine = OwnEngine.of(find_engine(written(tmp_path, BASE.replace(old, new)), ""), SPEC)
    with pytest.raises(InputError, match=said):
        for call in (engine.identity, lambda: engine.generate([[1]], [0], Sampling(max_tokens=1)), score_of(engine)):
            call()


SPEC = EngineSpec(model_dir="none", max_model_len=8)


def score_of(engine):
    return lambda: engine.score([[1, 2]])


def test_a_batch_that_was_not_queued_is_refused(tmp_path):
    collect = "def collect(self, wait_s):\n        self.enqueue(5, [[1]], [0], HOW)\n        return super().collect(0)"
    how = "from ratchet import Sampling; HOW = Sampling(max_tokens=1)\nimport numpy"
    text = f"{BASE}\n    {collect}\n".replace("import numpy", how, 1)
    engine = OwnEngine.of(find_engine(written(tmp_path, text), ""), SPEC)
    with pytest.raises(InputError, match=r"batch 5, which was not queued, from collect \(mine\.py, line 17\)"):
        engine.collect(0.1)


BEGUN = [Begun(np.array([5], np.int32), np.array([-0.5], np.float32))]
GROWN = "import numpy as np\nfrom tasks.engine.protocol import Begun, Collected, Increment\n"


@pytest.mark.parametrize(
    ("row", "first", "logprobs", "said"),
    [
        (1, 1, "[-0.5]", r"an increment of batch 3 for row 1 from token 1, which is not there, from collect"),
        (0, 0, "[-0.5]", r"for row 0 from token 0, which is not there"),
        (0, 1, "[-0.5, -0.5]", r"an increment of 1 tokens and 2 finite log-probabilities from collect"),
        (0, 1, "[np.nan]", r"an increment of 1 tokens and 1 finite"),
        (0, 1, "[-0.5]", None),
    ],
)
def test_a_wrong_increment_is_refused(tmp_path, row, first, logprobs, said):
    grown = f"Increment(3, {row}, {first}, Begun(np.array([5]), np.array({logprobs}, np.float32)), None)"
    text = f"{GROWN}{BASE}\n    def collect(self, wait_s): return Collected([], 0, [{grown}])\n"
    engine = OwnEngine.of(find_engine(written(tmp_path, text), ""), SPEC)
    engine.enqueue(3, [[1]], [0], Sampling(max_tokens=3), BEGUN)
    with pytest.raises(InputError, match=said) if said else contextlib.nullcontext():
        assert len(engine.collect(0.1).increments) == 1


def test_a_response_that_does_not_begin_with_what_was_begun_is_refused(tmp_path):
    engine = OwnEngine.of(find_engine(written(tmp_path, BASE), ""), SPEC)
    engine.enqueue(3, [[1]], [0], Sampling(max_tokens=3), BEGUN)
    with pytest.raises(
        InputError, match=r"begins with \[.*\], not with what was begun, \[5\], as batch 3 from collect"
    ):
        engine.collect(0.1)


def test_the_operating_system_s_errors_are_tried_again(tmp_path):
    text = BASE.replace("return [R", "raise ConnectionError('away')\n        return [R")
    engine = OwnEngine.of(find_engine(written(tmp_path, text), ""), SPEC)
    with pytest.raises(ConnectionError):
        engine.generate([[1]], [0], Sampling(max_tokens=1))
