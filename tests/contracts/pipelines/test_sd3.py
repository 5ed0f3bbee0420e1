"""Properties of SD3: classifier-free guidance, three text encoders, recorded numbers."""

import json

import pytest
import torch
from safetensors.torch import load_file

from flowalign.functional.transition import FlowSDE
from flowalign.types import Batch, Fields
from tests.fixtures.embedded import new_sd3
from tests.fixtures.families import (
    GOLDEN,
    SD3_FAMILY,
    TINY_SD3,
    assert_official,
    noise,
    ours,
    requests_for,
)

pytestmark = pytest.mark.slow

PROMPTS = SD3_FAMILY.prompts


@pytest.mark.parametrize("guidance", [1.0, 4.5], ids=["plain", "guided"])
def test_a_network_of_random_weights_is_that_of_the_official_pipeline(guidance):
    policy = new_sd3(**TINY_SD3, guidance=guidance)
    assert_official(SD3_FAMILY, policy, SD3_FAMILY.other_prompts)


def test_latents_are_those_recorded_from_the_reference_pipeline():
    recorded = load_file(GOLDEN / "I_sd3.safetensors")
    about = json.loads((GOLDEN / "I_sd3.json").read_text())["values"]
    policy = new_sd3(**TINY_SD3, guidance=1.0)
    x = policy.noise(2, torch.Generator().manual_seed(about["generator_seed"]))
    torch.testing.assert_close(x, recorded["nocfg.net_in0"])
    sigmas = policy.schedule(about["steps"])
    torch.testing.assert_close(sigmas, recorded["nocfg.sigmas"], atol=1e-6, rtol=0)
    cond = policy.encode(requests_for(policy, about["prompts"]))
    with torch.no_grad():
        first = policy.velocity(x, sigmas[0], cond)
    torch.testing.assert_close(first, recorded["nocfg.net_out0"], atol=2e-4, rtol=2e-4)
    final = ours(policy, about["prompts"], x, about["steps"])
    tolerance = 2e-4 * float(recorded["nocfg.final"].abs().max())
    torch.testing.assert_close(final, recorded["nocfg.final"], atol=tolerance, rtol=0)


def test_a_transition_replayed_from_a_minibatch_uses_the_guided_velocity():
    policy = new_sd3(guidance=2.5)
    cond, x = policy.encode(requests_for(policy, PROMPTS)), noise(policy)
    sigmas = policy.schedule(4)
    eta = torch.tensor([0.5, 0.5])
    batch = Batch({"k": torch.tensor([2, 2]), "x": x, "eta": eta, "cond": cond})
    fields = Fields(policy, policy, FlowSDE(), sigmas)
    got = fields.transition(policy, batch).mean
    other = fields.transition(policy, batch.with_columns(k=torch.tensor([1, 1]))).mean
    v, s, t = policy.velocity(x, sigmas[2], cond), sigmas[2], sigmas[3]
    c1 = t - 0.25 * s / (1 - s) * (s - t) / (2 * s)
    torch.testing.assert_close(got, (1 - t) * (x - s * v) + c1 * (x + (1 - s) * v))
    assert (got - other).abs().max() > 1e-3


@pytest.mark.parametrize("size", [{"width": 72}, {"height": 80}])
def test_a_size_beyond_the_position_embeddings_is_refused_without_weights(size):
    with pytest.raises(ValueError, match="reach 64 pixels: make both sides at most 64"):
        new_sd3(**size)
    assert new_sd3(width=64).latent_shape[2] == 16
