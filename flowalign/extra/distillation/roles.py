"""Open the roles of TDM-R1 on one network: generator, fake score, surrogate reward, reference."""

from dataclasses import dataclass

from flowalign.extra.distillation.tdm_settings import TDMSettings
from flowalign.training.ema import EMA
from flowalign.training.learner import Learner
from flowalign.training.reference import guide
from flowalign.training.trained_weights import TrainedWeights
from flowalign.types import VelocityField

SLOW = "slow"


@dataclass(frozen=True)
class Roles:
    """Learners that share one network, with all velocity fields.

    The reference is the network without any trained weights.
    """

    generator: Learner
    """Learner of the policy, which is the few-step generator."""
    fake: Learner
    """Learner of the fake score."""
    surrogate: Learner | None
    """Learner of the surrogate reward, or None."""
    fields: dict[str, VelocityField]
    """Velocity fields by name: reference, real (the guided reference), fake, surrogate,
    guided_surrogate and slow (the slow copy of the surrogate)."""

    @property
    def trained(self) -> dict[str, Learner]:
        """Return the learners by role."""
        trained = {"generator": self.generator, "fake": self.fake}
        return trained | ({"surrogate": self.surrogate} if self.surrogate else {})


def open_roles(cfg: TDMSettings, learner: Learner, num_steps: int) -> Roles:
    """Add the learners of the fake score and the surrogate, which start as the initial model.

    Raises:
        ValueError: The reference needs guidance but the policy has none.
    """
    fake = learner.add_companion("fake", cfg.fake.optimizer, num_steps * cfg.fake.updates)
    fields = {
        "reference": learner.reference,
        "real": guide(learner.reference, learner.policy, cfg.real_guidance),
        "fake": fake.field,
    }
    if cfg.surrogate is None:
        return Roles(learner, fake, None, fields)
    surrogate = learner.add_companion("surrogate", cfg.surrogate.optimizer, num_steps)
    slow = EMA(surrogate.parameters, cfg.surrogate.slow.at)
    surrogate.averages[SLOW] = slow
    fields |= {
        "surrogate": surrogate.field,
        "guided_surrogate": guide(surrogate.field, learner.policy, cfg.real_guidance),
        "slow": TrainedWeights(
            learner.policy, dict(zip(surrogate.named, slow.average, strict=True))
        ),
    }
    return Roles(learner, fake, surrogate, fields)
