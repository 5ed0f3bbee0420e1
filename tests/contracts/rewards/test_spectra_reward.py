"""SpectraReward: the network's own loss on the prompt's tokens, on tiny Qwen models."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from reward_models.backbones.pixels import resize
from reward_models.questions.spectra_reward import INSTRUCTION, SpectraReward
from tests.fixtures.reward_contract import (
    check_fingerprints,
    check_scores,
    check_small_steps,
    example_batch,
)

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture
def rewards(local_judges):
    return {kind: SpectraReward(judge) for kind, judge in local_judges.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_score_is_minus_the_loss_of_the_network_on_the_prompt(rewards, kind):
    """The whole chat in one call of the processor and the model, as its authors run it."""
    reward, batch = rewards[kind], example_batch(3, 1, 60, 90)
    scores = reward.score(batch).values[:, 0]
    judge = reward.judge
    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": INSTRUCTION}]}
    head = judge.processor.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)
    for i, prompt in enumerate(batch.prompts):
        shown = judge._shrunk(batch.media[i])[0]
        inputs = judge.processor(
            text=[head + prompt],
            images=[shown],
            do_resize=False,
            do_rescale=False,
            return_tensors="pt",
        )
        labels = inputs["input_ids"].clone()
        tokens = judge.processor.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        labels[:, : -len(tokens) + 1] = -100
        with torch.no_grad():
            loss = judge.network(**inputs, labels=labels).loss
        assert_close(scores[i], -loss, atol=1e-4, rtol=1e-4)
    assert scores.std() > 1e-3


@pytest.mark.parametrize("frames", [1, 4])
def test_it_is_a_reward_with_the_right_slope(rewards, frames, monkeypatch):
    """The slope is checked without the rounding to 8 bits, through which it passes straight."""
    reward, batch = rewards["qwen2_5_vl"], example_batch(3, frames, 60, 90)
    batch = batch if frames == 1 else replace(batch, fps=(3.0, 3.0, 3.0))
    check_scores(reward, batch)
    monkeypatch.setattr(reward.judge, "_shrunk", lambda clip: resize(clip.float(), 56, 84))
    check_small_steps(reward, replace(batch, media=0.2 + 0.6 * batch.media), 2e-5)


def test_prompts_without_a_likelihood_fail_alone(rewards):
    batch = replace(example_batch(3, 1, 60, 90), prompts=["a cat", "<|im_end|>a cat", "a"])
    output = rewards["qwen2_vl"].score(batch)
    assert output.valid[:, 0].tolist() == [True, False, False]
    assert "special token" in output.reasons[1]


def test_the_instruction_belongs_to_the_fingerprint(rewards):
    judge = rewards["qwen2_vl"].judge
    check_fingerprints([rewards["qwen2_vl"], SpectraReward(judge, "What is shown?")])
