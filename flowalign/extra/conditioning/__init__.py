"""Condition prompts on reward levels or reward words."""
