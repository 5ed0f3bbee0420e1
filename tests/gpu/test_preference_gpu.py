"""Preference training on a GPU: every loss makes the update that it makes on the CPU."""

import pytest
import torch

from flowalign.distributed.processes import Processes
from tests.fixtures.matching_losses import LOSSES
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.preference import pairs, recipe, train
from tests.fixtures.training import flat, new_learner

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GRIDLESS = {
    name: loss
    for name, loss in LOSSES.items()
    if loss.needs <= {"reference", "desirable", "scores"}
}
"""A latent of one pixel has no frames to label and no places to mask."""


def updated(loss, device: torch.device) -> torch.Tensor:
    """The trained parameters after two updates, on the CPU."""
    policy = PixelPolicy()
    policy.load(device)
    learner = new_learner(policy, Processes(0, 1, device))
    text = torch.linspace(-1, 1, 24)
    train(recipe(loss=loss, micro_batch=12), learner, pairs(scores={"text": text}), steps=2)
    return flat(policy.denoiser).cpu()


@pytest.mark.parametrize("loss", GRIDLESS.values(), ids=GRIDLESS)
def test_every_loss_makes_the_update_of_the_cpu(loss):
    there, here = updated(loss, DEVICE), updated(loss, torch.device("cpu"))
    torch.testing.assert_close(there, here, atol=2e-3, rtol=1e-3)
