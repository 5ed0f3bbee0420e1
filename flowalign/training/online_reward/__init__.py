"""Train a policy with a learned reward, and refresh the reward head on the policy's rollouts."""

from flowalign.training.online_reward.online_reward_recipe import OnlineReward

__all__ = ["OnlineReward"]
