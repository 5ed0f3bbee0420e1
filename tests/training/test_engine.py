"""The engine adds the gradients of parts, and averages what they report."""

from functools import partial

import torch

from flowalign.training.engine import Accumulation, Part
from tests.fixtures.training import new_learner


def part(learner, share, target, label=0) -> Part:
    """The squared distance of all parameters to a target, which is logged too."""

    def loss():
        value = sum((p - target).square().sum() for p in learner.parameters)
        return value, {"distance": value.detach()}

    return Part(share, loss, label)


def test_the_gradient_is_the_mean_of_the_parts_by_their_shares():
    learner = new_learner()
    before = [p.detach().clone() for p in learner.parameters]
    gradient = Accumulation(learner)
    gradient.add_all([part(learner, 0.25, 1.0), part(learner, 0.75, 3.0)])
    for p, old in zip(learner.parameters, before, strict=True):
        torch.testing.assert_close(p.grad, 2 * (old - 2.5))  # 0.25 * 1 + 0.75 * 3
    near, far = (sum((p - t).square().sum() for p in before) for t in (1.0, 3.0))
    torch.testing.assert_close(
        gradient.means(), {"distance": float(0.25 * near + 0.75 * far)}, rtol=1e-6, atol=1e-6
    )


def test_an_empty_part_is_evaluated_but_has_no_gradient_and_no_label():
    learner, calls = new_learner(), []
    empty = Part(0.0, lambda: calls.append("empty") or (torch.tensor(torch.nan), {}), 7)
    assert list(Accumulation(learner).add([empty, part(learner, 1.0, 0.0, 3)])) == [3]
    assert calls == ["empty"]
    assert all(p.grad.isfinite().all() for p in learner.parameters)


def test_statistics_of_several_updates_are_scaled():
    learner = new_learner()
    gradient = Accumulation(learner, scale=0.5)
    for value in (2.0, 4.0):
        loss = partial(lambda v: (0 * learner.parameters[0].sum(), {"x": torch.tensor(v)}), value)
        gradient.add_all([Part(1.0, loss)])
    assert gradient.means() == {"x": 3.0}


def test_a_process_without_parts_has_no_statistics_of_its_own():
    assert Accumulation(new_learner()).means() == {}
