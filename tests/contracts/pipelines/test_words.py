"""The words model: its tokenizer sees letters, and its folder samples images."""

import pretrain
import pytest
import torch

from flowalign.data.requests import read_requests
from flowalign.types import prompts_of
from pipelines.families.sd3 import SD3

PROMPTS = ["train", "seen", "unseen"]


@pytest.fixture(scope="module")
def policy():
    policy = SD3(
        *("assets/words/sd3", 32, 64, 1.0), precision="fp32", max_sequence_length=1, lora=None
    )
    policy.load(torch.device("cpu"))
    return policy


def test_every_letter_is_a_token_and_every_prompt_fits(policy):
    pipe = policy.pipe
    prompts = [
        prompt
        for split in PROMPTS
        for prompt in prompts_of(read_requests(f"assets/words/prompts/{split}.txt"))
    ]
    ids = torch.tensor(pipe.tokenizer(prompts, padding="max_length").input_ids)
    assert ids.shape == (len(prompts), pretrain.PROMPT_TOKENS)
    assert pipe.tokenizer.unk_token_id not in ids
    tokens = pipe.tokenizer.convert_ids_to_tokens(
        pipe.tokenizer('the word "SUN" in red on yellow, serif').input_ids
    )
    words = ["the", "word", *"SUN", "in", "red", "on", "yellow", "serif"]
    assert tokens == ["<bos>", *words, "<eos>"]


@torch.no_grad()
def test_pretraining_encodes_prompts_as_the_pipeline_does(policy):
    pipe, prompts = policy.pipe, ['the word "SUN" in red on yellow, serif', ""]
    ids = pipe.tokenizer(prompts, padding="max_length", return_tensors="pt").input_ids
    text, pooled = pretrain.encode_text(pipe, ids)
    expected, _, expected_pooled, _ = pipe.encode_prompt(
        prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=1
    )
    torch.testing.assert_close(text, expected)
    torch.testing.assert_close(pooled, expected_pooled)


@pytest.mark.slow
@torch.no_grad()
def test_the_bundled_model_writes_ink_on_paper():
    pipe = pretrain.StableDiffusion3Pipeline.from_pretrained("assets/words/sd3")
    scores = pretrain.evaluate(pipe, number=16, num_steps=8)
    assert scores["colour"] >= 0.9
    assert scores["letters"] >= 0.5
