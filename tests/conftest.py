"""One thread: the suite must give the same numbers on every machine, and its tensors are tiny."""

import gc

import torch

torch.set_num_threads(1)
gc.disable()


def pytest_collection_finish(session):
    """What was imported is no garbage: looking through it again and again takes a tenth of all."""
    gc.enable()
    gc.freeze()


def pytest_unconfigure(config):
    gc.unfreeze()
