"""Counting with a gradient: the loss by hand, and a tiny Grounding DINO in the published layout."""

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.testing import assert_close
from transformers import (
    BertConfig,
    GroundingDinoConfig,
    GroundingDinoForObjectDetection,
    PreTrainedTokenizerFast,
    SwinConfig,
)

from reward_models.detection.counting import SoftCounting, shortfall
from tests.fixtures.reward_contract import (
    check_fingerprints,
    check_scores,
    check_small_steps,
    example_batch,
)

WORDS = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, ".": 1012}
"""Numbers that Grounding DINO knows by heart."""
NOUNS = {"cat": 1050, "red": 1051, "dog": 1052, "##s": 1053}


def test_the_shortfall_by_hand():
    """Two cats at .7 and .04, one dog at .3 of candidates; below .5 and .1 something is missing."""
    cats, dogs = torch.tensor([0.01, 0.7, 0.04]), torch.tensor([0.3, 0.2, 0.25])
    assert shortfall([cats, dogs], [2, 1], 0.1).item() == pytest.approx(0.06 / 3)
    assert shortfall([cats, dogs], [2, 1], 0.5).item() == pytest.approx((0.46 + 0.2) / 3)
    assert shortfall([cats], [1], 0.5) == 0
    assert shortfall([cats], [3], 0.05).item() == pytest.approx((0.01 + 0.04) / 3)


def test_only_the_best_candidates_that_are_unsure_have_a_gradient():
    scores = torch.tensor([0.01, 0.7, 0.04, 0.2], requires_grad=True)
    shortfall([scores], [3], 0.1).backward()
    assert_close(scores.grad, torch.tensor([0.0, 0.0, -1 / 3, 0.0]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A detector of eight candidates with a text encoder that distinguishes all words."""
    folder = tmp_path_factory.mktemp("grounding")
    vocabulary = {f"[unused{i}]": i for i in range(1060)}
    vocabulary = {
        w: i for w, i in vocabulary.items() if i not in {*WORDS.values(), *NOUNS.values()}
    }
    bare = Tokenizer(models.WordPiece(vocabulary | WORDS | NOUNS, unk_token="[UNK]"))
    bare.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    PreTrainedTokenizerFast(
        tokenizer_object=bare,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    ).save_pretrained(folder)
    swin = SwinConfig(
        image_size=64,
        patch_size=4,
        window_size=2,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        out_features=["stage2", "stage3", "stage4"],
    )
    bert = BertConfig(
        vocab_size=1060,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    config = GroundingDinoConfig(
        backbone_config=swin,
        text_config=bert,
        d_model=64,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        encoder_n_points=2,
        decoder_n_points=2,
        num_queries=8,
        max_text_len=20,
        disable_custom_kernels=True,
        auxiliary_loss=False,
    )
    torch.manual_seed(4)
    network = GroundingDinoForObjectDetection(config)
    for parameter in network.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.6 * parameter[0].numel() ** -0.5)
    boxes = (network.model.decoder.bbox_embed, network.model.encoder_output_bbox_embed)
    for parameter in (p for module in boxes for p in module.parameters()):
        torch.nn.init.zeros_(parameter)  # the network stops the gradient at its boxes
    network.model.decoder.layer_norm.weight.data *= 0.1  # scores far from 0 and 1
    network.save_pretrained(folder)
    return folder


def counted(num=3):
    asked = [
        [{"class": "cat", "count": 2}],
        [{"class": "red dogs", "count": 3}, {"class": "cat", "count": 1}],
        [{"class": "dog", "count": 1}],
        [{"class": "cats", "count": 5}],
    ]
    return replace(example_batch(num), metadata=[{"include": rows} for rows in asked[:num]])


def reward(folder, threshold=0.999):
    return SoftCounting(str(folder), threshold, side=64, device="cpu", batch_size=2)


@pytest.mark.slow
def test_what_every_reward_promises(folder):
    model, batch = reward(folder), counted()
    check_scores(model, batch)
    check_small_steps(model, batch, 2e-5)
    media = batch.media.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model.score(replace(batch, media=media)).values.sum(), media)
    assert (slope.flatten(1).abs().sum(1) > 0.01).all()
    check_fingerprints([model, reward(folder, 0.2)])


def test_a_class_of_several_tokens_counts_by_its_best_one(folder):
    """[CLS] red dog ##s . cat . [SEP], through the official class."""
    model, batch = reward(folder), counted().take([1])
    found = model.score(batch).values.item()
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    picture = torch.nn.functional.interpolate(
        batch.media[:, 0], (64, 64), mode="bicubic", antialias=True
    )
    pixels = (picture - mean[:, None, None]) / std[:, None, None]
    ids = torch.tensor([[101, 1051, 1052, 1053, 1012, 1050, 1012, 102]])
    with torch.no_grad():
        scores = model.network(pixels, ids).logits[0].sigmoid()
    dogs, cats = scores[:, 1:4].amax(1), scores[:, 5]
    missing = (0.999 - dogs.topk(3).values).relu().sum() + (0.999 - cats.max()).relu()
    assert found == pytest.approx(-missing.item() / 4, rel=1e-4)


def test_what_cannot_be_counted_is_said(folder):
    rows = [
        {"include": [{"class": "cat", "count": 2}]},
        {},
        {"include": [{"class": "cat", "count": 9}]},
        {"include": [{"class": "cat. dog", "count": 1}]},
    ]
    output = reward(folder).score(replace(example_batch(4), metadata=rows))
    assert output.valid[:, 0].tolist() == [True, False, False, False]
    assert "no `include`" in output.reasons[1]
    assert "asks for 9 objects; 8 can be detected" in output.reasons[2]
    assert "'cat. dog'" in output.reasons[3]
    with pytest.raises(ValueError, match=r"threshold of SoftCounting is 0\.0"):
        SoftCounting(str(folder), 0.0)
