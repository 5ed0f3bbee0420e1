"""Which steps are trained, against windows worked out by hand and recorded from MixGRPO's code."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from flowalign.sampling.branching import Tree
from flowalign.sampling.sde_windows import (
    AllButLast,
    Backward,
    Fixed,
    FrameWindow,
    Geometric,
    Random,
    RandomSubset,
    Sliding,
    draw_frame_windows,
    share_outside_windows,
)
from flowalign.training.policy_gradient.batches import RolloutBatch, minibatches
from flowalign.training.policy_gradient.policy_gradient_loop import update
from flowalign.training.rollouts.collecting import rollout
from flowalign.types import Batch, ModelPlan, plain_requests
from flowalign.utils.seeds import generator
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.training import flat, new_learner, new_recipe, train

RECORDED = json.loads(Path("assets/golden/A_mixgrpo.json").read_text())["values"]["windows"]


def steps(window, num_steps=8, iteration=0, seed=0):
    return window.steps(num_steps, iteration, torch.Generator().manual_seed(seed))


def test_all_but_last_by_hand():
    assert steps(AllButLast(), 5) == (0, 1, 2, 3)
    assert steps(AllButLast(), 5, iteration=9) == (0, 1, 2, 3)


def test_fixed_by_hand():
    assert steps(Fixed(2, 5)) == (2, 3, 4)
    assert steps(Fixed(7, 8)) == (7,)
    assert steps(Fixed(0, 8), iteration=3) == tuple(range(8))


def test_random_draws_every_start_of_its_range_and_no_other():
    window = Random(size=3, low=1, high=4)
    drawn = {steps(window, seed=seed) for seed in range(60)}
    assert drawn == {(1, 2, 3), (2, 3, 4), (3, 4, 5)}


def test_random_starts_in_the_first_half_unless_told_otherwise():
    assert {steps(Random(size=2), 6, seed=s)[0] for s in range(60)} == {0, 1, 2}
    assert {steps(Random(size=2), 7, seed=s)[0] for s in range(60)} == {0, 1, 2}


def test_a_random_window_of_the_whole_schedule_never_has_the_last_step():
    """CogniEdit's five steps: 15 starts of 20 steps, 3 of 8, one of 6, and none of 5."""
    window = Random(size=5, share=1.0)
    for num_steps, starts in ((20, 15), (8, 3), (6, 1)):
        drawn = {steps(window, num_steps, seed=s)[0] for s in range(200)}
        assert drawn == set(range(starts))
    with pytest.raises(ValueError, match="window of 5 of 5 steps"):
        steps(window, 5)


def test_random_subset_is_a_share_of_all_steps_but_the_last():
    drawn = [steps(RandomSubset(0.6), 11, seed=s) for s in range(80)]
    assert {len(d) for d in drawn} == {6}
    assert all(tuple(sorted(set(d))) == d for d in drawn)
    assert {k for d in drawn for k in d} == set(range(10))
    assert len(set(drawn)) > 40


def test_random_subset_can_draw_from_the_first_steps_alone():
    """Flow-DPPO: three of the first five of ten steps."""
    drawn = [steps(RandomSubset(0.6, stop=5), 10, seed=s) for s in range(60)]
    assert {len(d) for d in drawn} == {3}
    assert {k for d in drawn for k in d} == set(range(5))
    with pytest.raises(ValueError, match="first 5 steps; there are 4"):
        steps(RandomSubset(0.6, stop=5), 4)


def test_equal_generators_choose_equal_windows():
    for window in (Random(2), RandomSubset(0.5)):
        assert steps(window, seed=4) == steps(window, seed=4)


def test_sliding_by_hand():
    window = Sliding(size=3, every=2, stride=2)
    got = [steps(window, 8, i) for i in range(8)]
    assert got[:2] == [(0, 1, 2)] * 2
    assert got[2:4] == [(2, 3, 4)] * 2
    assert got[4:] == [(4, 5, 6)] * 4  # stopped before the last step, whole


@pytest.mark.parametrize(
    ("num_steps", "stride", "starts"),
    [(8, 2, [0, 2, 4, 0, 2]), (9, 2, [0, 2, 4, 5, 0]), (6, 1, [0, 1, 2, 0, 1]), (4, 1, [0, 0])],
)
def test_a_window_that_rolls_back_starts_again_after_its_last_position(num_steps, stride, starts):
    window = Sliding(size=3, every=2, stride=stride, roll_back=True)
    assert [steps(window, num_steps, 2 * i)[0] for i in range(len(starts))] == starts


@pytest.mark.parametrize("num_steps", [5, 8, 25])
def test_sliding_never_reaches_the_last_step(num_steps):
    window = Sliding(size=4, every=1)
    got = [steps(window, num_steps, i) for i in range(2 * num_steps)]
    assert max(k for window in got for k in window) == num_steps - 2
    assert {len(window) for window in got} == {4}


@pytest.mark.parametrize("name", ["progressive_overlap_clip", "progressive_no_overlap"])
def test_sliding_is_mixgrpo_until_its_windows_shrink(name):
    """The reference truncates its last windows and then trains nothing; ours stays complete.

    Its `max_timesteps` leaves out the last step, which ours does by itself.
    """
    recorded = RECORDED[name]
    args = recorded["args"]
    stride = args["prog_overlap_step"] if args.get("prog_overlap") else args["group_size"]
    window = Sliding(args["group_size"], args["iters_per_group"], stride)
    whole = 0
    for iteration, expected in enumerate(recorded["windows_per_iteration"]):
        got = steps(window, args["max_timesteps"] + 1, iteration)
        if len(expected) == args["group_size"]:
            assert list(got) == expected
            whole += 1
        else:
            assert got == tuple(range(8 - args["group_size"], 8))
    assert whole >= 4


OUTSIDE = {
    "fixed": (Fixed(3, 9), "[3, 9)"),
    "fixed, empty": (Fixed(4, 4), "[4, 4)"),
    "fixed, reversed": (Fixed(5, 2), "[5, 2)"),
    "random, last start": (Random(size=3, low=0, high=7), "[6, 9)"),
    "random, empty": (Random(size=2, low=5, high=5), "[5, 5)"),
    "subset of none": (RandomSubset(0.1), "0.1"),
    "sliding": (Sliding(size=8), "[0, 8)"),
}


@pytest.mark.parametrize(("window", "named"), OUTSIDE.values(), ids=OUTSIDE)
def test_a_window_outside_the_schedule_is_refused_for_every_draw(window, named):
    for seed in range(5):
        with pytest.raises(ValueError, match=re.escape(named)):
            steps(window, seed=seed)


def test_a_schedule_of_one_step_leaves_nothing_to_all_but_last():
    with pytest.raises(ValueError, match="outside the schedule of 1 steps"):
        steps(AllButLast(), 1)


def test_geometric_prefers_early_starts_and_leaves_the_last_step_alone():
    """Starts 0, 1, 2, 3 of 6 steps with weights 1, 1/2, 1/4, 1/8: shares 8, 4, 2, 1 of 15."""
    drawn = [steps(Geometric(size=2, ratio=0.5), 6, seed=s) for s in range(600)]
    shares = [sum(d == (k, k + 1) for d in drawn) / 600 for k in range(4)]
    assert sum(shares) == pytest.approx(1)
    assert shares == pytest.approx([8 / 15, 4 / 15, 2 / 15, 1 / 15], abs=0.06)


def test_backward_grows_from_the_end_and_stops_at_the_whole():
    window = Backward(first=3, every=2)
    got = [steps(window, 5, i) for i in (0, 1, 2, 3, 4, 99)]
    assert got == [(2, 3), (2, 3), (1, 2, 3), (1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (Geometric(size=8), r"window \[0, 8\) lies outside"),
        (Backward(first=9), r"first 9: it must lie in \[2, 8\]"),
    ],
)
def test_windows_that_do_not_fit_are_refused(window, message):
    with pytest.raises(ValueError, match=message):
        steps(window)


# Clip-level rollouts: the samples of a prompt differ only in one window of latent frames ----------


SHAPE = (3, 5, 1, 2)
"""Channels, latent frames, height, width."""
TWO = ["a", "ccc"]


class Frames(PixelPolicy):
    """Videos of five latent frames with separate weights, which attend to no other frame."""

    fps = 8.0

    def __init__(self, mixing: float = 0.0):
        self.denoiser = nn.ParameterDict({"scale": torch.linspace(0.1, 0.5, 5)})
        self.mixing = mixing
        """How much of the mean over frames each frame sees: attention, of a kind."""

    def plan(self) -> ModelPlan:
        return ModelPlan(SHAPE, 5, 5, 4, 4, lambda n: torch.linspace(1, 0, n + 1))

    def noise(self, num_samples, generator):
        return torch.randn(num_samples, *SHAPE, generator=generator)

    def velocity(self, x, sigma, cond):
        seen = x + self.mixing * x.mean(2, keepdim=True)
        return (
            seen * self.denoiser["scale"][:, None, None]
            + 0.1 * cond["length"][:, None, None, :1, None]
        )

    def decode(self, x):
        return x.sigmoid().transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class Second(FrameWindow):
    """Always the latent frames 1 and 2."""

    def frames(self, num_frames, generator):
        return range(1, 1 + self.length)


CLIP = Second(length=2)


def drawn(clip, policy=None, **sampling):
    cfg = new_recipe({"num_steps": 4, "samples_per_prompt": 4, "frame_window": clip} | sampling)
    learner = new_learner(policy or Frames())
    return cfg, learner, rollout(cfg.rollouts, learner, plain_requests(TWO), 0, 0)


def differing(trajectory, k):
    """Prompt by prompt, the latent frames in which the samples differ at state k."""
    x = trajectory.state(k).unflatten(0, (-1, trajectory.group_size))
    sibling_noise_scale = (x - x[:, :1]).abs().amax((1, 2, 4, 5))
    return [row.nonzero().flatten().tolist() for row in sibling_noise_scale]


LAYOUTS = {
    "chain": {},
    "shared": {"seeds_per_prompt": 2, "sde_window": Fixed(1, 3)},
    "tree": {"branching": Tree(splits=[0, 2], sibling_noise_scale=2.0)},
}


@pytest.mark.parametrize("sampling", LAYOUTS.values(), ids=LAYOUTS)
def test_samples_of_a_prompt_differ_in_the_clip_and_nowhere_else(sampling):
    _, _, trajectory = drawn(CLIP, **sampling)
    assert differing(trajectory, 4) == [[1, 2], [1, 2]]
    start = trajectory.state(trajectory.num_steps)
    assert (start[0] - start[4]).abs().min() > 0, "prompts share nothing"


def test_without_a_clip_they_differ_everywhere():
    _, _, trajectory = drawn(None)
    assert differing(trajectory, 4) == [[0, 1, 2, 3, 4]] * 2


def test_a_random_clip_is_drawn_for_each_prompt_and_step_and_reaches_every_place():
    cfg, learner, _ = drawn(FrameWindow(length=2))
    seen = set()
    for step in range(12):
        clips = differing(rollout(cfg.rollouts, learner, plain_requests(TWO), 0, step), 4)
        assert all(len(clip) == 2 and clip[1] == clip[0] + 1 for clip in clips)
        seen |= {clip[0] for clip in clips}
    assert seen == {0, 1, 2, 3}
    again = [
        differing(rollout(cfg.rollouts, learner, plain_requests(TWO), 0, 3), 4) for _ in range(2)
    ]
    assert again[0] == again[1]


def test_what_is_shared_is_the_first_samples_and_each_alone_stays_a_standard_normal():
    noise = torch.randn(4000, *SHAPE, generator=torch.Generator().manual_seed(1))
    got = share_outside_windows(noise, [range(1, 3), range(4, 5)] * 1000)
    first, second = got[:2], got[2:4]
    assert torch.equal(first[1, :, [0, 3, 4]], noise[0, :, [0, 3, 4]])
    assert torch.equal(first[:, :, 1:3], noise[:2, :, 1:3])
    assert torch.equal(second[1, :, :4], noise[2, :, :4])
    assert torch.equal(second[:, :, 4], noise[2:4, :, 4])
    assert got[1::2].std() == pytest.approx(1.0, abs=0.01)


def with_advantages(trajectory, *values):
    """Of the four samples of each prompt, equal at all steps."""
    advantage = torch.tensor(values).repeat(2)[:, None].expand(8, 4).clone()
    mask = trajectory.trained
    samples = Batch({"advantage": advantage, "mask": mask})
    return RolloutBatch(trajectory, samples, Batch({"weight": torch.ones(4)}), mask)


def gradient(cfg, learner, trajectory, *values):
    """Of the surrogate at ratio 1, in the weight of each frame."""
    learner.policy.denoiser.zero_grad()
    rollouts = with_advantages(trajectory, *values)
    fields = rollouts.fields(learner.policy, learner.reference)
    for batch in minibatches(rollouts, torch.arange(8), 100):
        loss, _ = cfg.algorithm.loss(fields, batch)
        loss.backward()
    return learner.policy.denoiser["scale"].grad.clone()


CENTRED = (1.5, -0.25, -2.0, 0.75)


def test_with_equal_means_and_centred_advantages_shared_noise_has_no_gradient():
    """Frames that see no other have equal means outside the clip, whatever happens inside."""
    cfg, learner, trajectory = drawn(CLIP)
    grad = gradient(cfg, learner, trajectory, *CENTRED)
    assert grad[[0, 3, 4]].abs().max() < 1e-6
    assert grad[[1, 2]].abs().min() > 1e-3
    assert gradient(*drawn(None), *CENTRED).abs().min() > 1e-3, "own noise everywhere teaches all"


def test_shared_noise_has_a_gradient_where_advantages_are_not_centred():
    off_centre = [value + 1 for value in CENTRED]
    grad = gradient(*drawn(CLIP), *off_centre)
    assert grad[[0, 3, 4]].abs().min() > 1e-3


def test_where_frames_see_each_other_it_cancels_at_a_shared_start_and_not_after():
    """One initial noise for all: at step 0 all means are equal, later they are not."""
    cfg, learner, trajectory = drawn(CLIP, Frames(mixing=0.8), seeds_per_prompt=1)
    by_step = []
    for k in (0, 1):
        one = replace(trajectory, eta=trajectory.eta * (torch.arange(4) == k))
        by_step.append(gradient(cfg, learner, one, *CENTRED)[[0, 3, 4]].abs().max())
    assert by_step[0] < 1e-6
    assert by_step[1] > 1e-4


def test_transitions_keep_the_log_probabilities_of_the_policy():
    metrics = train(*_run(CLIP), steps=1)
    assert max(v for name, v in metrics[0].items() if "ratio_drift" in name) < 1e-6


def test_only_the_weights_of_the_clip_move():
    cfg, learner = _run(CLIP)
    before = flat(learner.policy.denoiser)
    batch = with_advantages(rollout(cfg.rollouts, learner, plain_requests(TWO), 0, 0), *CENTRED)
    update(cfg, learner, batch, 0, 0)
    moved = (flat(learner.policy.denoiser) - before).abs()
    assert moved[[1, 2]].min() > 100 * moved[[0, 3, 4]].max()


def _run(clip):
    return new_recipe({"frame_window": clip}), new_learner(Frames(), learning_rate=1e-2, eps=1e-3)


def test_clips_are_refused_for_pictures():
    learner, cfg = new_learner(), new_recipe({"frame_window": FrameWindow(length=1)})
    with pytest.raises(ValueError, match=r"frames of a video, .*shape \(3,\).*use null"):
        rollout(cfg.rollouts, learner, plain_requests(TWO), 0, 0)


@pytest.mark.parametrize("length", [0, 6])
def test_a_clip_outside_the_latent_frames_is_refused(length):
    with pytest.raises(ValueError, match=rf"length is {length}, .* 5 latent frames: choose 1 to 5"):
        draw_frame_windows(FrameWindow(length=length), SHAPE, [generator(0, "clip")])
