"""LTX-2 satisfies the contract of policies; its sound, its state and its guidances are its own."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from flowalign.training.reference import conditional
from flowalign.types import plain_requests
from pipelines.families.ltx2 import LTX2
from pipelines.families.ltx2_guidance import BlockGradient, Streams
from tests.fixtures.clips import assert_windows, clips
from tests.fixtures.embedded import move
from tests.fixtures.families import assert_official, noise, ours
from tests.fixtures.policy_contract import ClipContract
from tests.fixtures.tiny_families import family_fixture
from tests.fixtures.tiny_ltx2 import call_ltx2, official_ltx2
from tests.fixtures.tiny_video_others import of_clips

pytestmark = pytest.mark.slow
PROMPTS = ("a red ball rolls", "two cats on a sofa")
ALL = Streams(audio_guidance=4.0, perturbed=1.5, perturbed_blocks=(1,), modality=2.0, rescale=0.7)
"""Every guidance, of different weights."""


class TestLTX2(ClipContract):
    """On the fixture `family`."""

    # denoised with sound, by several guidances: see below
    test_clips_of_any_guidance_are_those_of_the_official_pipeline = None
    test_each_step_is_taken_with_the_velocity_of_the_official_pipeline = None
    # text passes connectors, whose weights identify it as well: see below
    test_encoders_are_named_alike_in_every_load_and_apart_after_a_change = None


family = family_fixture(
    "ltx2",
    partial(of_clips, LTX2),
    official_ltx2,
    {"num_layers": 3},
    query="attn1.to_q",
    seeded=False,  # sound as well, see below
    guided={"guidance": 3.0, "streams": ALL},
    frames=[(8, 7, 9)],
)


def sound_of(policy, x):
    """Waveforms of clean states, [n, channels, amplitudes]."""
    return torch.stack([one.waveform for one in policy.sound_decoder.decode_sound(x)])


STREAMS = {
    "nothing": (1.0, Streams(audio_guidance=None, perturbed=0.0, modality=1.0, rescale=0.0), 1),
    "negative": (3.0, Streams(audio_guidance=None, perturbed=0.0, modality=1.0), 2),
    "perturbed": (1.0, Streams(audio_guidance=1.0, perturbed_blocks=(0,), modality=1.0), 2),
    "isolated": (1.0, Streams(audio_guidance=None, perturbed=0.0, modality=3.0, rescale=0.0), 2),
    "audio alone": (1.0, Streams(audio_guidance=4.0, perturbed=0.0, modality=1.0), 2),
    "all": (3.0, ALL, 4),
}


@pytest.mark.parametrize("name", STREAMS)
def test_clips_and_sound_are_those_of_the_official_pipeline(family, name):
    guidance, streams, evaluations = STREAMS[name]
    policy, counted = family.new(guidance=guidance, streams=streams), []
    assert policy.evaluations_per_velocity == evaluations
    move(policy)
    handle = policy.denoiser.register_forward_pre_hook(lambda *_: counted.append(1))
    policy.velocity(noise(policy), torch.tensor(0.5), policy.encode(plain_requests(PROMPTS)))
    handle.remove()
    assert len(counted) == evaluations
    assert_official(family, policy)


@pytest.mark.parametrize("name", ["negative", "all"])
def test_the_conditional_model_is_that_without_any_guidance(family, name):
    guidance, streams, _ = STREAMS[name]
    policy, plain = family.new(guidance=guidance, streams=streams), family.new()
    cond, x, sigma = policy.encode(plain_requests(PROMPTS)), noise(policy), torch.tensor(0.6)
    with torch.no_grad():
        found = conditional(policy).velocity(x, sigma, cond)
        assert torch.equal(found, plain.velocity(x, sigma, cond))
        assert not torch.equal(found, policy.velocity(x, sigma, cond))


def test_sound_is_that_of_the_official_pipeline(family):
    policy = family.new(guidance=3.0, streams=ALL)
    x = noise(policy)
    sound = sound_of(policy, ours(policy, PROMPTS, x, 3))
    theirs = call_ltx2(policy, PROMPTS, x, 3, "pt").audio
    assert sound.shape == theirs.shape
    assert sound.std() > 1e-4
    torch.testing.assert_close(sound, theirs, atol=1e-5, rtol=1e-4)


def test_a_seed_draws_the_noise_of_both_that_it_draws_in_the_official_pipeline(family):
    policy = family.new()
    made = policy.pipe(
        list(PROMPTS),
        height=32,
        width=64,
        num_frames=5,
        frame_rate=12.0,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(5),
        guidance_scale=1.0,
        stg_scale=0.0,
        modality_scale=1.0,
        guidance_rescale=0.0,
        audio_guidance_scale=1.0,
        audio_stg_scale=0.0,
        audio_modality_scale=1.0,
        audio_guidance_rescale=0.0,
        max_sequence_length=32,
        output_type="np",
    )
    mine = ours(policy, PROMPTS, noise(policy), 2)
    frames = torch.from_numpy(made.frames).movedim(-1, 2)
    torch.testing.assert_close(policy.decode(mine), frames, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(sound_of(policy, mine), made.audio, atol=1e-5, rtol=1e-4)


def test_a_state_is_the_video_and_then_five_twelfths_of_a_second_of_audio(family):
    """5 frames at 12 a second are .4167 s, at 25 latents a second 10; 3 x 2 x 4 of 4 channels."""
    policy = family.new()
    x = noise(policy)
    assert x.shape == (2, 4 * 3 * 2 * 4 + 2 * 10 * 2)
    video, audio = policy.state_parts.split(x)
    assert (video.shape, audio.shape) == ((2, 4, 3, 2, 4), (2, 2, 10, 2))
    assert torch.equal(torch.cat([video.flatten(1), audio.flatten(1)], 1), x)
    with torch.no_grad():
        louder = x.clone()
        louder[:, 96:] *= 2
        sigma, cond = torch.tensor(0.6), policy.encode(plain_requests(PROMPTS))
        change = policy.velocity(louder, sigma, cond) - policy.velocity(x, sigma, cond)
    assert change[:, :96].abs().max() > 1e-4  # the video hears the audio
    assert torch.equal(policy.decode(louder), policy.decode(x))
    assert not torch.equal(sound_of(policy, louder), sound_of(policy, x))


PLAIN = STREAMS["nothing"][1]


def test_the_gradient_of_audio_is_scaled_where_video_attends_to_it(family):
    """Velocities stay equal to the bit; without a gradient in any block, video ignores audio."""
    gradients, values = [], []
    for scale in (1.0, 0.5, 0.0):
        part = BlockGradient(start=0.0, stop=1.0, scale=scale)
        policy = family.new(streams=replace(PLAIN, audio_gradient=(part,)))
        x, cond = noise(policy).requires_grad_(), policy.encode(plain_requests(PROMPTS))
        v = policy.velocity(x, torch.tensor(0.6), cond)
        gradients.append(torch.autograd.grad(v[:, :96].sum(), x)[0][:, 96:])
        values.append(v.detach())
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[2])
    full, half, none = gradients
    assert full.abs().max() > 1e-4
    assert none.abs().max() == 0
    assert 0 < half.norm() < full.norm()
    with pytest.raises(ValueError, match="need start < stop"):
        BlockGradient(start=0.5, stop=0.5, scale=0.0)


def test_the_adapter_is_on_the_six_attentions_of_every_block(family):
    policy = family.new()
    names = {n.partition(".lora_")[0] for n, p in policy.denoiser.named_parameters() if "lora" in n}
    kinds = {name.split(".")[2] for name in names}
    both = {"audio_to_video_attn", "video_to_audio_attn"}
    assert kinds == {"attn1", "attn2", "audio_attn1", "audio_attn2"} | both
    assert len(names) == 2 * 6 * 4


@pytest.mark.parametrize("blocks", [(28,), ()])
def test_blocks_that_the_network_does_not_have_are_refused(family, blocks):
    policy = of_clips(LTX2, family.path, streams=Streams(perturbed_blocks=blocks))
    with pytest.raises(ValueError, match=r"perturbed_blocks is \[.*blocks 0 to 1"):
        policy.plan()


def test_stored_clips_are_refused(family):
    policy = family.new()
    with pytest.raises(ValueError, match=r"LTX2 denoises clips with sound, .* on rollouts"):
        policy.embed(clips(policy))


def test_the_name_of_the_text_encoder_depends_on_the_connectors_and_on_what_is_encoded(family):
    policy = family.new()
    media, text = policy.encoders()
    assert family.new().encoders() == (media, text)
    assert family.new(guidance=3.0).encoders()[1] != text
    with torch.no_grad():
        next(policy.pipe.connectors.parameters()).flatten()[3] += 1e-3
    assert (policy.encoders()[0] == media, policy.encoders()[1] == text) == (True, False)
    text = policy.encoders()[1]
    with torch.no_grad():
        next(policy.pipe.text_encoder.parameters()).flatten()[3] += 1e-3
    assert policy.encoders()[1] != text


def test_negatives_are_conditions_of_the_empty_prompt(family):
    policy = family.new(guidance=3.0)
    cond = policy.encode(plain_requests(PROMPTS))
    empty = policy.encode(plain_requests([""]))
    for name in ("text", "audio_text", "mask"):
        both = empty[name].expand_as(cond[name])
        torch.testing.assert_close(cond[f"{name}_neg"], both)


def test_the_plan_counts_video_and_audio_tokens(family):
    """9 frames: 5 x 2 x 4 tokens, and 9 of .375 s, through two layers of 16 channels."""
    plan = of_clips(LTX2, family.path, height=32, width=64, streams=ALL).plan()
    assert plan.latent_shape == (4 * 5 * 2 * 4 + 2 * 9 * 2,)
    assert plan.activation_bytes == 34 * 2 * 16 * (5 * 2 * 4 + 9) * 2
    assert plan.decode_bytes > 4 * 3 * 9 * 32 * 64


@pytest.mark.parametrize("size", [1, 2])
def test_the_decoder_holds_no_more_latent_frames_than_it_may(family, size):
    assert_windows(family.new(num_frames=13, decode_frames=size), size)
