"""The engine splits rows, adds the gradients of terms, steps once, and averages statistics."""

import pytest
import torch

from flowalign.training.engine import Statistics, Term, accumulate, make_update
from flowalign.types import Batch
from tests.fixtures.ranks import on_ranks
from tests.fixtures.training import flat, new_learner

ROWS = Batch({"row": torch.arange(5), "k": torch.tensor([0, 0, 0, 1, 1])})


def term(learner, rows=ROWS, micro_batch=2, **changes) -> Term:
    """The squared distance of all parameters to the position of a row, which is logged too."""

    def losses(part):
        distance = sum((p - row).square().sum() for p in learner.parameters for row in part["row"])
        value = distance if changes.get("sums") else distance / max(part.num_rows, 1)
        rows = 1.0 * part["row"][:, None]
        return [
            (torch.as_tensor(value), {"distance": torch.as_tensor(value).detach(), "rows": rows})
        ]

    return Term(rows=rows, losses=losses, micro_batch=micro_batch, **{"total": 5} | changes)


def gradients(learner):
    return torch.cat([p.grad.flatten() for p in learner.parameters])


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("micro_batch", [1, 2, 5])
def test_neither_the_micro_batch_nor_the_form_of_the_loss_changes_the_gradient(micro_batch, sums):
    learner = new_learner()
    before, statistics = flat(learner.policy.denoiser), Statistics(learner.processes)
    accumulate(learner, term(learner, micro_batch=micro_batch, sums=sums), statistics)
    torch.testing.assert_close(gradients(learner), 2 * (before - 2))  # the mean of 0 to 4
    mean = torch.stack([(before - row).square().sum() for row in range(5)]).mean()
    assert statistics.means() == {"distance": pytest.approx(float(mean))}
    assert statistics.gathered("rows").flatten().tolist() == [0, 1, 2, 3, 4]


def test_terms_add_up_to_one_step_and_a_term_without_rows_counts_nowhere():
    learner, other = new_learner(), new_learner()
    none = term(learner, ROWS.take(torch.zeros(0, dtype=torch.long)), total=0)
    make_update(learner, [none, term(learner), term(learner)])
    assert learner.num_updates == 1
    make_update(other, [term(other, Batch.concat([ROWS, ROWS]))])
    torch.testing.assert_close(flat(learner.policy.denoiser), flat(other.policy.denoiser))
    assert make_update(learner, [none]) == {}
    assert learner.num_updates == 1


def test_a_report_sees_the_means_before_the_step_and_may_drop_the_gradient():
    learner, seen = new_learner(), []
    metrics = make_update(learner, [term(learner)], lambda means: seen.append(means) or {"x": 1.0})
    assert {*metrics} == {"x", "optim/grad_norm", "optim/learning_rate", "optim/skipped"}
    assert {*seen[0]} == {"distance"}
    before = flat(learner.policy.denoiser)
    assert make_update(learner, [term(learner)], lambda _: None) == {}
    assert torch.equal(flat(learner.policy.denoiser), before)
    assert all(p.grad is None for p in learner.parameters)


def test_statistics_of_several_updates_are_averaged_by_the_caller():
    learner = new_learner(learning_rate=1e-6)
    both = Statistics(learner.processes, 0.5)
    first = make_update(learner, [term(learner)])["distance"]
    for _ in range(2):
        assert "distance" not in make_update(learner, [term(learner, statistics=both)])
    assert both.means()["distance"] == pytest.approx(first, rel=1e-3)


class Weighing:
    """Sums the gradients of step k with the weight k."""

    def __init__(self, learner):
        self.learner, self.steps, self.total = learner, [], 0.0

    def after(self, rows):
        self.steps.append(int(rows["k"][0]))
        self.total += self.steps[-1] * gradients(self.learner)
        self.learner.optimizer.zero_grad(set_to_none=True)

    def end(self):
        sizes = [p.numel() for p in self.learner.parameters]
        for p, part in zip(self.learner.parameters, self.total.split(sizes), strict=True):
            p.grad = part.view_as(p)


def test_an_observer_sees_each_micro_batch_and_may_replace_the_sum():
    learner = new_learner()
    before, weighing = flat(learner.policy.denoiser), Weighing(learner)
    one = term(learner, apart=("k",), after=weighing.after, end=weighing.end)
    accumulate(learner, one, Statistics(learner.processes))
    assert weighing.steps == [0, 0, 1]
    torch.testing.assert_close(gradients(learner), 2 / 5 * 2 * (before - 3.5))


def uneven(processes):
    """The first process has three rows and the second has none; losses gather in each part."""
    learner, met = new_learner(processes=processes), []
    rows = ROWS.take(torch.arange(3 if processes.rank == 0 else 0))
    one = term(learner, rows, total=3, in_step=True)

    def losses(part):
        met.append(len(processes.gather(part["row"])))
        return term(learner).losses(part)

    metrics = make_update(learner, [Term(**vars(one) | {"losses": losses})])
    return met, metrics["distance"], flat(learner.policy.denoiser)


@pytest.mark.slow
def test_processes_with_uneven_rows_make_the_step_of_one_process(tmp_path):
    (met, distance, one), (also, same, other) = on_ranks(uneven, 2, tmp_path)
    assert met == also == [2, 1]
    assert distance == same
    assert torch.equal(one, other)
    learner = new_learner()
    alone = make_update(learner, [term(learner, ROWS.take(torch.arange(3)), total=3)])
    assert distance == pytest.approx(alone["distance"])
    torch.testing.assert_close(flat(learner.policy.denoiser), one)


# Parts --------------------------------------------------------------------------------------------


def parts(batch, *args, **kwargs):
    return [part["row"].tolist() for part in batch.split(*args, **kwargs)]


def test_rows_that_differ_in_a_column_are_apart():
    assert parts(ROWS, 2) == [[0, 1], [2, 3], [4]]
    assert parts(ROWS, 2, apart=("k", "part")) == [[0, 1], [2], [3, 4]]
    assert parts(ROWS.take(torch.arange(0)), 2) == []


def test_rows_of_a_group_are_together_and_count_once_if_they_share_a_state():
    batch = ROWS.with_columns(group=torch.tensor([7, 3, 7, 3, 1]))
    assert parts(batch, 3, together="group") == [[0, 2], [1, 3, 4]]
    assert parts(batch, 1, together="group") == [[0, 2], [1, 3], [4]]
    assert parts(batch, 2, together="group", once=True) == [[1, 3, 4], [0, 2]]
    assert parts(batch, 2, apart=("k",), together="row", once=True) == [[0, 1], [2], [3, 4]]
