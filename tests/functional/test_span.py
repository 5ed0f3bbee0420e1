"""Spans of the trained steps of a rollout."""

import pytest

from flowalign.functional.surrogate import find_spans


@pytest.mark.parametrize(
    ("trained", "longest", "spans"),
    [
        ([0, 1, 2, 3, 4], 2, [[0, 1], [2, 3], [4]]),
        ([1, 2, 5, 6, 7], 3, [[1, 2], [5, 6, 7]]),
        ([3, 4], 1, [[3], [4]]),
        ([], 4, []),
    ],
)
def test_spans_are_runs_of_consecutive_steps(trained, longest, spans):
    assert find_spans(trained, longest) == spans
