"""Sample the model of a run file, steered by its rewards or not."""
