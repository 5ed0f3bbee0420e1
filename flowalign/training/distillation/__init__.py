"""Distil a policy into a sampler of few steps, with or without rewards: TDM and TDM-R1."""

from flowalign.training.distillation.recipe import TDM
from flowalign.training.distillation.settings import Fake, RewardSurrogate

__all__ = ["TDM", "Fake", "RewardSurrogate"]
