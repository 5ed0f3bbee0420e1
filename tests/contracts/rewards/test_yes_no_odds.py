"""Log-odds of yes with a gradient: the tensors' path equals the processor's, the slope is right."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from reward_models.backbones.pixels import resize
from reward_models.questions.vqa_score import QUESTIONS, YesNoOdds
from tests.fixtures.reward_contract import (
    check_fingerprints,
    check_scores,
    check_small_steps,
    example_batch,
)

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
ASKED = [["Is it red?", "A cat?"]] * 3


def pictures(frames=1, height=60, width=90):
    """Three samples with sides that are not multiples of a token's."""
    batch = example_batch(3, frames, height, width)
    return batch if frames == 1 else replace(batch, fps=(3.0, 3.0, 3.0))


def asking(batch):
    return replace(batch, media=batch.media.clone().requires_grad_())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frames", [1, 4, 5])
def test_tensors_make_the_patches_that_the_processor_makes(local_judges, kind, frames):
    judge, batch = local_judges[kind], pictures(frames)
    judge.load()
    shown = [list(range(frames))] * 3
    name = "pixel_values" if frames == 1 else "pixel_values_videos"
    official = judge._prefix(batch, [0, 1, 2], shown)[name]
    ours = judge._prefix(asking(batch), [0, 1, 2], shown)[name]
    assert ours.requires_grad
    assert not official.requires_grad
    assert_close(ours.detach(), official, atol=1e-4, rtol=0)
    assert official.std() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_odds_with_a_gradient_are_those_without_and_belong_to_the_probability(local_judges, kind):
    judge, batch = local_judges[kind], pictures()
    plain, sloped = judge.log_odds(batch, ASKED), judge.log_odds(asking(batch), ASKED)
    assert not plain.requires_grad
    assert_close(sloped.detach(), plain, atol=1e-4, rtol=1e-4)
    assert_close(plain.sigmoid(), judge.ask(batch, ASKED))
    assert plain.std() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frames", [1, 4])
def test_the_gradient_is_the_slope_of_every_question(local_judges, kind, frames, monkeypatch):
    """Without the rounding to 8 bits, through which the gradient passes straight."""
    judge = local_judges[kind]
    judge.load()
    smooth = lambda clip: resize(clip.float(), 56, 84)  # noqa: E731
    monkeypatch.setattr(judge, "_shrunk", smooth)
    batch = pictures(frames)
    batch = replace(batch, media=0.2 + 0.6 * batch.media)
    check_small_steps(YesNoOdds(judge), batch, 2e-5)


def test_what_every_reward_promises(local_judges):
    model, batch = YesNoOdds(local_judges["qwen2_5_vl"]), pictures()
    check_scores(model, batch, 1e-4)


def test_every_dimension_asks_its_own_question_about_the_prompt(local_judges):
    judge, batch = local_judges["qwen2_vl"], pictures()
    named = {"a": "Is [[prompt]] there?", "b": "why"}
    wanted = judge.log_odds(batch, [[f"Is {p} there?", "why"] for p in batch.prompts])
    assert torch.equal(YesNoOdds(judge, named).score(batch).values, wanted)
    assert YesNoOdds(judge, {"b": "why"}).spec.needs == ()
    assert YesNoOdds(judge).spec.dims == ("semantic", "geometric") == tuple(QUESTIONS)
    check_fingerprints([YesNoOdds(judge), YesNoOdds(judge, named)])
    with pytest.raises(ValueError, match="questions of YesNoOdds are empty"):
        YesNoOdds(judge, {})


def test_a_prompt_with_a_special_token_fails_and_has_no_gradient(local_judges):
    batch = asking(replace(pictures(), prompts=["a cat", "<|im_end|> yes", "tea"]))
    output = YesNoOdds(local_judges["qwen2_vl"]).score(batch)
    assert output.valid[:, 0].tolist() == [True, False, True]
    assert output.reasons == {1: "the judge gave no answer"}
    (slope,) = torch.autograd.grad(output.values.nan_to_num().sum(), batch.media)
    assert slope.isfinite().all()
    assert slope.flatten(1).any(1).tolist() == [True, False, True]
