"""Train a policy by a learned reward whose head is refreshed on the policy's own rollouts."""

from flowalign.training.online_reward.recipe import OnlineReward

__all__ = ["OnlineReward"]
