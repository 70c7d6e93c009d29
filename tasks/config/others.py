"""Models of a run beside the one that is trained: a teacher, a judge, and what a critic begins with."""

from collections.abc import Mapping
from typing import Literal

from tasks.config.model import ModelSection
from tasks.config.run import RunConfig

Other = Literal["teacher", "judge", "critic"]

KEYS: Mapping[Other, str] = {
    "teacher": "train.policy.distill.teacher",
    "judge": "engines.judge.source",
    "critic": "train.critic.source",
}
"""Settings that name such models, as model.source does the model."""


def other_model(config: RunConfig, kind: Other) -> ModelSection | None:
    """The model of this kind, found and fetched as the run's; None without one (a critic may begin with the policy)."""
    distill, engines, critic = config.train.policy.distill, config.engines, config.train.critic
    sources = {
        "teacher": distill and distill.teacher,
        "judge": engines and engines.judge.source,
        "critic": critic and critic.source,
    }
    if (source := sources[kind]) is None:
        return None
    return ModelSection(source=source, **{name: dict(config.model)[name] for name in ("download", "token", "accept")})
