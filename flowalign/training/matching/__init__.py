"""Training on preferences: pairs, labels and scores instead of rollouts with credit."""
