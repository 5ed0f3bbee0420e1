"""Distil a policy into a few-step sampler, with or without rewards (TDM and TDM-R1)."""

from flowalign.training.distillation.tdm_recipe import TDM
from flowalign.training.distillation.tdm_settings import Fake, RewardSurrogate

__all__ = ["TDM", "Fake", "RewardSurrogate"]
