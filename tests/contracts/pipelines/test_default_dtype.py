"""A policy computes the same while a reward that loads its model sets another default dtype."""

import pytest
import torch

from tests.fixtures.families import noise, requests_for
from tests.fixtures.tiny_families import TINY


def outputs(policy, requests):
    x, sigmas, cond = noise(policy), policy.schedule(4), policy.encode(requests)
    with torch.no_grad():
        velocity, media = policy.velocity(x, sigmas[1], cond), policy.decode(x)
    return {"noise": x, "sigmas": sigmas, "velocity": velocity, "media": media} | cond


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_another_default_dtype_changes_no_number(name, tmp_path):
    build, new = TINY[name]
    policy = new(build(tmp_path), precision="fp32")
    requests = requests_for(policy, ["a red ball", "two cats on a sofa"])
    plain = outputs(policy, requests)
    torch.set_default_dtype(torch.float16)
    try:
        beside = outputs(policy, requests)
    finally:
        torch.set_default_dtype(torch.float32)
    for key, value in plain.items():
        assert beside[key].dtype == value.dtype, key
        assert torch.equal(beside[key], value), key
