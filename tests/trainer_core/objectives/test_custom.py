"""Advantages and losses of a user: called as ours are, and refused with their file and line."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from storage.errors import InputError, NumericsError
from tests.trainer_core.objectives.test_advantages import scored
from tests.trainer_core.objectives.test_losses import tokens
from trainer_core.objectives.advantages import sample_advantages, token_advantages
from trainer_core.objectives.objective_config import PolicyConfig
from trainer_core.objectives.registry import loss_of
from trainer_core.objectives.trial import try_objective

EXAMPLE = Path(__file__).parents[3] / "infra/examples/objective.py"

GOOD = """
import numpy as np, torch
def whole(scored, scale=1.0): return scored.rewards * scale
def each(scored): return np.repeat(scored.rewards.astype(np.float64), scored.lengths)
def loss(tokens, push=1.0): return -push * tokens.advantages * tokens.logprobs
class Loss:
    def __init__(self, push): self.push = push
    def __call__(self, tokens): return -self.push * tokens.advantages * tokens.logprobs, tokens.advantages > 0
"""

BAD_LOSSES = {
    "raise ValueError('wrong')": "fails: ValueError: wrong (bad.py, line 4)",
    "return tokens.logprobs.sum()": "returns Tensor () of torch.float32 as loss, not a tensor (15,) on cpu: one for "
    "each response token (bad.py, line 3)",
    "return tokens.logprobs.numpy(force=True)": "returns ndarray (15,) of float32 as loss",
    "return tokens.logprobs.double()": "returns a loss of torch.float64, not of torch.float32 (bad.py, line 3)",
    "return tokens.logprobs.detach()": "returns a loss without gradient: compute it from tokens.logprobs",
    "return torch.ones(15, requires_grad=True)": ".function 'bad.py:loss' gives tokens.logprobs no gradient",
    "return -tokens.logprobs - tokens.old_logprobs.zero_()": "changes tokens.old_logprobs in place, which is read "
    "again later: make a new tensor (bad.py, line 3)",
    "return tokens.logprobs.sqrt()": "returns 15 of 15 values that are not finite as float32 (bad.py, line 3)",
    "return (tokens.logprobs - tokens.logprobs.detach()).sqrt()": "gives tokens.logprobs a gradient that is not finite",
    "return tokens.logprobs, None": "returns NoneType as clipped, not a tensor (15,)",
    "return tokens.reference_logprobs": "the loss reads tokens.reference_logprobs, which train.policy.loss.needs does "
    "not name: add 'reference' to it (bad.py, line 4)",
    "return tokens.logprob": "AttributeError: 'Tokens' object has no attribute 'logprob'",
    "raise SystemExit(3)": "fails: SystemExit: 3 (bad.py, line 4)",
}
BAD_ADVANTAGES = {
    "return list(scored.rewards)": "returns list, not a numpy array of numbers, (6,): one for each sample (bad.py, "
    "line 3)",
    "return scored.rewards[1:]": "returns ndarray (5,) of float32",
    "return np.repeat(scored.rewards, scored.lengths)": "returns ndarray (15,) of float32, not a numpy array of "
    "numbers, (6,)",
    "return scored.rewards > 0": "returns ndarray (6,) of bool",
    "return scored.rewards / 0": "returns 5 of 6 values that are not finite",
    "return np.full(6, 1e300)": "returns 5 of 6 values that are not finite as float32 (bad.py, line 3)",
    "scored.rewards -= 1; return scored.rewards": "ValueError: output array is read-only (bad.py, line 4)",
    "return scored.rewards + missing": "fails: NameError: name 'missing' is not defined (bad.py, line 4)",
}


def policy(folder, text, loss=None, advantage=None, **more):
    file = folder / "mine.py"
    file.write_text(text)
    tables = {"loss": loss, "advantage": advantage}
    named = {
        name: {"type": "custom", **table, "function": f"{file}:{table['function']}"}
        for name, table in tables.items()
        if table is not None
    }
    return PolicyConfig.model_validate({**named, **more})


@pytest.mark.parametrize("table", [{"function": "loss"}, {"function": "loss", "arguments": {"push": 2}}])
def test_a_function_is_called_with_its_arguments(tmp_path, table):
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    found = loss_of(policy(tmp_path, GOOD, table))(tokens(logprobs, advantages=torch.tensor([1.0, -3.0])))
    assert found.loss.tolist() == [table.get("arguments", {}).get("push", 1) * one for one in (1.0, -6.0)]
    assert found.clipped.tolist() == [0, 0]


def test_a_class_is_made_with_its_arguments_and_may_say_what_is_clipped(tmp_path):
    loss = loss_of(policy(tmp_path, GOOD, {"function": "Loss", "arguments": {"push": 0.5}}))
    found = loss(tokens(torch.tensor([-1.0, -2.0], requires_grad=True), advantages=torch.tensor([1.0, -3.0])))
    assert found.loss.tolist() == [0.5, -3]
    assert found.clipped.tolist() == [1, 0]


def test_an_advantage_has_one_value_a_sample(tmp_path):
    given = scored([1, np.nan, 3], usable=[True, False, True], lengths=np.array([2, 1, 1]))
    asked = policy(tmp_path, GOOD, advantage={"function": "whole", "arguments": {"scale": 2}})
    assert token_advantages(asked, given).tolist() == [2, 2, 0, 6]
    assert token_advantages(asked, given, np.array([0.5, 0.25, 0, 1])).tolist() == [0.5, 0.5, 0, 4]
    assert sample_advantages(asked, given) is None  # it runs in the trainer's ranks alone


def test_an_advantage_may_have_one_value_a_token(tmp_path):
    given = scored([1, np.nan, 3], usable=[True, False, True], lengths=np.array([2, 1, 0]))
    found = token_advantages(policy(tmp_path, GOOD, advantage={"function": "each", "per_token": True}), given)
    assert (found.tolist(), found.dtype) == ([1, 1, 0], np.float32)


@pytest.mark.parametrize(("body", "expected"), BAD_LOSSES.items(), ids=BAD_LOSSES)
def test_a_bad_loss_is_refused_with_its_line(tmp_path, body, expected):
    (tmp_path / "bad.py").write_text(f"import torch\n\ndef loss(tokens):\n    {body}\n")
    table = {"type": "custom", "function": f"{tmp_path}/bad.py:loss"}
    with pytest.raises((InputError, NumericsError), match=f"train.policy.loss.*{re.escape(expected)}"):
        try_objective(PolicyConfig.model_validate({"loss": table}))


@pytest.mark.parametrize(("body", "expected"), BAD_ADVANTAGES.items(), ids=BAD_ADVANTAGES)
def test_a_bad_advantage_is_refused_with_its_line(tmp_path, body, expected):
    (tmp_path / "bad.py").write_text(f"import numpy as np\n\ndef mine(scored):\n    {body}\n")
    table = {"type": "custom", "function": f"{tmp_path}/bad.py:mine"}
    with (
        pytest.raises((InputError, NumericsError), match=f"train.policy.advantage.*{re.escape(expected)}"),
        np.errstate(divide="ignore", invalid="ignore"),
    ):
        try_objective(PolicyConfig.model_validate({"advantage": table}))


@pytest.mark.parametrize(
    ("text", "name", "arguments", "expected"),
    [
        ("import torch\n1 / 0", "loss", {}, "fails: ZeroDivisionError: division by zero (bad.py, line 2)"),
        ("def loss(tokens)\n", "loss", {}, "fails: SyntaxError: expected ':' (bad.py, line 1)"),
        ("import nowhere_to_be_found", "loss", {}, "fails: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("loss = 3", "loss", {}, "is of type int, not a function or a class with a method __call__"),
        ("def other(tokens): ...", "loss", {}, "fails: AttributeError: bad.py has no 'loss'"),
        (
            "def loss(tokens, limit): ...",
            "loss",
            {"limt": 3},
            "takes (tokens, limit) and is called with (tokens, limt=3): missing a required argument: 'limit' (bad.py, "
            "line 1)",
        ),
        ("class Loss:\n    pass", "Loss", {}, "is of type Loss, not a function or a class with a method __call__"),
        ("class Loss:\n    def __init__(self, a): ...", "Loss", {}, "fails: TypeError: Loss.__init__() missing 1"),
    ],
)
def test_code_that_cannot_be_called_is_refused(tmp_path, text, name, arguments, expected):
    (tmp_path / "bad.py").write_text(text)
    table = {"type": "custom", "function": f"{tmp_path}/bad.py:{name}", "arguments": arguments}
    with pytest.raises(InputError, match=re.escape(expected)):
        try_objective(PolicyConfig.model_validate({"loss": table}))


def test_a_source_that_has_changed_is_refused(tmp_path):
    table = {"function": "loss", "source": "0123"}
    with pytest.raises(InputError, match=r"loss.function 'mine.py:loss' has changed: .*source is 0123"):
        loss_of(policy(tmp_path, GOOD, table))(tokens(torch.zeros(1, requires_grad=True)))


@pytest.mark.parametrize("needs", [[], ["entropy", "reference", "behaviour"]])
def test_a_loss_gets_what_it_needs(tmp_path, needs):
    reads = "+".join(["tokens.logprobs", *(f"tokens.{name}" for name in needs)])
    reads = reads.replace("reference", "reference_logprobs").replace("behaviour", "behaviour_logprobs")
    found = policy(tmp_path, f"def loss(tokens): return {reads}", {"function": "loss", "needs": needs})
    try_objective(found)
    assert (found.needs_entropy, found.needs_reference, found.needs_behaviour) == (bool(needs),) * 3
    assert not found.needs_advantages


def test_the_example_runs(tmp_path):
    shutil.copy(EXAMPLE, tmp_path)
    asked = PolicyConfig.model_validate(
        {
            "advantage": {"type": "custom", "function": f"{tmp_path}/objective.py:ranked"},
            "loss": {"type": "custom", "function": f"{tmp_path}/objective.py:Fading", "arguments": {"width": 0.5}},
        }
    )
    try_objective(asked)
    given = scored([0, 1, 1, 5, np.nan, 7], [0, 0, 0, 0, 0, 2], [True] * 4 + [False, True])
    np.testing.assert_allclose(token_advantages(asked, given), [-1, 0, 0, 1, 0, 0], atol=1e-7)
    logprobs = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0, -9.0], dtype=torch.float64)
    found = loss_of(asked)(tokens(logprobs, old_logprobs=old, advantages=torch.tensor([2.0, 2.0], dtype=torch.float64)))
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([-2, 0], abs=1e-6)
    assert found.clipped.tolist() == [0, 1]
