"""Wan image-to-video satisfies the contract and equals its official pipeline."""

import pytest
import torch
from PIL import Image

from flowalign.data.media_record import read_reference
from flowalign.types import Request
from flowalign.utils.media.media import Media
from pipelines.families.wan import WanI2V
from pipelines.parts.encoding import crop_reference
from tests.fixtures.families import PROMPTS, noise, picture_for, requests_for
from tests.fixtures.policy_contract import WanContract
from tests.fixtures.tiny_families import wan_fixture
from tests.fixtures.tiny_video import (
    assert_official_velocities,
    build_wan,
    build_wan_i2v,
    new_i2v,
    tiny_video,
)

pytestmark = pytest.mark.slow


class TestWanI2V(WanContract):
    """On the fixture `family`."""

    # conditions hold latents: what identifies the VAE identifies them, see below
    test_encoders_are_named_alike_in_every_load_and_apart_after_a_change = None
    test_the_name_of_encoders_depends_on_the_size_of_pictures = None


family = wan_fixture("wan_i2v", WanI2V, guided={"guidance": 3.0}, cases=[{}, {"guidance": 3.5}])


def test_a_network_without_features_of_the_picture_is_its_official_pipeline(tmp_path):
    """As those of Wan 2.2."""
    path = build_wan_i2v(tmp_path, image_dim=None, added_kv_proj_dim=None)
    policy = new_i2v(path, guidance=2.0)
    assert set(policy.encode(requests_for(policy, PROMPTS))) == {"text", "text_neg", "image"}
    assert_official_velocities(policy, PROMPTS, num_steps=3)


def test_features_of_the_picture_change_the_velocity(family):
    """17 tokens, a class and 4 x 4 patches; the condition on the first frame stays."""
    policy = family.new()
    x, sigma, cond = noise(policy), torch.tensor(0.6), policy.encode(requests_for(policy, PROMPTS))
    assert cond["clip"].shape == (2, 17, 8)
    with torch.no_grad():
        velocity = policy.velocity(x, sigma, cond)
        other = policy.velocity(x, sigma, {**cond, "clip": cond["clip"].flip(0)})
    assert (other - velocity).flatten(1).abs().amax(1).min() > 1e-3


@pytest.mark.parametrize("length", [24, 513])
def test_prompts_of_another_length_than_512_are_refused_where_pictures_have_tokens(
    family, tmp_path, length
):
    policy = tiny_video(WanI2V, family.path, max_sequence_length=length)
    for work in (policy.plan, lambda: policy.load(torch.device("cpu"))):
        with pytest.raises(ValueError, match=f"max_sequence_length is {length}; .*set it to 512"):
            work()
    plain = build_wan_i2v(tmp_path, image_dim=None, added_kv_proj_dim=None)
    unlimited = new_i2v(plain, max_sequence_length=length)
    assert unlimited.encode(requests_for(unlimited, PROMPTS))["text"].shape[1] == length


def test_conditions_have_a_row_for_every_prompt_and_are_made_once_for_each(family):
    policy, asked = family.new(guidance=2.0), []
    encode = policy.pipe.vae.encode
    policy.pipe.vae.encode = lambda *a, **k: asked.append(len(a[0])) or encode(*a, **k)
    cond = policy.encode(requests_for(policy, [PROMPTS[1], PROMPTS[0], PROMPTS[1]]))
    assert asked == [1, 1]
    assert {name: len(value) for name, value in cond.items()} == dict.fromkeys(cond, 3)
    alone = policy.encode(requests_for(policy, [PROMPTS[0]]))
    for name in ("image", "clip"):
        assert torch.equal(cond[name][0], cond[name][2])
        assert (cond[name][0] - cond[name][1]).abs().max() > 1e-3
        assert torch.equal(cond[name][1:2], alone[name])


def test_the_condition_says_which_frame_is_known_and_ends_with_its_latents(family):
    policy = family.new()
    image = policy.encode(requests_for(policy, PROMPTS[:1]))["image"]
    assert image.shape == (1, 4 + 16, 3, 4, 6)
    assert image[:, :4, 0].unique().tolist() == [1]
    assert image[:, :4, 1:].unique().tolist() == [0]
    frame = crop_reference(picture_for(PROMPTS[0]), 48 / 32)
    clip = torch.full((1, 9, 3, 32, 48), 0.5)
    clip[:, 0] = policy.pipe.video_processor.preprocess(frame, 32, 48) / 2 + 0.5
    torch.testing.assert_close(image[:, 4:], policy.embed(clip), atol=1e-5, rtol=1e-5)


def test_it_says_that_a_request_has_one_first_frame():
    one = picture_for("a")
    assert WanI2V.input_spec.misfit(Request("a", (one,))) == ""
    for given in ((), (one, one)):
        said = f"takes 1 first_frame references, and the request has {len(given)}"
        assert WanI2V.input_spec.misfit(Request("a", given)) == said


def test_a_picture_is_cut_to_the_proportions_of_the_video_and_not_squeezed(tmp_path):
    """12 x 4 at 1 : 1: columns 4 to 7; 4 x 12 at 2 : 1: rows 5 and 6."""
    wide = Image.new("RGB", (12, 4))
    for column in range(12):
        wide.paste((20 * column, 0, 0), (column, 0, column + 1, 4))
    wide.save(tmp_path / "wide.png")
    got = crop_reference(read_reference(Media(str(tmp_path / "wide.png"))), 1.0)
    assert got.size == (4, 4)
    assert [got.getpixel((x, 0))[0] for x in range(4)] == [80, 100, 120, 140]
    tall = wide.rotate(90, expand=True)
    tall.save(tmp_path / "tall.png")
    upright = crop_reference(read_reference(Media(str(tmp_path / "tall.png"))), 2.0)
    assert upright.size == (4, 2)
    assert upright.getpixel((1, 0))[0] == 20 * 6


def test_the_name_of_the_text_encoder_depends_on_the_vae_and_on_the_encoder_of_pictures(family):
    policy = family.new()
    media, text = policy.encoders()
    assert family.new().encoders() == (media, text)
    with torch.no_grad():
        next(policy.pipe.image_encoder.parameters()).flatten()[3] += 1e-3
    assert (policy.encoders()[0] == media, policy.encoders()[1] == text) == (True, False)
    text = policy.encoders()[1]
    with torch.no_grad():
        next(policy.pipe.vae.parameters()).flatten()[3] += 1e-3
    assert (policy.encoders()[0] == media, policy.encoders()[1] == text) == (False, False)


def test_a_text_to_video_folder_is_refused_by_name(tmp_path):
    path = build_wan(tmp_path)
    policy = tiny_video(WanI2V, path)
    with pytest.raises(ValueError, match="takes 16 channels, WanI2V provides 36"):
        policy.plan()
