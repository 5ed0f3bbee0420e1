"""Pairs to train on, chosen by the scores of media that answer one prompt."""
