"""Faults in routing replay that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_ENGINE, _MODEL = ("tests/tasks/engine/vllm/test_routes.py",), ("tests/trainer_core/model/test_routes.py",)
_READING = ("tests/trainer_core/batches/test_reading.py",)
_KILLED = ("tests/faults/test_beside_the_policy.py",)
_ROUTES, _ROUTERS = "tasks/engine/vllm/routes.py", "trainer_core/model/routers.py"

ROUTES = (
    Mutant(
        "routes-of-the-next-request",
        "routes of a request are read after others have got its blocks",
        _ROUTES,
        "        self._kept |= self._rows(due)\n",
        "        self._kept |= self._rows({})\n",
        _ENGINE,
    ),
    Mutant(
        "routes-by-place-in-the-step",
        "routes are noted by the place of a token in its step, not by its slot",
        _ROUTES,
        "            at = slots[self._layer][: len(chosen)]\n",
        "            at = torch.arange(len(chosen), device=chosen.device)\n",
        _ENGINE,
    ),
    Mutant(
        "routes-are-kept-for-ever",
        "a worker keeps routes of requests that were taken before it heard of their end",
        _ROUTES,
        "        self._taken |= live.keys()\n",
        "",
        _ENGINE,
    ),
    Mutant(
        "routers-choose-themselves",
        "recorded experts do not reach the model",
        "trainer_core/model/passes.py",
        "if self.model.replay is None or sequences.routes is None:",
        "if self.model.replay is not None:",
        _MODEL,
    ),
    Mutant(
        "recomputed-with-other-experts",
        "a layer whose activations are computed again gets the experts of the micro-batch that began last",
        _ROUTERS,
        "        return self.again.popleft() if self.again else self._now\n",
        "        return self._now\n",
        _MODEL,
    ),
    Mutant(
        "routes-of-dense-layers",
        "the first layer with experts gets the first routes, also where earlier stages of the pipeline have some",
        _ROUTERS,
        "            yield layers.index(cast(int, router.layer_number)), given\n",
        "            yield 0, given\n",
        _MODEL,
    ),
    Mutant(
        "routes-of-the-first-share",
        "every rank that has a share of the positions gets the routes of the first share",
        _ROUTERS,
        "            routes = routes.chunk(group.size())[group.rank()]",
        "            routes = routes.chunk(group.size())[0]",
        _MODEL,
    ),
    Mutant(
        "one-expert-too-many",
        "an expert that the model does not have is accepted",
        "trainer_core/batches/routes.py",
        "        if largest >= self.experts:\n",
        "        if largest > self.experts:\n",
        _MODEL,
    ),
    Mutant(
        "routes-move-up",
        "routes of a sample that is not usable are those of the next one",
        "trainer_core/batches/reading.py",
        "    found[np.repeat(usable, positions)] = held.reshape(-1, width)\n",
        "    found[: len(held) // width] = held.reshape(-1, width)\n",
        _READING,
    ),
    Mutant(
        "routes-are-not-trained-on",
        "stored routes do not reach the trainer",
        "tasks/stages/training_set.py",
        "        context.config.train.experts.replay,\n",
        "        False,\n",
        _KILLED,
    ),
    Mutant(
        "routes-of-the-engine-are-lost",
        "a rollout stores its samples without the routes that the engine has told",
        "tasks/stages/rollout.py",
        "for name in completions.schema.names if name == ROUTES.name}",
        "for name in completions.schema.names if name == ROUTES}",
        _KILLED,
    ),
    Mutant(
        "selection-without-routes",
        "a retraining that replays routes is begun on samples without them",
        "tasks/stages/select.py",
        "    if config.train.experts.replay:\n",
        "    if False:\n",
        ("tests/flows/test_retraining_sources.py",),
    ),
    Mutant(
        "selected-routes-of-another-model",
        "a retraining that replays routes is begun on those of a model with other layers",
        "tasks/stages/select.py",
        "sorted(ranges.route_bytes - {own})",
        "sorted(ranges.route_bytes - {own, 16})",
        ("tests/flows/test_retraining_sources.py",),
    ),
    Mutant(
        "experts-of-a-reward-model",
        "settings of the policy's routers are taken where only a reward model learns, without effect",
        "trainer_core/config.py",
        "if self.policy.loss.trains_critic and (given :=",
        "if False and (given :=",
        ("tests/trainer_core/test_config.py",),
    ),
)
