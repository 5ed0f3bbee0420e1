"""Counted operations of network evaluations equal those of torch's counter."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flowalign.runs.config import load
from flowalign.types import encode_requests
from pipelines.network.estimates import evaluation_flops
from tests.fixtures.run_files import CONFIGS
from tests.fixtures.tiny_families import TINY

pytestmark = pytest.mark.slow
EXACT = "sd3", "sdxl", "flux1", "flux2", "qwen_image", "sana", "wan", "ltx", "hunyuan", "cogvideox"
"""Families of all kinds of blocks. Others differ by tokens that tiny models have in excess: glyphs
and image features of HunyuanVideo 1.5, sound of LTX-2, and times per token of first frames."""


@pytest.mark.parametrize("name", EXACT)
def test_operations_of_an_evaluation_equal_the_counter(name, tmp_path):
    build, new = TINY[name]
    policy = new(build(tmp_path / "model"))
    cond = encode_requests(policy, policy.text_encoder.probe_requests()[:1])
    x, sigma = policy.noise(1, torch.Generator().manual_seed(0)), policy.schedule(4)[1].expand(1)
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        policy.velocity(x, sigma, cond)
    tokens = policy.num_tokens(policy.latent_shape, policy.folder.config(policy.denoiser_name))
    text = policy.max_sequence_length + policy.extra_text_tokens
    denoiser = policy.denoiser.to("meta")
    found = evaluation_flops(denoiser, policy.latent_shape, tokens, text)
    assert found * policy.evaluations_per_velocity == counted.get_total_flops()


RECORDED = json.loads((Path("assets/bench/full_size.json")).read_text())


@pytest.mark.parametrize("model", ["sd35_medium", "flux1_dev"])
def test_operations_of_published_models_are_those_of_the_simulated_gpu(model):
    plan = load(str(CONFIGS / f"models/{model}.yaml"))[0].policy.plan()
    assert plan.evaluation_flops() == pytest.approx(RECORDED[model]["flops"], rel=0.05)
    assert plan.decode_flops() > 0
