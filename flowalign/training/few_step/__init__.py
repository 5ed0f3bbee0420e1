"""Distil a policy into a sampler of few steps, with or without rewards: TDM and TDM-R1."""

from flowalign.training.few_step.recipe import TDM
from flowalign.training.few_step.settings import Fake, Surrogate

__all__ = ["TDM", "Fake", "Surrogate"]
