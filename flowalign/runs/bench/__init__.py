"""Time the stages of a step, and the values of its states."""
