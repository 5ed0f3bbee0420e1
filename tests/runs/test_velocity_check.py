"""A run whose first updates hardly change the velocity warns once, with the rate to raise."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from flowalign.runs import checks
from flowalign.runs.checks import VelocityCheck
from flowalign.runs.session import Session


class Policy:
    text_encoder = SimpleNamespace(probe_requests=lambda: ["a", "b"])
    weight = 1.0

    def noise(self, num_samples, generator):
        return torch.randn(num_samples, 3, generator=generator)

    def schedule(self, num_steps):
        return torch.linspace(1, 0, num_steps + 1)

    def velocity(self, x, sigma, cond):
        return self.weight * x * sigma * cond


@pytest.fixture
def session(monkeypatch):
    monkeypatch.setattr(checks, "encode_requests", lambda _, requests: len(requests))
    learner = SimpleNamespace(
        cfg=SimpleNamespace(warmup=5, learning_rate=5e-6),
        **{"total_updates": 30, "num_updates": 0, "num_skipped": 1},
    )
    session = Mock(spec=Session)
    session.run = SimpleNamespace(policy=Policy())
    session.costs = SimpleNamespace(paused=nullcontext)
    session.learner, session.first_step, session.said = learner, 0, []
    session.messages = session.said.append
    return session


@pytest.mark.parametrize(("weight", "warns"), [(1 + 9e-5, True), (1 + 2e-4, False)])
def test_the_change_is_relative_and_due_after_warm_up(session, weight, warns):
    check = VelocityCheck(session)
    session.run.policy.weight = weight
    session.learner.num_updates = 25  # one of them was skipped
    assert check.after_step() == {}
    session.learner.num_updates = 26
    change = check.after_step()["check/velocity_change"]
    assert change == pytest.approx(weight - 1, rel=1e-2)
    assert check.after_step() == {}
    assert ["optimizer.learning_rate, which is 5e-06" in line for line in session.said] == (
        [True] if warns else []
    )


@pytest.mark.parametrize(
    ("owner", "key", "value"),
    [
        ("session", "first_step", 3),
        ("learner", "total_updates", 24),
        ("policy", "text_encoder", None),
    ],
)
def test_nothing_is_evaluated_where_no_check_is_due(session, owner, key, value):
    named = {"session": session, "learner": session.learner, "policy": session.run.policy}
    setattr(named[owner], key, value)
    session.run.policy.velocity = pytest.fail if key != "text_encoder" else None
    check = VelocityCheck(session)
    session.learner.num_updates = 100
    assert check.after_step() == {}
