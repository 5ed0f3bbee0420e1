"""Train with policy gradients, with rewards credited to denoising steps (the GRPO family)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from flowalign.data.requests import Requests, read_requests
from flowalign.functional.transition import FlowSDE
from flowalign.sampling.sde_windows import AllButLast, Fixed
from flowalign.training.learner import Learner
from flowalign.training.policy_gradient.calibrate import FILE, calibrate_noise_levels
from flowalign.training.policy_gradient.credit_record import CreditRecorder, differs_from_outcome
from flowalign.training.policy_gradient.policy_gradient_loop import PolicyGradientLoop
from flowalign.training.policy_gradient.policy_gradient_settings import PolicyGradientSettings
from flowalign.training.policy_gradient.step_plan import plan_step, why_no_graphs
from flowalign.training.recipe import Log, Loop, Recipe, RecipePlan, RunContext
from flowalign.types import ModelPlan
from flowalign.utils.errors import require_default


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(PolicyGradientSettings, Recipe):
    """Recipe for online reinforcement learning: sample, score, credit steps, update, repeat."""

    @property
    @override
    def open_files(self) -> Sequence[str]:
        return (FILE,)

    @property
    @override
    def sampler(self) -> tuple[int, int]:
        return self.sampling.num_steps, self.sampling.micro_batch

    @override
    def check(self, run: RunContext) -> None:
        if self.calibration:
            self._check_calibration()
        reason = (
            "a policy gradient compares log-probabilities of the rollout with those of the update, "
            "which must have the same precision"
        )
        require_default(self, "recipe", reason, "sampling.precision")
        updates = self.measured and self.measured.measured == "update"
        if updates and run.optimizer.kind == "adamw_8bit":
            raise ValueError(
                "recipe.step_weight.measured is update, which needs moments in float32, but "
                "optimizer.kind is adamw_8bit; set it to adamw, or measured to gradient"
            )
        self.advantages.check("recipe", run, self.prompts)
        if self.kl_gate is not None:
            self.kl_gate.check(run.rewards)
        if self.spatial is not None:
            self.spatial.check("recipe.spatial", run.rewards)
        self.check_regulariser(run)
        if self.keep_graphs and (reason := why_no_graphs(self, run)):
            raise ValueError(
                f"recipe.keep_graphs reuses the network calls of the rollout, so {reason}; "
                "or set keep_graphs to false"
            )

    @override
    def check_context(self) -> None:
        self.rollouts.refuse_features()

    @override
    def plan(self, run: RunContext, model: ModelPlan, world: int) -> RecipePlan:
        return plan_step(self, run, model, world)

    @override
    def open(self, run: RunContext, learner: Learner, folder: Path, log: Log) -> Loop:
        requests = Requests(read_requests(self.prompts), run.seed, run.conditioning)
        settings = calibrate_noise_levels(self, run, learner, folder, log)
        recorder, branching = None, self.sampling.branching
        differs = self.spatial or differs_from_outcome(self.credit, branching)
        if differs and learner.processes.is_main:
            steps = run.num_steps, run.evaluate_every
            recorder = CreditRecorder(folder / "credit", self.credit, *steps)
        stored = self.regularised.open(run, learner, log) if self.regularised else None
        return PolicyGradientLoop(
            settings, learner, run.rewards, requests, run.seed, recorder, log, stored
        )

    def _check_calibration(self) -> None:
        sampling = self.sampling
        if isinstance(sampling.eta, list) or not isinstance(sampling.kernel, FlowSDE):
            raise ValueError(
                "calibration starts at one level of the kernel FlowSDE: "
                "set recipe.sampling.eta to a number and its kernel to FlowSDE"
            )
        if not isinstance(sampling.sde_window, AllButLast | Fixed):
            raise ValueError(
                "calibration needs the same stochastic steps in every iteration: "
                "set recipe.sampling.sde_window to AllButLast or Fixed"
            )
