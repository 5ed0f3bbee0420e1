"""Check that the first updates of a run change the velocity."""

import torch
from torch import Tensor

from flowalign.runs.session.session import Session
from flowalign.types import encode_requests
from flowalign.utils.costs import stage

ENOUGH_UPDATES = 20
"""Updates after warm-up before the check."""
LEAST_CHANGE = 1e-4
"""Root mean square of the change, relative to the velocity, below which a run warns."""


class VelocityCheck:
    """Comparison of the velocity of one sample at the start of a run and after 20 updates.

    A learning rate for whole networks hardly moves a LoRA, and nothing else in a run shows it. A
    resumed run, a run of fewer updates and a policy without a text encoder are not checked.
    """

    def __init__(self, session: Session):
        self.session, learner = session, session.learner
        self.due = ENOUGH_UPDATES + learner.cfg.warmup
        self.before: Tensor | None = None
        if session.first_step == 0 and learner.total_updates >= self.due:
            self.before = self._velocity()

    def after_step(self) -> dict[str, float]:
        """Return the change if it is due, and log a warning if it is too small."""
        learner, before = self.session.learner, self.before
        if before is None or learner.num_updates - learner.num_skipped < self.due:
            return {}
        after, self.before = self._velocity(), None
        assert after is not None
        change = float((after - before).norm() / before.norm())
        if change < LEAST_CHANGE:
            self.session.messages(
                f"warning: {self.due} updates changed the velocity by {change:.1e} of its size "
                f"(limit {LEAST_CHANGE:g}).\nRaise optimizer.learning_rate, which is "
                f"{learner.cfg.learning_rate:g}: rates of whole networks hardly move a LoRA. "
                "configs/tasks/lora_rate.yaml, layered last, sets one for a LoRA"
            )
        return {"check/velocity_change": change}

    @stage("check")
    @torch.no_grad()
    def _velocity(self) -> Tensor | None:
        """Return the velocity of a fixed sample, which is no cost of training."""
        policy = self.session.run.policy
        if policy.text_encoder is None:
            return None
        with self.session.costs.paused():
            cond = encode_requests(policy, policy.text_encoder.probe_requests()[:1])
            x = policy.noise(1, torch.Generator().manual_seed(0))
            return policy.velocity(x, policy.schedule(4)[1:2], cond)
