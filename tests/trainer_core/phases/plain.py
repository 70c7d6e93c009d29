"""The objectives once more, sample by sample, with transformers and autograd: nothing of the trainer is used."""

from pathlib import Path

import numpy as np

from tests.trainer_core.models import places_of

WITHOUT = {"type": "none"}


def plain_steps(rank, world_size, store, directory, samples, reference, temperature, objectives, folder):
    """Take one step w - g / (|g| + 1) on each objective, and write the weights; returns the losses."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3ForCausalLM

    losses = {}
    for name, settings in objectives.items():
        model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
        responses = [
            one | {"reference": torch.from_numpy(reference[one["own"]]).double()}
            for one in responses_of(model, samples, temperature)
        ]
        loss = objective(settings, responses)
        loss.backward()
        stepped = {
            key: (weight - weight.grad / (weight.grad.abs() + 1)).detach().float()
            for key, weight in model.named_parameters()
        }
        Path(folder, name).mkdir(parents=True)
        save_file(stepped, Path(folder, name, "model.safetensors"))
        losses[name] = loss.item()
    return losses


def responses_of(model, samples, temperature, whole=False):
    """Values for the response of each usable sample, if asked with the `whole` softmax."""
    import torch

    starts = np.cumsum(samples.lengths) - samples.lengths
    first = np.cumsum(samples.response_lengths) - samples.response_lengths
    for row in np.flatnonzero(samples.usable):
        tokens = torch.from_numpy(samples.tokens[starts[row] : starts[row] + samples.lengths[row]].astype(np.int64))
        everything = (model(tokens[None]).logits[0, :-1] / temperature).log_softmax(-1)
        places = places_of(samples, row)
        everything = everything[places - 1]
        own = slice(first[row], first[row] + samples.response_lengths[row])
        yield {
            "row": row,
            "group": samples.groups[row],
            "reward": float(samples.rewards[row]),
            "logprobs": everything.gather(-1, tokens[places, None])[:, 0],
            "entropy": -(everything.exp() * everything).sum(-1),
            "behaviour": torch.from_numpy(samples.engine_logprobs[own]).double(),
            "teacher": None if (found := samples.teacher_logprobs) is None else torch.from_numpy(found[own]).double(),
            "own": own,
            **({"everything": everything} if whole else {}),
        }


def objective(settings, responses):
    """Mean over tokens, or over sequences, of each token's loss."""
    import torch

    kind = settings.get("loss", {"type": "clip"})
    if kind["type"] == "dpo":
        return _preferences(kind, responses)
    if kind["type"] == "sft":
        good = [one["logprobs"] for one in responses if one["reward"] > kind["above"]]
        return -torch.cat(good).mean()
    advantages = _distilled(settings, responses)
    losses = [
        _losses(settings, kind, one, own) + _kl_loss(settings, one)
        for one, own in zip(responses, advantages, strict=True)
    ]
    if settings.get("loss_aggregation") == "sequence":
        return torch.stack([loss.mean() for loss in losses]).mean()
    return torch.cat(losses).mean()


def _distilled(settings, responses):
    """Advantages from rewards, if they count, and those of each token by a teacher."""
    if (distill := settings.get("distill")) is None:
        return _advantages(settings, responses)
    weight = distill.get("reward_weight", 0.0)
    rewarded = _advantages(settings, responses) if weight else [0.0] * len(responses)
    own = "behaviour" if settings.get("old_policy") == "behaviour" else "logprobs"
    reverse = [(one[own] - one["teacher"]).detach() for one in responses]
    return [weight * a - distill["coefficient"] * kl for a, kl in zip(rewarded, reverse, strict=True)]


def _kl(settings, one):
    change = one["reference"] - one["logprobs"]
    kinds = {"k1": -change, "k2": change**2 / 2, "k3": change.exp() - 1 - change}
    return settings.get("kl_coefficient", 0.0) * kinds[settings.get("kl_estimator", "k3")]


def _kl_loss(settings, one):
    return 0.0 if settings.get("kl_in") == "reward" else _kl(settings, one)


def _advantages(settings, responses):
    """One for each response, or for REINFORCE++ one for each token."""
    import torch

    inside = settings.get("kl_in") == "reward"
    penalties = [_kl(settings, one).detach() if inside else torch.zeros(1) for one in responses]
    if settings.get("advantage") == {"type": "reinforce_pp"}:
        returns = [
            torch.stack([one["reward"] - penalty[token:].sum() for token in range(len(penalty))])
            for one, penalty in zip(responses, penalties, strict=True)
        ]
        every = torch.cat(returns)
        return [(own - every.mean()) / every.std() for own in returns]
    rewards = [one["reward"] - float(penalty.sum()) for one, penalty in zip(responses, penalties, strict=True)]
    groups = np.array([one["group"] for one in responses])
    of_group = [np.array(rewards)[groups == group] for group in groups]
    return [(own - group.mean()) / (group.std(ddof=1) + 1e-6) for own, group in zip(rewards, of_group, strict=True)]


def _losses(settings, kind, one, advantage):
    import torch

    logprobs = one["logprobs"]
    old = one["behaviour"] if settings.get("old_policy") == "behaviour" else logprobs.detach()
    change = logprobs - old
    if kind["type"] == "cispo":
        weight = change.exp().detach().clamp(1 - kind["clip_low"], 1 + kind["clip_high"])
        return -weight * advantage * logprobs
    low, high = kind.get("clip_low", 0.2), kind.get("clip_high", 0.2)
    ratio = (change.mean().expand_as(change) if kind["type"] == "gspo" else change).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if "dual_limit" in kind and advantage < 0:
        gain = torch.maximum(gain, torch.tensor(kind["dual_limit"] * advantage))
    return -gain * _weight(settings.get("correction", WITHOUT), logprobs.detach() - one["behaviour"])


def _weight(correction, change):
    import torch

    if correction["type"] == "none":
        return 1.0
    whole = {"token": change, "sequence": change.sum(), "sequence_mean": change.mean()}[correction["level"]]
    ratio = whole.exp().expand_as(change)
    if correction["type"] == "truncate":
        return ratio.clamp(max=correction["limit"])
    return torch.where((ratio < correction["low"]) | (ratio > correction["high"]), 0.0, ratio)


def _preferences(kind, responses):
    import torch

    losses = []
    for winner in responses:
        for loser in responses:
            if winner["group"] == loser["group"] and winner["reward"] > loser["reward"]:
                gains = [(one["logprobs"] - one["reference"]).sum() for one in (winner, loser)]
                losses.append(-torch.nn.functional.logsigmoid(kind["beta"] * (gains[0] - gains[1])))
    return torch.stack(losses).mean()
