"""Contains rewards that a chat model served elsewhere gives."""
