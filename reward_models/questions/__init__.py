"""Contains rewards from the answers of a vision-language model to questions."""
