"""CLAP compares the sound of clips with their prompts, as transformers' own processor does."""

import math
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ClapConfig, ClapFeatureExtractor, ClapModel, PreTrainedTokenizerFast

from flowalign.types import MediaBatch, Sound
from reward_models.signals.clap import CLAP, to_mono
from tests.fixtures.reward_contract import check_scores, example_batch

pytestmark = pytest.mark.slow
WORDS = ("[PAD]", "[UNK]", "a", "red", "car", "cat", "dogs", "snow", "rain", "tea", "of", "photo")


def build_clap(folder) -> str:
    """Write a tiny random CLAP whose towers differ for each sound and prompt."""
    text = {"vocab_size": len(WORDS), "max_position_embeddings": 34, "hidden_size": 16}
    text |= {"num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    sound = {"num_mel_bins": 32, "spec_size": 64, "hidden_size": 32, "depths": [1, 1]}
    sound |= {"patch_embeds_hidden_size": 16, "num_attention_heads": [2, 2], "window_size": 4}
    config = ClapConfig(
        text_config=text | {"pad_token_id": 0, "projection_dim": 8},
        audio_config=sound | {"num_hidden_layers": 2, "projection_dim": 8},
        projection_dim=8,
    )
    torch.manual_seed(0)
    ClapModel(config).eval().save_pretrained(folder)
    ClapFeatureExtractor(feature_size=32, sampling_rate=16_000, max_length_s=2).save_pretrained(
        folder
    )
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    return str(folder)


def tone(hertz: float, rate: int = 24_000, seconds: float = 1.0, channels: int = 2) -> Sound:
    time = torch.arange(round(rate * seconds)) / rate
    wave = 0.3 * torch.sin(2 * math.pi * hertz * time) + 0.1 * torch.sin(500 * time**2)
    return Sound(wave.expand(channels, -1), rate)


@pytest.fixture(scope="module")
def clap(tmp_path_factory) -> CLAP:
    return CLAP(build_clap(tmp_path_factory.mktemp("clap")), device="cpu")


@pytest.fixture(scope="module")
def batch() -> MediaBatch:
    return replace(
        example_batch(4, frames=2), sound=[tone(200.0 * 2**k) for k in range(4)], fps=[8.0] * 4
    )


def test_the_contract_of_rewards_holds(clap, batch):
    check_scores(clap, batch)


def test_scores_are_the_cosines_of_transformers(clap, batch):
    clap.load()
    mono = [to_mono(one, 16_000) for one in batch.sound]
    one = {"sampling_rate": 16_000, "truncation": "rand_trunc", "return_tensors": "pt"}
    sounds = clap.extractor(mono, **one)
    texts = clap.tokenizer(list(batch.prompts), padding=True, return_tensors="pt")
    with torch.no_grad():
        found = clap.network(**texts, input_features=sounds["input_features"])
    expected = (found.text_embeds * found.audio_embeds).sum(1, keepdim=True)
    torch.testing.assert_close(clap.score(batch).values, expected, atol=1e-5, rtol=1e-4)
    assert expected.std() > 1e-4


def test_a_clip_without_sound_fails_with_a_reason_and_a_batch_without_any_is_refused(clap, batch):
    output = clap.score(replace(batch, sound=[*batch.sound[:3], None]))
    assert output.valid[:, 0].tolist() == [True, True, True, False]
    assert output.reasons == {3: "it has no sound"}
    with pytest.raises(ValueError, match="'clap' needs sound for every sample"):
        clap.score(replace(batch, sound=()))


def test_sound_beyond_the_models_window_does_not_count(clap, batch):
    longer = [
        Sound(torch.cat([one.waveform.repeat(1, 2), torch.rand(2, 9000)], 1), one.rate)
        for one in batch.sound
    ]
    cut = [Sound(one.waveform[:, :48_000], one.rate) for one in longer]
    kept, all_of_it = (clap.score(replace(batch, sound=one)).values for one in (cut, longer))
    torch.testing.assert_close(kept, all_of_it, atol=2e-3, rtol=0)  # the resampler looks ahead


def test_resampling_keeps_length_and_tone():
    mono = to_mono(tone(400.0, 24_000, channels=1), 48_000)
    assert len(mono) == pytest.approx(48_000, abs=100)
    again = to_mono(tone(400.0, 48_000, channels=2), 48_000)
    spectra = (abs(torch.fft.rfft(torch.from_numpy(one[:47_000].copy()))) for one in (mono, again))
    first, second = (int(one.argmax()) for one in spectra)
    assert first == second == pytest.approx(400 * 47_000 / 48_000, abs=1)
