"""Wan 2.2 image-to-video is its official pipeline, with two networks and with one (5B)."""

from functools import partial

import pytest
import torch

from pipelines.families.wan import Wan22I2V, WanI2V, WanTI2V
from pipelines.families.wan_experts import Experts
from tests.fixtures.embedded import move
from tests.fixtures.families import (
    Family,
    assert_independent_of_the_batch,
    assert_one_time_per_row,
    noise,
    requests_for,
    without_gradient,
)
from tests.fixtures.policy_contract import WanContract
from tests.fixtures.tiny_video import (
    PROMPTS,
    assert_official_film,
    assert_official_velocities,
    build_wan22_5b,
    build_wan22_i2v,
    build_wan_i2v,
    new_video,
    steps_of,
    tiny_video,
    video_family,
)

pytestmark = pytest.mark.slow


class TestWanTI2V(WanContract):
    """On the fixture `family`."""

    # conditions hold latents: what identifies the VAE identifies them
    test_encoders_are_named_alike_in_every_load_and_apart_after_a_change = None
    test_the_name_of_encoders_depends_on_the_size_of_pictures = None


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("wan22_i2v")
    return {
        "5b": build_wan22_5b(root / "5b"),
        "other": build_wan22_5b(root / "other", num_layers=3),
        "14b": build_wan22_i2v(root / "14b"),
    }


@pytest.fixture
def family(folders) -> Family:
    new = partial(new_video, WanTI2V, width=64)
    return video_family(WanTI2V, new, folders["5b"], folders["other"])


def new_5b(folders, **changes) -> WanTI2V:
    return new_video(WanTI2V, folders["5b"], width=64, **changes)


def new_14b(folders, **changes) -> Wan22I2V:
    experts = {"guidance": 3.5, "experts": Experts(guidance_2=2.0)}
    return new_video(Wan22I2V, folders["14b"], **experts | changes)


@pytest.mark.parametrize("guidance", [1.0, 3.5], ids=["plain", "guided"])
def test_clips_of_one_network_are_those_of_the_official_pipeline(folders, guidance):
    policy = new_5b(folders, guidance=guidance)
    move(policy)
    assert_official_film(policy, PROMPTS)


def test_velocities_of_one_network_are_those_of_the_official_pipeline(folders):
    """The first frame is excluded, because the pipeline does not show its state to the network."""
    policy = new_5b(folders, guidance=3.5)
    move(policy)
    for prompt in PROMPTS:
        seen = steps_of(policy, [prompt], noise(policy, 1), 4)
        sigmas, cond = policy.schedule(4), policy.encode(requests_for(policy, [prompt]))
        for k, (state, _, answer) in enumerate(seen):
            with torch.no_grad():
                velocity = policy.velocity(state, sigmas[k], cond)
            torch.testing.assert_close(velocity[:, :, 1:], answer[:, :, 1:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("guidance", [1.0, 3.5], ids=["plain", "guided"])
def test_velocities_and_clips_of_two_networks_are_those_of_the_official_pipeline(folders, guidance):
    policy = new_14b(folders, guidance=guidance)
    move(policy)
    for prompt in PROMPTS:
        assert_official_velocities(policy, [prompt], num_steps=5)
    assert (policy.schedule(5)[:-1] >= policy.denoiser.boundary / 1000).tolist() == [
        *[True] * 4,
        False,
    ]
    assert_official_film(policy, PROMPTS, num_steps=5)


def test_rows_of_two_networks_do_not_see_each_other(folders):
    policy = new_14b(folders)
    assert_one_time_per_row(policy, PROMPTS)
    assert_independent_of_the_batch(policy, [*PROMPTS, "a white circle"])


@pytest.mark.parametrize("train", ["both", "high", "low"])
def test_adapters_of_what_is_trained_come_back_exactly(folders, tmp_path, train):
    policy = new_14b(folders, experts=Experts(train=train))
    move(policy)
    policy.save_weights(str(tmp_path))
    assert policy.verify_weights(str(tmp_path)) == 0.0
    plan = policy.plan()
    trainable = sum(p.numel() for p in policy.denoiser.parameters() if p.requires_grad)
    assert (plan.trainable, plan.networks) == (trainable, 2)


def test_every_adapter_of_one_network_gets_a_gradient(folders):
    assert without_gradient(new_5b(folders), PROMPTS) == set()


def test_conditions_are_made_once_for_each_picture(folders):
    policy, asked = new_5b(folders), []
    encode = policy.pipe.vae.encode
    policy.pipe.vae.encode = lambda *a, **k: asked.append(tuple(a[0].shape)) or encode(*a, **k)
    cond = policy.encode(requests_for(policy, [PROMPTS[1], PROMPTS[0], PROMPTS[1]]))
    assert asked == [(1, 3, 1, 32, 64)] * 2
    assert torch.equal(cond["first"][0], cond["first"][2])
    assert (cond["first"][0] - cond["first"][1]).abs().max() > 1e-3


def test_folders_of_the_other_kinds_are_refused_by_the_name_of_their_policy(folders, tmp_path):
    old = build_wan_i2v(tmp_path)
    wrong = [
        (WanTI2V, old, "no expand_timesteps.*pipelines.WanI2V"),
        (WanI2V, folders["5b"], "pipelines.WanTI2V"),
        (WanI2V, folders["14b"], "has 2 network.*pipelines.Wan22I2V"),
        (Wan22I2V, old, "has 1 network"),
    ]
    for cls, path, reason in wrong:
        with pytest.raises(ValueError, match=f"(?s){reason}") as caught:
            tiny_video(cls, path, width=64, max_sequence_length=512).plan()
        assert len(str(caught.value).splitlines()) <= 5
