"""Consistency with a text and references, by a tiny BLIP-2 in the published layout."""

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.testing import assert_close
from transformers import Blip2Config, Blip2ForImageTextRetrieval, PreTrainedTokenizerFast

from reward_models.backbones.clip_towers import Preprocessing
from reward_models.questions.context_consistency import ContextConsistency
from tests.fixtures.reward_contract import PROMPTS, check_scores, check_small_steps, example_batch

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blip2")
    words = [*SPECIAL, *dict.fromkeys(word for prompt in PROMPTS for word in prompt.split())]
    bare = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    bare.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=bare, **names).save_pretrained(folder)
    config = Blip2Config(
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        qformer_config={
            "vocab_size": len(words),
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "encoder_hidden_size": 16,
            "max_position_embeddings": 12,
            "cross_attention_frequency": 1,
            "use_qformer_text_input": True,
        },
        num_query_tokens=4,
        image_text_hidden_size=8,
        image_token_index=5,
    )
    torch.manual_seed(2)
    network = Blip2ForImageTextRetrieval(config)
    for parameter in network.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=1.5 * parameter[0].numel() ** -0.5)
    network.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reward(folder):
    return ContextConsistency(str(folder), device="cpu", batch_size=2)


def pictures(num=3):
    sources = example_batch(2 * num, height=50, width=44, seed=3).media[:, 0]
    return replace(
        example_batch(num), references=[[sources[2 * i], sources[2 * i + 1]] for i in range(num)]
    )


def test_the_dimensions_are_what_the_official_class_computes(reward):
    """Cosine of text and best query token; logit of a match; query tokens against a reference."""
    batch = pictures(1)
    reward.load()
    prepared = Preprocessing(28, "squash")
    text = reward.tokenizer(batch.prompts[0], return_tensors="pt")
    given = {"input_ids": text["input_ids"], "attention_mask": text["attention_mask"]}
    with torch.no_grad():
        both = torch.cat([batch.media[:, 0], torch.zeros_like(batch.media[:, 0])])
        contrast = reward.network(prepared(both), **{k: v.repeat(2, 1) for k, v in given.items()})
        match = reward.network(
            prepared(batch.media[:, 0]), **given, use_image_text_matching_head=True
        )
        shown = [reward.network(prepared(r[None]), **given) for r in batch.references[0]]
    tokens, words = contrast.image_embeds[0], contrast.text_embeds[0]
    alike = [(tokens * one.image_embeds[0]).sum(-1).mean() for one in shown]
    wanted = torch.stack([(tokens @ words).max(), match.logits_per_image[0, 1], sum(alike) / 2])
    assert_close(reward.score(batch).values[0], wanted, atol=1e-5, rtol=1e-5)
    assert abs(alike[0] - alike[1]) > 1e-3


def test_a_picture_that_is_its_reference_agrees_with_it_fully(reward):
    batch = pictures()
    same = replace(batch, references=[[media[0]] for media in batch.media])
    values = reward.score(same).values
    assert_close(values[:, 2], torch.ones(3))
    assert_close(values[:, :2], reward.score(batch).values[:, :2])


def test_the_context_of_a_row_takes_the_place_of_its_prompt(reward):
    batch = pictures()
    told = replace(batch, prompts=["tea"] * 3, metadata=[{"context": p} for p in batch.prompts])
    assert_close(reward.score(told).values, reward.score(batch).values)
    without = reward.score(replace(told, metadata=())).values
    assert (without[:2, :2] - reward.score(batch).values[:2, :2]).abs().min() > 1e-4


@pytest.mark.slow
def test_what_every_reward_promises(reward, monkeypatch):
    """The slope without the rounding to 8 bits, through which the gradient passes straight."""
    batch = pictures()
    check_scores(reward, batch)
    smooth = lambda frames: torch.nn.functional.interpolate(frames, (28, 28))  # noqa: E731
    monkeypatch.setattr(reward, "_pixels", smooth)
    check_small_steps(reward, batch)


def test_a_missing_reference_is_a_failure(reward):
    batch = pictures()
    output = reward.score(replace(batch, references=[batch.references[0], [], batch.references[2]]))
    assert output.valid[:, 0].tolist() == [True, False, True]
    assert output.reasons == {1: "its source image is missing"}
