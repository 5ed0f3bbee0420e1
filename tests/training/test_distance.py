"""Distance to the samples before training: its values, its file, and its cost."""

import pytest
import torch
from torch import tensor

from flowalign.distributed.processes import ALONE
from flowalign.rewards.composite import Rewards
from flowalign.training.divergence import describe_media, distance_to_base, measure_distance
from flowalign.training.held_out_evaluation import Evaluation, evaluate
from flowalign.types import EmbedsImages, plain_requests
from tests.fixtures.pixel import PixelPolicy, Redness
from tests.fixtures.training import new_rewards


class Encoder(Redness, EmbedsImages):
    """Embeds an image by its mean colour."""

    def embed(self, batch):
        return batch.media.mean((1, 3, 4))


def test_distances_are_means_over_samples_and_then_over_requests():
    """Prompt a has the distances 1 and 0, prompt b has 0.5 and 0.5 (pixels), or 1, 0 and .2, .2."""
    requests = plain_requests(["a", "a", "b", "b"])
    base = {
        "pixel_distance": torch.zeros(4, 1, 3, 2, 2).byte(),
        "clip_distance": tensor([[1.0, 0.0]] * 4),
    }
    grey = tensor([255, 0, 255, 255]).reshape(4, 1, 1, 1, 1).expand(4, 1, 3, 2, 2).clone()
    grey[2:, :, :, 0] = 0  # half of the pixels, so the root mean square is sqrt(1/2)
    turned = tensor([[0.0, 2.0], [3.0, 0.0], [0.8, 0.6], [0.8, 0.6]])
    found = measure_distance(
        base, {"pixel_distance": grey.byte(), "clip_distance": turned}, requests
    )
    assert found == {
        "eval/pixel_distance": pytest.approx((0.5 + 0.5**0.5) / 2),
        "eval/clip_distance": pytest.approx((0.5 + 0.2) / 2),
    }
    unlike = measure_distance(
        base, {"pixel_distance": grey.byte()}, plain_requests(["a", "b", "b", "b"])
    )
    assert unlike["eval/pixel_distance"] == pytest.approx((1 + 2 * 0.5**0.5 / 3) / 2)


def test_equal_samples_have_distance_zero_exactly():
    draw = torch.randn(8, 512, generator=torch.Generator().manual_seed(0))
    now = {"clip_distance": draw}
    assert measure_distance(now, now, plain_requests(["a"] * 8)) == {"eval/clip_distance": 0.0}


def test_media_are_described_by_small_pixels_and_by_every_encoder():
    media = torch.rand(2, 9, 3, 96, 128, generator=torch.Generator().manual_seed(0))
    rewards = Rewards([Encoder(), *new_rewards().models[1:]], {})
    found = describe_media(rewards, rewards.batch(media, plain_requests(["a", "b"]), fps=8.0))
    assert [*found] == ["pixel_distance", "redness_distance"]
    assert found["pixel_distance"].shape == (2, 4, 3, 48, 64)
    assert found["pixel_distance"].dtype == torch.uint8
    assert found["pixel_distance"][1, 3].float().mean() == pytest.approx(
        255 * float(media[1, 8].mean()), abs=0.5
    )
    assert torch.equal(found["redness_distance"], media.mean((1, 3, 4)))


def test_another_sampling_has_no_distance(tmp_path):
    requests, now = plain_requests(["a"]), {"clip_distance": tensor([[1.0, 0.0]])}
    assert distance_to_base(tmp_path, 3, "one", now, requests) == {}
    assert distance_to_base(tmp_path, 0, "one", now, requests) == {"eval/clip_distance": 0.0}
    turned = {"clip_distance": tensor([[0.0, 1.0]]), "other_distance": tensor([[1.0]])}
    assert distance_to_base(tmp_path, 3, "one", turned, requests) == {"eval/clip_distance": 1.0}
    assert distance_to_base(tmp_path, 3, "two", turned, requests) == {}


def test_the_digest_of_the_sampling_covers_prompts_seed_and_steps(tmp_path):
    (tmp_path / "a.txt").write_text("a\nb")
    (tmp_path / "b.txt").write_text("a\nc")

    def digest(file="a", **settings):
        return Evaluation(prompts={"all": str(tmp_path / f"{file}.txt")}, **settings).sampling

    same = digest(micro_batch=3, grid=2)
    assert digest() == same
    others = digest("b"), digest(seed=7), digest(num_steps=3), digest(num_prompts=3)
    assert len({same, *others}) == 5


def test_an_evaluation_describes_all_samples_in_their_order(tmp_path):
    (tmp_path / "a.txt").write_text("a\nbb\nccc")
    cfg = Evaluation(
        prompts={"all": str(tmp_path / "a.txt")}, num_prompts=5, num_steps=2, micro_batch=2, grid=5
    )
    found = evaluate(PixelPolicy(), new_rewards(), cfg, ALONE)
    assert torch.equal(found.features["pixel_distance"], (found.grid * 255).round().byte())
