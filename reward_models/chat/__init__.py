"""Contains rewards that a served chat model computes."""
