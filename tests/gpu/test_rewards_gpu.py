"""Reward models on a GPU score as on the CPU, and give the memory back that they were lent."""

import pytest
import torch

from flowalign.types import MediaBatch
from reward_models import PickScore, TemporalFlicker, TrainedReward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PICKSCORE = {"model": "assets/golden/H_pickscore", "processor": "assets/golden/H_pickscore"}


def batch(frames=1):
    media = torch.rand(5, frames, 3, 40, 100, generator=torch.Generator().manual_seed(0))
    return MediaBatch(media, [f"{i} red circles" for i in range(5)])


@pytest.mark.parametrize(
    "make",
    [
        lambda device, **more: PickScore(**PICKSCORE, device=device, **more),
        lambda device, **more: TrainedReward("assets/shapes/preference", device=device, **more),
    ],
    ids=["pickscore", "trained"],
)
def test_scores_are_those_of_the_cpu(make):
    there, here = make("cuda", batch_size=2).score(batch()), make("cpu").score(batch())
    torch.testing.assert_close(there.values, here.values, atol=2e-3, rtol=1e-3)


def test_an_offloaded_model_leaves_the_gpu_after_each_call():
    model = PickScore(**PICKSCORE, device="cuda", offload=True)
    values = model.score(batch()).values
    assert next(model.network.parameters()).device.type == "cpu"
    torch.testing.assert_close(model.score(batch()).values, values)


def test_gradients_reach_pixels_on_the_cpu_through_a_network_on_the_gpu():
    media = batch(3).media.requires_grad_()
    PickScore(**PICKSCORE, device="cuda").score(
        MediaBatch(media, batch().prompts)
    ).values.sum().backward()
    assert media.grad is not None
    assert media.grad.abs().sum() > 0
    assert TemporalFlicker().score(batch(3)).valid.all()
