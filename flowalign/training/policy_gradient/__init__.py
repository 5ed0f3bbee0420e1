"""Train with policy gradients, with rewards credited to denoising steps (the GRPO family)."""

from flowalign.training.policy_gradient.policy_gradient_recipe import PolicyGradient

__all__ = ["PolicyGradient"]
