"""Wan 2.2 image-to-video is its official pipeline, with two networks and with one (5B)."""

from functools import partial

import pytest
import torch

from pipelines.families.wan import Experts, Wan22I2V, WanI2V, WanTI2V
from tests.fixtures.embedded import move
from tests.fixtures.families import (
    PROMPTS,
    assert_official,
    assert_one_time_per_row,
    noise,
    requests_for,
)
from tests.fixtures.policy_contract import WanContract
from tests.fixtures.tiny_families import wan_fixture
from tests.fixtures.tiny_video import (
    assert_official_velocities,
    build_wan22_5b,
    build_wan22_i2v,
    build_wan_i2v,
    new_video,
    official_wan_steps,
    tiny_video,
)

pytestmark = pytest.mark.slow


class TestWanTI2V(WanContract):
    """On the fixture `family`."""

    # conditions hold latents: what identifies the VAE identifies them
    test_encoders_are_named_alike_in_every_load_and_apart_after_a_change = None
    test_the_name_of_encoders_depends_on_the_size_of_pictures = None

    def test_each_step_is_taken_with_the_velocity_of_the_official_pipeline(self, family):
        """The first frame is excluded: the pipeline does not show its state to the network."""
        policy = family.new(guidance=3.5)
        move(policy)
        for prompt in PROMPTS:
            seen = official_wan_steps(policy, [prompt], noise(policy, 1), 4)
            sigmas, cond = policy.schedule(4), policy.encode(requests_for(policy, [prompt]))
            for k, step in enumerate(seen):
                with torch.no_grad():
                    velocity = policy.velocity(step["sample"], sigmas[k], cond)
                found, wanted = velocity[:, :, 1:], step["prediction"][:, :, 1:]
                torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


family = wan_fixture(
    (build_wan22_5b, partial(new_video, WanTI2V, width=64)),
    WanTI2V,
    guided={"guidance": 3.5},
    cases=[{}, {"guidance": 3.5}],
)
"""5B."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """14B."""
    return build_wan22_i2v(tmp_path_factory.mktemp("14b"))


def new_14b(folder, **changes) -> Wan22I2V:
    experts = {"guidance": 3.5, "experts": Experts(guidance_2=2.0)}
    return new_video(Wan22I2V, folder, **experts | changes)


@pytest.mark.parametrize("guidance", [1.0, 3.5], ids=["plain", "guided"])
def test_velocities_and_clips_of_two_networks_are_those_of_the_official_pipeline(
    family, folder, guidance
):
    policy = new_14b(folder, guidance=guidance)
    move(policy)
    assert_official_velocities(policy, PROMPTS, num_steps=5)
    high = policy.schedule(5)[:-1] >= policy.denoiser.boundary / 1000
    assert high.tolist() == [True, True, True, True, False]
    assert_official(family, policy, num_steps=5)


def test_rows_of_two_networks_do_not_see_each_other(folder):
    assert_one_time_per_row(new_14b(folder), PROMPTS)


@pytest.mark.parametrize("train", ["both", "high", "low"])
def test_adapters_of_what_is_trained_come_back_exactly(folder, tmp_path, train):
    policy = new_14b(folder, experts=Experts(train=train))
    move(policy)
    policy.save_weights(str(tmp_path))
    assert policy.verify_weights(str(tmp_path)) == 0.0
    plan = policy.plan()
    trainable = sum(p.numel() for p in policy.denoiser.parameters() if p.requires_grad)
    assert (plan.trainable, plan.networks) == (trainable, 2)


def test_conditions_are_made_once_for_each_picture(family):
    policy, asked = family.new(), []
    encode = policy.pipe.vae.encode
    policy.pipe.vae.encode = lambda *a, **k: asked.append(tuple(a[0].shape)) or encode(*a, **k)
    cond = policy.encode(requests_for(policy, [PROMPTS[1], PROMPTS[0], PROMPTS[1]]))
    assert asked == [(1, 3, 1, 32, 64)] * 2
    assert torch.equal(cond["first"][0], cond["first"][2])
    assert (cond["first"][0] - cond["first"][1]).abs().max() > 1e-3


def test_folders_of_the_other_kinds_are_refused_by_the_name_of_their_policy(
    family, folder, tmp_path
):
    old = build_wan_i2v(tmp_path)
    wrong = [
        (WanTI2V, old, "no expand_timesteps.*pipelines.WanI2V"),
        (WanI2V, family.path, "pipelines.WanTI2V"),
        (WanI2V, folder, "has 2 network.*pipelines.Wan22I2V"),
        (Wan22I2V, old, "has 1 network"),
    ]
    for cls, path, reason in wrong:
        with pytest.raises(ValueError, match=f"(?s){reason}") as caught:
            tiny_video(cls, path, width=64, max_sequence_length=512).plan()
        assert len(str(caught.value).splitlines()) <= 5
