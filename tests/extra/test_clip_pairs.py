"""Pairs of real clips: noising, denoising, labels and exclusions, on tiny videos."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nan, nn, tensor
from torch.testing import assert_close

from flowalign.extra.clip_pairs.denoiser import (
    ClipRegenerator,
    Clips,
    ClipScores,
    compare_with_margin,
    find_frames,
    moving_mask,
    restore_unmasked,
    split_spans,
    step_at_level,
    step_at_share,
    temporal_stride,
)
from flowalign.extra.clip_pairs.generators import ClipPair, DensePairs, LocalPairs, SkippedClip
from flowalign.functional.noise_matching import add_noise
from flowalign.rewards.composite import Rewards
from flowalign.types import MediaBatch, RewardModel, RewardOutput, RewardSpec, plain_requests
from tests.fixtures.video_pixel import FRAMES, GRID, VideoPixel, Warmth, clip


def regenerator(policy=None, rewards=None, num_steps: int = 8, seed: int = 0, micro: int = 3):
    policy, rewards = policy or VideoPixel(), rewards or Rewards([Warmth()], {"warm": 1.0})
    rewards.costs.count(policy.denoiser)
    return ClipRegenerator(policy, rewards, num_steps, seed, micro)


def clips(count: int = 3, first: int = 0) -> Clips:
    numbers = list(range(first, first + count))
    latents = VideoPixel().embed(torch.stack([clip(k) for k in numbers]))
    return Clips(latents, plain_requests(["p" * (k + 1) for k in numbers]), numbers)


def linear() -> VideoPixel:
    """Its velocity is the state itself: a step from s to t multiplies by 1 - (s - t)."""
    policy = VideoPixel()
    nn.init.zeros_(policy.denoiser[-1].bias)
    return policy


# Denoising ----------------------------------------------------------------------------------------


def test_a_clip_is_noised_to_its_step_and_denoised_by_the_steps_from_there():
    some, shop = clips(2), regenerator(linear())
    noise = shop.draw_noise("x", some)
    got = shop.regenerate(some, noise, tensor([3, 6]))
    for row, start in enumerate((3, 6)):
        sigma = 1 - start / 8
        begun = (1 - sigma) * some.latents[row] + sigma * noise[row]
        assert_close(got[row], begun * (7 / 8) ** (8 - start))


def test_clips_of_different_levels_share_calls_and_change_nothing_for_each_other():
    some, policy = clips(3), VideoPixel(seed=3)
    nn.init.normal_(policy.denoiser[-1].weight, generator=torch.Generator().manual_seed(1))
    shop = regenerator(policy)
    noise, starts = shop.draw_noise("x", some), tensor([5, 2, 6])
    together = shop.regenerate(some, noise, starts)
    assert shop.rewards.costs.sampling_evaluations == 3 + 6 + 2
    for i in range(3):
        alone = Clips(some.latents[i : i + 1], some.requests[i : i + 1], [i])
        got = shop.regenerate(alone, noise[i : i + 1], starts[i : i + 1])
        assert_close(together[i : i + 1], got)


def test_a_mask_of_ones_changes_nothing_and_outside_of_a_mask_the_clip_is_real_to_the_bit():
    some, shop = clips(2), regenerator(VideoPixel(seed=2))
    noise, starts = shop.draw_noise("x", some), tensor([2, 4])
    free = shop.regenerate(some, noise, starts)
    ones = torch.ones(2, 1, *GRID)
    assert torch.equal(shop.regenerate(some, noise, starts, ones), free)
    mask = ones.clone()
    mask[0, :, :2], mask[1, :, :, 1] = 0, 0
    got = shop.regenerate(some, noise, starts, mask)
    outside = (mask == 0).expand_as(got)
    assert torch.equal(got[outside], some.latents[outside])
    assert (got[~outside] != some.latents[~outside]).all()


class Watching(VideoPixel):
    """Remembers the states that the network was shown, and their times."""

    def velocity(self, x: Tensor, sigma: Tensor, cond: dict[str, Tensor]) -> Tensor:
        self.shown = [*getattr(self, "shown", []), (float(sigma), x.clone())]
        return super().velocity(x, sigma, cond)


def test_outside_the_mask_the_network_sees_the_clip_with_the_same_noise_at_every_level():
    policy, some = Watching(), clips(1)
    shop = regenerator(policy)
    noise, mask = shop.draw_noise("x", some), torch.ones(1, 1, *GRID)
    mask[:, :, :, 0] = 0
    shop.regenerate(some, noise, tensor([3]), mask)
    assert [sigma for sigma, _ in policy.shown] == [5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    for sigma, state in policy.shown:
        expected = add_noise(some.latents, noise, tensor([sigma]))
        assert_close(state[:, :, :, 0], expected[:, :, :, 0])


def test_noise_belongs_to_seed_purpose_and_number_of_the_clip_alone():
    shop, later = regenerator(), Clips(clips(3).latents[1:], plain_requests(["p", "q"]), [1, 2])
    assert torch.equal(shop.draw_noise("noise", clips(3))[1:], shop.draw_noise("noise", later))
    assert not torch.equal(shop.draw_noise("a", later), shop.draw_noise("b", later))
    assert not torch.equal(shop.draw_noise("a", later), regenerator(seed=1).draw_noise("a", later))


# DenseDPO -----------------------------------------------------------------------------------------


def test_both_copies_start_at_one_level_between_the_limits_and_from_different_noise():
    policy = Watching()
    results = DensePairs(seconds=0.5).make(regenerator(policy, num_steps=120, micro=99), clips(3))
    first = {}
    for sigma, states in policy.shown:
        first.setdefault(len(states), sigma)
    levels = [made.row["level"] for made in results if isinstance(made, ClipPair)]
    assert len(set(levels)) == 3
    assert all(0.64 <= level <= 0.81 for level in levels)
    # The two rows of a clip join the rollout together, the highest level first.
    assert first == dict(zip((2, 4, 6), sorted(levels, reverse=True), strict=True))
    for made in results:
        assert isinstance(made, ClipPair)
        a, b = made.sides["a"], made.sides["b"]
        assert (a.latent - b.latent).abs().min() > 0
        assert a.media.shape == b.media.shape == (FRAMES, 3, 4, 6)


class ByFrame(RewardModel):
    """The score of a segment is a table's entry: by sample and by the number of the call."""

    spec = RewardSpec("by_frame", ("good", "other"), "any", (-9.0, 9.0), "", needs=("fps",))

    def __init__(self, table: list[list[float]]):
        self.table, self.calls = table, []

    def score(self, batch: MediaBatch) -> RewardOutput:
        column = [row[len(self.calls)] for row in self.table]
        self.calls.append((batch.media, list(batch.fps), list(batch.prompts)))
        values = torch.stack([tensor(column), torch.full((len(column),), torch.nan)], 1)
        return RewardOutput.build(self.spec, values)


def labelled(table: list[list[float]], **changes) -> tuple[list[ClipPair | SkippedClip], ByFrame]:
    reward = ByFrame(table)
    method = DensePairs(**{"seconds": 0.5} | changes)
    shop = regenerator(rewards=Rewards([reward], {"good": 2.0}))
    return method.make(shop, clips(len(table) // 2)), reward


# Rows: copies a of both clips, then copies b; columns: the four segments.
TABLE = [[1.0, 2.0, 3.0, 4.0], [0.0, 5.0, 0.5, 0.0], [0.5, 3.0, 3.0, 3.75], [0.0, 4.0, 1.0, 0.5]]


def test_segments_are_labelled_by_the_weighted_scores_of_their_own_frames():
    results, reward = labelled(TABLE)
    segments = [made.row["segments"] for made in results if isinstance(made, ClipPair)]
    assert [[s["label"] for s in part] for part in segments] == [[1, -1, 0, 1], [0, 1, -1, -1]]
    assert [(s["start"], s["stop"]) for s in segments[0]] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    # A latent frame is half a second; the first is the first frame alone.
    assert [media.shape[1] for media, _, _ in reward.calls] == [1, 2, 2, 2]
    assert reward.calls[0][1:] == ([4.0] * 4, ["p", "pp", "p", "pp"])
    media = torch.cat([part for part, _, _ in reward.calls], 1)
    made = results[1]
    assert isinstance(made, ClipPair)
    assert torch.equal(media[1], made.sides["a"].media)
    assert torch.equal(media[3], made.sides["b"].media)


def test_scores_of_a_copy_are_means_over_its_segments_and_only_of_weighted_dimensions():
    made = labelled(TABLE)[0][0]
    assert isinstance(made, ClipPair)
    assert (made.row["score_a"], made.row["score_b"]) == (2 * 2.5, 2 * 2.5625)
    assert made.row["scores_a"] == {"good": 2.5}


def test_differences_up_to_the_margin_are_ties_and_pairs_with_too_few_others_are_dropped():
    # Twice the difference counts: 1, -2, 0, 0.5 and 0, 2, -1, -1.
    first, second = labelled(TABLE, margin=1.0, min_decided=0.24)[0]
    assert isinstance(first, ClipPair)
    assert [s["label"] for s in first.row["segments"]] == [0, -1, 0, 0]
    assert isinstance(second, ClipPair)
    for few in labelled(TABLE, margin=1.0, min_decided=0.25)[0]:
        assert few == SkippedClip("too few segments with a preference: 25%", expected=True)


@pytest.mark.parametrize(("decided", "kept"), [(1, False), (2, True)])
def test_a_pair_is_kept_where_more_than_a_fifth_of_its_segments_has_a_preference(decided, kept):
    """One of five is exactly a fifth, which a float32 mean is not."""
    scores = ClipScores(torch.ones(2), {"warm": torch.ones(2)}, {})
    labels = torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0]) * (torch.arange(5) < decided)
    problem = DensePairs()._problem([scores] * 5, {"a": 0, "b": 1}, labels)
    assert problem == (
        None if kept else SkippedClip("too few segments with a preference: 20%", expected=True)
    )


def test_a_pair_without_any_preference_is_dropped_whatever_is_asked():
    (tie,) = labelled([[1.0, 2.0, 3.0, 4.0]] * 2, min_decided=0.0)[0]
    assert tie == SkippedClip("too few segments with a preference: 0%", expected=True)


def test_a_segment_whose_score_is_unknown_drops_its_pair_with_the_reason_and_no_other():
    table = [row.copy() for row in TABLE]
    table[2][1] = torch.nan
    lost, kept = labelled(table)[0]
    assert isinstance(kept, ClipPair)
    assert isinstance(lost, SkippedClip)
    assert lost.problem.startswith("no valid score: segment 1 of b: by_frame returned")
    assert not lost.expected


def test_longer_segments_are_fewer_calls():
    shop = regenerator()
    made = DensePairs(seconds=1.0).make(shop, clips(1))[0]
    assert isinstance(made, ClipPair)
    assert [(s["start"], s["stop"]) for s in made.row["segments"]] == [(0, 2), (2, 4)]
    assert shop.rewards.models[0].seen == [3, 4]
    assert (shop.rewards.costs.reward_calls, shop.rewards.costs.decodes) == (4, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"level": (0.8, 0.65)}, r"method\.level is \(0\.8, 0\.65\)"),
        ({"level": (0.65, 1.0)}, "within"),
    ],
)
def test_numbers_that_label_nothing_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DensePairs(**changes)


def test_dense_pairs_need_a_weighted_reward_and_local_pairs_take_none():
    with pytest.raises(ValueError, match="rewards is empty"):
        DensePairs().check(Rewards([], {}))
    DensePairs().check(Rewards([Warmth()], {"warm": 1.0}))
    with pytest.raises(ValueError, match="LocalPairs needs no reward"):
        LocalPairs().check(Rewards([Warmth()], {}))
    LocalPairs().check(Rewards([], {}))


# Local-DPO ----------------------------------------------------------------------------------------


def test_a_loser_is_its_winner_but_in_the_mask():
    for made, latent in zip(
        LocalPairs().make(regenerator(), clips(3)), clips(3).latents, strict=True
    ):
        assert isinstance(made, ClipPair)
        assert made.mask is not None
        winner, loser = made.sides["positive"].latent, made.sides["negative"].latent
        assert torch.equal(winner, latent)
        inside = made.mask.bool().expand_as(winner)
        assert torch.equal(winner[~inside], loser[~inside])
        assert (winner[inside] != loser[inside]).all()


def test_a_loser_is_denoised_by_its_share_of_the_steps_in_a_mask_of_its_share_of_places():
    method = LocalPairs(strengths=[0.75], share=(0.25, 0.25), max_shapes=1)
    shop = regenerator(num_steps=8)
    made = method.make(shop, clips(2))
    assert shop.rewards.costs.sampling_evaluations == 2 * 6
    assert [one.row for one in made if isinstance(one, ClipPair)] == [{"strength": 0.75}] * 2
    assert [int(one.mask.sum()) for one in made if isinstance(one, ClipPair)] == [6, 6]


def test_strengths_and_masks_are_drawn_for_each_clip_whatever_is_made_beside_it():
    some = LocalPairs().make(regenerator(num_steps=20), clips(24))
    rows = [one for one in some if isinstance(one, ClipPair)]
    assert {one.row["strength"] for one in rows} == {0.75, 0.8, 0.85}
    alone = LocalPairs().make(regenerator(num_steps=20), clips(1, first=9))[0]
    assert isinstance(alone, ClipPair)
    assert torch.equal(alone.mask, rows[9].mask)
    assert_close(alone.sides["negative"].latent, rows[9].sides["negative"].latent)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strengths": [0.8, 0.6]}, r"strengths are \[0\.8, 0\.6\]"),
        ({"strengths": []}, r"strengths are \[\]"),
        ({"share": (0.5, 0.2)}, r"share is \(0\.5, 0\.2\)"),
    ],
)
def test_masks_and_strengths_that_corrupt_nothing_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LocalPairs(**changes)


# How far, where and how real clips are made worse, by hand ----------------------------------------


SIGMAS = tensor([1.0, 0.9, 0.7, 0.4, 0.0])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("level", "step"), [(0.69, 2), (0.81, 1), (0.79, 2), (0.99, 1), (0.01, 3), (0.56, 2)]
)
def test_the_step_at_a_level_has_the_nearest_sigma_but_is_neither_pure_noise_nor_the_end(
    level, step
):
    assert step_at_level(SIGMAS, level) == step


@pytest.mark.parametrize(
    ("num_steps", "share", "step"), [(40, 0.75, 10), (50, 0.85, 8), (4, 0.05, 3), (7, 1.0, 0)]
)
def test_the_step_at_a_share_leaves_so_many_steps_and_at_least_one(num_steps, share, step):
    assert step_at_share(num_steps, share) == step


def test_outside_the_mask_is_the_real_clip_with_the_same_noise_at_the_level():
    x, clean, noise = tensor([[7.0, 8.0, 9.0]]), tensor([[1.0, 2.0, 3.0]]), tensor([[5.0, -2, 4]])
    got = restore_unmasked(x, clean, noise, tensor(0.25), tensor([[1.0, 0.0, 0.0]]))
    assert_close(got, tensor([[7.0, 1.0, 3.25]]))


def test_at_the_end_outside_the_mask_is_the_real_clip_to_the_last_bit():
    draw = seeded(3)
    x, clean, noise = (torch.randn(2, 3, 4, 5, 6, generator=draw) for _ in range(3))
    mask = (torch.rand(2, 1, 4, 5, 6, generator=draw) < 0.5).float()
    got = restore_unmasked(x, clean, noise, tensor(0.0), mask)
    inside = mask.bool().expand_as(x)
    assert torch.equal(got[~inside], clean[~inside])
    assert torch.equal(got[inside], x[inside])


@settings(max_examples=40, deadline=None)
@given(
    grid=st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(2, 6)),
    share=st.floats(0, 1),
    shapes=st.integers(1, 5),
    seed=st.integers(0, 999),
)
def test_a_mask_covers_its_share_exactly_and_is_never_empty_nor_all(grid, share, shapes, seed):
    mask = moving_mask(grid, share, shapes, seeded(seed))
    volume = mask.numel()
    assert mask.shape == grid
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    assert mask.sum() == min(max(round(share * volume), 1), volume - 1)


def test_a_mask_is_a_function_of_its_generator():
    first, again, other = (moving_mask((5, 8, 9), 0.3, 2, seeded(seed)) for seed in (4, 4, 5))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_mask_moves_and_changes_its_size():
    moved = resized = 0
    for seed in range(20):
        mask = moving_mask((6, 24, 24), 0.15, 1, seeded(seed))
        areas = mask.sum((1, 2))
        places = torch.stack([frame.nonzero().float().mean(0) for frame in mask if frame.any()])
        moved += bool((places[0] - places[-1]).norm() > 2)
        resized += bool(areas.max() > 1.3 * areas.min())
    assert moved >= 15
    assert resized >= 15


def test_a_mask_of_one_shape_is_in_one_piece_in_every_frame_and_of_more_shapes_may_not_be():
    def gaps(mask: torch.Tensor) -> bool:
        """Whether some row of some frame has a hole."""
        steps = mask.diff(dim=-1, prepend=torch.zeros(*mask.shape[:2], 1))
        return bool(((steps == 1).sum(-1) > 1).any())

    assert not any(gaps(moving_mask((4, 16, 17), 0.2, 1, seeded(s))) for s in range(20))
    assert any(gaps(moving_mask((4, 16, 17), 0.2, 5, seeded(s))) for s in range(20))


def test_a_single_place_cannot_be_masked_in_part():
    with pytest.raises(ValueError, match=r"grid of \(1, 1, 1\) has one element"):
        moving_mask((1, 1, 1), 0.5, 1, seeded(0))


# Segments of clips in latent frames and in frames, by hand ----------------------------------------


@pytest.mark.parametrize(
    ("num_frames", "length", "expected"),
    [
        (21, 4.0, [(0, 4), (4, 8), (8, 13), (13, 17), (17, 21)]),
        (4, 0.5, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (3, 50.0, [(0, 3)]),
        (7, 3.0, [(0, 4), (4, 7)]),
    ],
)
def test_spans_are_about_so_long_and_together_everything(num_frames, length, expected):
    assert split_spans(num_frames, length) == expected


@pytest.mark.parametrize(
    ("num_frames", "num_latent", "stride"), [(81, 21, 4), (97, 13, 8), (1, 1, 1), (5, 5, 1)]
)
def test_the_stride_is_that_of_a_causal_vae(num_frames, num_latent, stride):
    assert temporal_stride(num_frames, num_latent) == stride


@pytest.mark.parametrize(("num_frames", "num_latent"), [(80, 21), (5, 1), (3, 5)])
def test_frames_that_no_causal_vae_makes_are_refused_by_their_number(num_frames, num_latent):
    with pytest.raises(ValueError, match=f"{num_frames} frames from {num_latent} latent frames"):
        temporal_stride(num_frames, num_latent)


def test_the_first_latent_frame_is_the_first_frame_and_the_others_stand_for_a_stride_each():
    assert [find_frames(span, 4) for span in ((0, 1), (0, 4), (4, 8), (20, 21))] == [
        (0, 1),
        (0, 13),
        (13, 29),
        (77, 81),
    ]


def test_frames_of_spans_follow_each_other_without_gaps():
    parts = [find_frames(span, 4) for span in split_spans(21, 4.0)]
    assert [stop for _, stop in parts[:-1]] == [start for start, _ in parts[1:]]
    assert (parts[0][0], parts[-1][1]) == (0, 81)


def test_a_difference_up_to_the_margin_is_a_tie_and_an_unknown_score_prefers_nothing():
    a, b = tensor([[0.5, 0.25, 2.0, nan]]), tensor([[0.25, 0.5, 1.875, 1.0]])
    assert_close(compare_with_margin(a, b, 0.25), tensor([[0.0, 0.0, 0.0, 0.0]]))
    assert_close(compare_with_margin(a, b, 0.2), tensor([[1.0, -1.0, 0.0, 0.0]]))
    assert_close(compare_with_margin(a, b, 0.0), tensor([[1.0, -1.0, 1.0, 0.0]]))
