"""Two processes that divide the tokens of a network compute the same as one process."""

from functools import partial

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from flowalign.distributed.processes import join
from pipelines.families.wan import Wan, Wan22, Wan22I2V, WanTI2V
from pipelines.network.weights import ATTENTION, Lora
from tests.fixtures.embedded import move
from tests.fixtures.families import requests_for
from tests.fixtures.ranks import on_ranks
from tests.fixtures.tiny_families import TINY
from tests.fixtures.tiny_video import (
    build_wan,
    build_wan22,
    build_wan22_5b,
    build_wan22_i2v,
    build_wan_i2v,
    new_i2v,
    new_video,
)

pytestmark = pytest.mark.slow
EVERYWHERE = Lora(
    rank=3,
    alpha=7,
    target_modules=(*ATTENTION, "ffn.net.2", "proj_out", "time_embedder.linear_1", "time_proj"),
)
"""Layers of blocks, and layers before the tokens are split and where they are gathered."""
KINDS = {
    "Wan": (build_wan, partial(new_video, Wan, guidance=2.0)),
    "Wan of two networks": (build_wan22, partial(new_video, Wan22)),
    "Wan of a first frame": (build_wan_i2v, new_i2v),
    "Wan of two networks and a first frame": (build_wan22_i2v, partial(new_video, Wan22I2V)),
    "Wan that recomputes activations": (
        build_wan,
        partial(new_video, Wan, gradient_checkpointing=True),
    ),
    "Wan with a time per token": (build_wan22_5b, partial(new_video, WanTI2V, height=64, width=64)),
}


IMAGES = "flux1", "flux1_kontext", "flux1_fill", "flux2", "flux2_klein", "qwen_image"
IMAGES += ("qwen_image_edit",)
"""Families of images whose networks have a plan."""


def _tiny(name, path, lora):
    return TINY[name][1](path)


KINDS |= {name: (TINY[name][0], partial(_tiny, name)) for name in IMAGES}


def _compute_each(processes, folders):
    """What each kind of network computes while two processes divide its tokens."""
    together = join("cpu", 2)
    return {kind: _computed(KINDS[kind][1], folder, together) for kind, folder in folders.items()}


def _compute_divided(processes, new, folder):
    return _computed(new, folder, join("cpu", 2))


def _computed(new, folder, together=None):
    """A velocity, and gradients to the adapter and to a state, of a loss that weighs all tokens."""
    policy = new(path=folder, lora=EVERYWHERE)
    move(policy)
    if together:
        policy.network.divide_context(together.context.mesh, together.scheduler.wait_for_group)
    cond = policy.encode(requests_for(policy, ["a red ball", "two cats on a sofa"]))
    x = policy.noise(2, torch.Generator().manual_seed(1)).requires_grad_()
    sigma = torch.tensor([0.95, 0.2])
    once = x - 0.3 * policy.velocity(x, sigma, cond)
    v = policy.velocity(once, sigma, cond)  # its gradient goes on through the first evaluation
    weight = torch.randn(v.shape, generator=torch.Generator().manual_seed(2))
    (weight * v).mean().backward()
    grads = {n: p.grad for n, p in policy.denoiser.named_parameters() if p.requires_grad}
    return v.detach(), {n: g for n, g in grads.items() if g is not None}, x.grad


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {kind: build(root / str(k)) for k, (kind, (build, _)) in enumerate(KINDS.items())}


@pytest.fixture(scope="module")
def divided(folders, tmp_path_factory):
    return on_ranks(_compute_each, 2, tmp_path_factory.mktemp("ranks"), folders)


@pytest.mark.parametrize("kind", KINDS)
def test_divided_tokens_give_the_velocity_and_the_gradients_of_whole_ones(folders, divided, kind):
    v, grads, gradient = _computed(KINDS[kind][1], folders[kind])
    ranks = [found[kind] for found in divided]
    assert len(grads) >= 12
    for ours, _, to_state in ranks:
        torch.testing.assert_close(ours, v, atol=1e-5, rtol=0)
        torch.testing.assert_close(to_state, gradient, atol=1e-6, rtol=1e-4)
    whole = []
    for name, g in grads.items():
        parts = [found[name] for _, found, _ in ranks]
        torch.testing.assert_close(sum(parts), g, atol=1e-6, rtol=1e-4, msg=name)
        whole += [name] if (parts[0] - g).abs().max() <= 1e-3 * g.abs().max() else []
    assert len(whole) < len(grads), "one process has it all, except short texts"


@pytest.mark.parametrize("name", ["ltx", "ltx2"])
def test_plans_of_ltx_fail_in_diffusers(tmp_path, name):
    """Masks (LTX-Video) and positions (LTX-2) keep all heads; else remove their refusals."""
    folder = TINY[name][0](tmp_path / "model")
    with pytest.raises(ProcessRaisedException, match=r"size of tensor a \(2\) must match .*\(4\)"):
        on_ranks(_compute_divided, 2, tmp_path / "2", partial(_tiny, name), folder)
