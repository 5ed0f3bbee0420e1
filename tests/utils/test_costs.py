"""Counting shares of network evaluations."""

import pytest

from flowalign.utils.costs import Costs


@pytest.mark.parametrize(("share", "calls", "total"), [(0.1, 7, 1), (0.6, 3, 2), (0.3, 10, 3)])
def test_shares_of_many_calls_are_rounded_once(share, calls, total):
    costs = Costs()
    for _ in range(calls):
        costs.count_share(share, 1)
    assert costs.sampling_evaluations == costs.network_evaluations == total
