"""Train a policy with a learned reward, and refresh the reward head on the policy's rollouts."""
