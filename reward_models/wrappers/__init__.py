"""Contains reward models that wrap, train or serve other reward models."""
