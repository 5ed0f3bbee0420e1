"""AnimeReward's two dimensions of BLIP against transformers' own class, and refused dimensions."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from transformers import BertTokenizerFast, BlipConfig, BlipForImageTextRetrieval

from flowalign.types import MediaBatch
from reward_models.backbones.pixels import CLIP_MEAN, CLIP_STD
from reward_models.preference import anime_reward
from reward_models.preference.anime_reward import AnimeReward
from tests.fixtures.golden import GOLDEN
from tests.fixtures.reward_contract import check_contract, check_fingerprints, example_batch

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny BLIP for retrieval with scores that depend strongly on image and text."""
    path = tmp_path_factory.mktemp("blip")
    words = (GOLDEN / "H_imagereward" / "vocab.txt").read_text().split("\n")
    (path / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(path / "vocab.txt")).save_pretrained(path)
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2}
    config = BlipConfig(
        text_config={**sizes, **heads, "vocab_size": len(words), "encoder_hidden_size": 24},
        vision_config={**sizes, **heads, "image_size": 32, "patch_size": 16},
        image_text_hidden_size=12,
    )
    torch.manual_seed(2)
    model = BlipForImageTextRetrieval(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=1.2 * parameter[0].numel() ** -0.5)
    model.save_pretrained(path)
    return str(path)


def clips(num=3, frames=5):
    batch = example_batch(num, frames, 32, 32)
    batch = replace(batch, media=(batch.media * 255).round() / 255)
    sources = example_batch(num, 1, 32, 32, seed=3).media
    return replace(batch, references=[[(x[0] * 255).round() / 255] for x in sources])


def test_scores_are_means_of_what_transformers_gives_for_each_frame(folder):
    reward, batch = AnimeReward(folder, frames=3, device="cpu"), clips()
    output = reward.score(batch)
    model = BlipForImageTextRetrieval.from_pretrained(folder).eval()
    mean, std = (torch.tensor(x)[:, None, None] for x in (CLIP_MEAN, CLIP_STD))
    for i in range(3):
        frames = (batch.media[i, [0, 2, 4]] - mean) / std
        tokens = BertTokenizerFast.from_pretrained(folder)(batch.prompts[i], return_tensors="pt")
        with torch.no_grad():
            match = torch.cat(
                [
                    model(tokens["input_ids"], f[None], attention_mask=tokens["attention_mask"])[0]
                    for f in frames
                ]
            )
            source = (batch.references[i][0] - mean) / std
            seen = model.vision_model(torch.cat([source[None], frames])).last_hidden_state[:, 0]
            embedded = F.normalize(model.vision_proj(seen), dim=-1)
        expected = torch.stack(
            [match.softmax(-1)[:, 1].mean(), (embedded[1:] @ embedded[0]).mean()]
        )
        torch.testing.assert_close(output.values[i], expected, atol=1e-5, rtol=0)
    assert output.values.std(0).min() > 1e-3


@pytest.mark.slow
def test_what_every_reward_promises(folder):
    check_contract(AnimeReward(folder, frames=3, device="cpu"), clips(), rtol_gradient=1)


def test_frames_after_the_first_144_are_not_looked_at(folder, monkeypatch):
    monkeypatch.setattr(anime_reward, "FIRST", 3)
    reward, batch = AnimeReward(folder, device="cpu"), clips()
    values = reward.score(batch).values
    torch.testing.assert_close(
        reward.score(replace(batch, media=batch.media[:, :3])).values, values
    )


def test_other_dims_are_refused_and_one_of_them_needs_no_source(folder):
    for dims in ([], ["visual_smooth"], ["img_video_consist"] * 2):
        with pytest.raises(ValueError, match="supported are text_video_consist, img_video_consist"):
            AnimeReward(folder, dims=dims)
    text = AnimeReward(folder, dims=["text_video_consist"], device="cpu")
    batch = clips()
    both = AnimeReward(folder, device="cpu")
    alone = text.score(MediaBatch(batch.media, batch.prompts)).values
    torch.testing.assert_close(alone, both.score(batch).values[:, :1])
    check_fingerprints([text, both, AnimeReward(folder, frames=2)])
