"""MJ-VIDEO's head against its original code; `test_internvl2.py` has the whole model."""

import torch

from reward_models.backbones.checkpoints import load_exactly
from reward_models.preference.mj_video import MJVideoHead
from tests.fixtures.golden import GOLDEN, load

RECORDED = load("H_mjvideo_head")
PARAMETERS = {k.removeprefix("param."): v for k, v in RECORDED.items() if k.startswith("param.")}


def recorded_scores(temperature=1.0):
    head = MJVideoHead(16, gate_width=12, temperature=temperature)
    load_exactly(head, PARAMETERS, GOLDEN)
    return head(RECORDED["hidden_last"], RECORDED["prompt_embedding"])


def test_scores_are_those_of_the_original():
    scores = recorded_scores()
    for name, value in (
        ("rewards", scores.criteria),
        ("criteria_weights", scores.weights),
        ("aspect_scores", scores.aspects),
        ("aspect_gating", scores.gate),
        ("score", scores.overall),
    ):
        torch.testing.assert_close(value, RECORDED[name], rtol=1e-5, atol=1e-6, msg=name)


def test_temperature_is_applied_to_both_gates_and_scale_to_their_weights():
    scores = recorded_scores(temperature=4.0)
    logits = RECORDED["criteria_logits"]
    first = logits[:, :5].div(4).softmax(1) * PARAMETERS["criteria_gating.logit_scale"]
    torch.testing.assert_close(scores.weights[:, :5], first)
    scale = PARAMETERS["aspect_gating.logit_scale"]
    torch.testing.assert_close(scores.gate.sum(1), scale.expand(3))
    flattened = (recorded_scores().gate / scale) ** 0.25
    torch.testing.assert_close(scores.gate / scale, flattened / flattened.sum(1, keepdim=True))
