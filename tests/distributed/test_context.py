"""Ranks that compute the same samples together are one process to whoever shares out samples."""

import pytest
import torch

from flowalign.distributed.context_parallel import list_divisors
from flowalign.distributed.processes import join
from flowalign.rewards.composite import Rewards
from tests.fixtures.pixel import Redness
from tests.fixtures.ranks import on_ranks


class Undecided(Redness):
    """Says another number in every process, as a judge that is asked twice may."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.calls = rank, 0

    def score(self, batch):
        self.calls += 1
        output = super().score(batch)
        output.values.add_(self.rank)
        return output


def _seen(processes):
    """Of four ranks in two groups."""
    groups, rank = join("cpu", 2), processes.rank
    gradient = torch.nn.Parameter(torch.zeros(1))
    gradient.grad = torch.tensor([10.0**rank])
    groups.sum_gradients([gradient])
    reward = Undecided(rank)
    rewards = Rewards([reward], {"redness": 1.0}, ranks=groups)
    scores = rewards.score(rewards.batch(torch.full((2, 1, 3, 4, 4), 0.5), [], fps=None)).values
    return {
        "place": (groups.rank, groups.world, groups.ranks, groups.is_main, groups.ungrouped.rank),
        "share": list(groups.share(range(6))),
        "gather": groups.gather(torch.tensor([rank])).tolist(),
        "total": groups.sum_by_name({"a": 1.0 + rank}),
        "merged": groups.merge({rank: rank, "same": rank}),
        "of_first": groups.broadcast_first(rank),
        "gradient": gradient.grad.item(),
        "scores": scores[:, 0].tolist(),
        "asked": reward.calls,
        "counted": rewards.costs.reward_calls,
        "difference": groups.max_rank_difference([torch.nn.Parameter(torch.tensor([1.0 + rank]))]),
    }


def _out_of_step(processes):
    groups = join("cpu", 2)
    try:
        groups.barrier() if processes.rank else groups.scheduler.wait_for_group("evaluation")
    except RuntimeError as error:
        return str(error)


@pytest.mark.slow
def test_groups_of_ranks_are_one_process_each(tmp_path):
    ranks = on_ranks(_seen, 4, tmp_path)
    for rank, seen in enumerate(ranks):
        first = rank - rank % 2
        assert seen["place"] == (rank // 2, 2, 4, rank == 0, rank)
        assert seen["share"] == ([0, 1, 2], [3, 4, 5])[rank // 2]
        assert seen["gather"] == [0, 2]
        assert seen["total"] == {"a": 4.0}
        assert seen["merged"] == {0: 0, 2: 2, "same": 0}
        assert seen["of_first"] == first
        assert seen["gradient"] == 1111.0
        assert seen["scores"] == pytest.approx([ranks[first]["scores"][0]] * 2)
        assert (seen["asked"], seen["counted"]) == (1 - rank % 2, 2)
        assert seen["difference"] == 3.0
    assert ranks[2]["scores"][0] == pytest.approx(ranks[0]["scores"][0] + 2)


@pytest.mark.slow
def test_ranks_of_a_group_in_different_calls_are_told_instead_of_waiting(tmp_path):
    told = on_ranks(_out_of_step, 2, tmp_path)
    assert told == ["ranks wait for each other in different calls: ['evaluation', 'barrier']"] * 2


def test_ranks_that_would_be_left_over_are_refused():
    with pytest.raises(ValueError, match=r"context_degree is 2, which does not divide .* 1: "):
        join("cpu", 2)
    assert list_divisors(12, 20) == "1, 2, 4"
