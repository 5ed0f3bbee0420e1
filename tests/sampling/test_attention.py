"""Attention of image tokens to the prompt, and the credit that follows it."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from flowalign.sampling.attention import prompt_attention, record_prompt_attention


class Joint(nn.Module):
    """Joint attention of one head with identity projections."""

    heads = 1

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.add_k_proj = nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, hidden_states, encoder_hidden_states, image_rotary_emb=None):
        return hidden_states


def test_the_share_of_the_prompt_by_hand():
    """Equal keys share equally; a query of zeros as well; exp(logit) decides elsewhere."""
    image, prompt = torch.tensor([[[2.0, 0.0], [0.0, 0.0]]]), torch.tensor([[[1.0, 0.0]]])
    found = prompt_attention(Joint(), image, prompt)
    first = [math.exp(logit / 2**0.5) for logit in (4.0, 0.0, 2.0)]
    assert_close(found, torch.tensor([[first[2] / sum(first), 1 / 3]]))


def test_every_joint_attention_is_recorded_and_others_are_refused():
    layers = nn.Sequential(Joint(), nn.Linear(2, 2), Joint())
    image, prompt = torch.randn(3, 4, 2), torch.randn(3, 5, 2)
    with record_prompt_attention(layers) as seen:
        layers[0](hidden_states=image, encoder_hidden_states=prompt)
        layers[2](image, encoder_hidden_states=prompt)
    assert [one.shape for one in seen] == [(3, 4), (3, 4)]
    with (
        pytest.raises(ValueError, match="choose SD3, or RewardMap"),
        record_prompt_attention(nn.Linear(2, 2)),
    ):
        pass
    with record_prompt_attention(layers), pytest.raises(ValueError, match="rotary"):
        layers[0](image, encoder_hidden_states=prompt, image_rotary_emb=image)
