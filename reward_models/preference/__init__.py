"""Contains reward models that were trained on human preferences."""
