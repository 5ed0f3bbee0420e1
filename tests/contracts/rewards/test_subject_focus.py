"""How clearly images show the subjects of their references, and where."""

from dataclasses import replace

import torch
from torch.testing import assert_close

from flowalign.types import MediaBatch
from reward_models.backbones.encoders import Encoder
from reward_models.detection.subject_focus import SubjectFocus, cut_windows
from tests.fixtures.reward_contract import check_contract, example_batch


class Colours(Encoder):
    """Encoder with an image's mean colour minus grey as features."""

    reads_prompts = False
    version = "colours"

    def read(self):
        self.module = torch.nn.Linear(1, 1)

    def embed_images(self, frames):
        return frames.mean((2, 3)) - 0.5

    def embed_prompts(self, prompts):
        return torch.zeros(len(prompts), 0)


def test_patches_cover_the_picture_in_overlapping_windows():
    ramp = torch.linspace(0, 1, 96)[None, None].expand(3, 96, 96)
    cut = cut_windows(ramp, 2)
    assert cut.shape == (4, 3, 64, 64)
    assert_close(cut[0], ramp[:, :64, :64])
    assert_close(cut[3], ramp[:, 32:, 32:])
    assert_close(cut[1], ramp[:, :64, 32:])


def with_references(num=4):
    batch = example_batch(num)
    sources = example_batch(num, height=50, width=40, seed=3).media
    return replace(batch, references=[[source[0]] for source in sources])


def test_what_every_reward_promises():
    check_contract(SubjectFocus(Colours(), grid=3), with_references())


def test_the_focus_lies_where_the_subject_is():
    """A red subject in the left half of a blue image: its patches match, all others do not."""
    red, blue = torch.tensor([0.9, 0.2, 0.2]), torch.tensor([0.1, 0.2, 0.9])
    picture = blue[:, None, None].expand(3, 160, 160).clone()
    picture[:, :, :96] = red[:, None, None]
    reference = red[:, None, None].expand(3, 160, 160).clone()
    reference[:, ::2, :80] = 0.6 * red[:, None, None]  # the left half has texture
    batch = MediaBatch(picture[None, None], ["a toy"], references=[[reference]])
    output = SubjectFocus(Colours(), grid=4).score(batch)
    place = output.maps["subject_focus"][0]
    assert place.shape == (4, 4)
    assert (place[:, :2] > 0.4).all()
    assert place[:, 3].max() < 0.05
    assert 0.9 < float(output.values) <= 1
    other = replace(batch, references=[[1 - reference]])
    assert float(SubjectFocus(Colours(), grid=4).score(other).values) < float(output.values)
