"""Devices of reward models."""

from functools import partial

import pytest
import torch

from reward_models import EfficientNetLite0, PickScore, QwenYesNo, TransformersDetector
from reward_models.backbones.reward_bases import choose_device, require_device

MODELS = [PickScore, EfficientNetLite0, partial(QwenYesNo, "x"), partial(TransformersDetector, "x")]


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:one", "meta"])
@pytest.mark.parametrize("model", MODELS)
def test_an_unknown_device_is_refused_with_the_known_ones(model, device):
    with pytest.raises(ValueError, match=f"device is '{device}'; it must be auto, cpu, cuda"):
        model(device=device)


def test_auto_is_the_gpu_if_there_is_one(monkeypatch):
    for found in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=found: found)
        assert choose_device("auto") == torch.device("cuda" if found else "cpu")


@pytest.mark.parametrize(
    ("device", "count", "fits"), [("cuda", 0, 0), ("cuda:1", 1, 0), ("cuda:1", 2, 1)]
)
def test_a_missing_gpu_is_reported_before_weights_are_read(monkeypatch, device, count, fits):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if fits:
        require_device(choose_device(device))
        return
    with pytest.raises(ValueError, match=f"{device}, but this machine has {count} CUDA GPUs"):
        PickScore(device=device).load()
