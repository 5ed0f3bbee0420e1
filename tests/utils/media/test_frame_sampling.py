"""Which frames of a video are looked at."""

import numpy as np
import pytest

from reward_models.backbones.pixels import at_rate, each_second, evenly, starts


def test_two_frames_per_second_are_spread_from_the_first_to_the_last():
    assert at_rate(16, 8.0) == [0, 5, 10, 15]
    assert at_rate(81, 16.0) == [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]  # 35.6 and 44.4 round
    assert len(at_rate(129, 24.0)) == 10
    assert len(at_rate(49, 8.0)) == 12


@pytest.mark.parametrize(
    ("num_frames", "fps", "expected"),
    [
        (20, 8.0, 4),  # 5 wanted: 2.5 pairs, rounded to even
        (28, 8.0, 8),  # 7 wanted: 3.5 pairs, rounded to even
        (30, 24.0, 4),  # 2.5 wanted, at least 4
        (5, 24.0, 4),
        (3, 24.0, 2),  # at least 4, but whole pairs of what is there
        (2, 1.0, 2),
        (5000, 1.0, 768),
    ],
)
def test_the_number_of_frames_is_even_and_bounded(num_frames, fps, expected):
    kept = at_rate(num_frames, fps)
    assert len(kept) == expected
    assert kept[0] == 0
    assert kept[-1] == num_frames - 1


def test_rate_and_bounds_are_those_asked_for():
    assert at_rate(40, 8.0, rate=4.0) == evenly(40, 20)
    assert at_rate(40, 8.0, rate=4.0, most=7, multiple=3) == evenly(40, 6)
    assert at_rate(40, 8.0, rate=0.1, least=3, multiple=1) == [0, 20, 39]  # 19.5 rounds to even


def test_what_cannot_be_sampled_is_refused():
    with pytest.raises(ValueError, match="1 frames cannot give a multiple of 2"):
        at_rate(1, 8.0)
    for fps in (0.0, -8.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not a frame rate"):
            at_rate(16, fps)
        with pytest.raises(ValueError, match="not a frame rate"):
            each_second(16, fps)


def test_even_frames_round_halves_to_even():
    assert evenly(4, 3) == [0, 2, 3]
    assert evenly(6, 3) == [0, 2, 5]
    assert evenly(7, 1) == [0]
    assert evenly(2, 4) == [0, 0, 1, 1]


def test_each_second_gives_the_nearest_frame_and_the_earlier_of_two():
    assert each_second(10, 4.0) == [0, 4, 8]
    assert each_second(11, 4.0) == [0, 4, 8]  # ends at 2.5 seconds, rounded to even
    assert each_second(12, 4.0) == [0, 4, 8, 11]
    assert each_second(4, 1.5) == [0, 1, 3]  # 2/3 and 4/3 are as near to 1
    assert each_second(400, 10.0) == list(range(0, 240, 10))
    assert each_second(400, 10.0, most=2) == [0, 10]


def test_starts_of_equal_parts_are_those_of_numpy():
    assert starts(17, 8) == [0, 2, 4, 6, 8, 10, 12, 14]
    for num_frames in range(2, 200):
        expected = np.linspace(0, num_frames - 1, 8, endpoint=False, dtype=int)
        assert starts(num_frames, 8) == expected.tolist()
