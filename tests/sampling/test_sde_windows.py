"""Which steps are trained, against windows worked out by hand and recorded from MixGRPO's code."""

import json
import re
from pathlib import Path

import pytest
import torch

from flowalign.sampling.sde_windows import (
    AllButLast,
    Backward,
    Fixed,
    Geometric,
    Random,
    RandomSubset,
    Sliding,
)

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
    "fixed from below": (Fixed(-1, 2), "[-1, 2)"),
    "fixed, empty": (Fixed(4, 4), "[4, 4)"),
    "fixed, reversed": (Fixed(5, 2), "[5, 2)"),
    "random, last start": (Random(size=3, low=0, high=7), "[6, 9)"),
    "random, from below": (Random(size=2, low=-2, high=2), "[-2, 0)"),
    "random, empty": (Random(size=2, low=5, high=5), "[5, 5)"),
    "random, no size": (Random(size=0), "[0, 0)"),
    "subset of none": (RandomSubset(0.1), "0.1"),
    "subset of more": (RandomSubset(1.2), "1.2"),
    "sliding": (Sliding(size=8), "[0, 8)"),
    "sliding, no size": (Sliding(size=0), "[0, 0)"),
}


@pytest.mark.parametrize(("window", "named"), OUTSIDE.values(), ids=OUTSIDE)
def test_a_window_outside_the_schedule_is_refused_for_every_draw(window, named):
    for seed in range(5):
        with pytest.raises(ValueError, match=re.escape(named)):
            steps(window, seed=seed)


def test_a_schedule_of_one_step_leaves_nothing_to_all_but_last():
    with pytest.raises(ValueError, match="outside the schedule of 1 steps"):
        steps(AllButLast(), 1)


@pytest.mark.parametrize("window", [Sliding(size=2, every=0), Sliding(size=2, stride=-1)])
def test_a_slide_that_cannot_move_forward_is_refused(window):
    with pytest.raises(ValueError, match="sliding window"):
        steps(window, iteration=30)


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
        (Geometric(size=2, ratio=0.0), r"ratio 0\.0; it must lie in"),
        (Backward(first=9), r"first 9, every 14: first must lie in \[2, 8\]"),
        (Backward(first=4, every=0), r"every 0"),
    ],
)
def test_windows_that_do_not_fit_are_refused(window, message):
    with pytest.raises(ValueError, match=message):
        steps(window)
