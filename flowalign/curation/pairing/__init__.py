"""Chooses pairs to train on by the scores of media that answer one prompt."""
