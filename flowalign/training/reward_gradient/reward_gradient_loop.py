"""Run the reward-gradient loop.

    requests -> samples -> gradient path -> decode -> rewards -> gradient of latents -> update

A training *step* draws `prompts_per_step` x `samples_per_prompt` samples without gradient and makes
one *update*. A gradient path yields one or several *views* of each sample, which are decoded and
scored. The gradient at their latents is then backpropagated to the steps that the path replays.
"""

import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import repeat

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.data.requests import Requests
from flowalign.functional.noise_matching import sample_error
from flowalign.functional.path_gradient import reward_gradient_loss
from flowalign.rewards.composite import Rewards
from flowalign.sampling.rollout_replay import CachedReplay
from flowalign.training.latent_gradient import LatentGradient, latent_gradient
from flowalign.training.learner import Learner
from flowalign.training.matching.regulariser import StoredGradient
from flowalign.training.recipe import Log, Loop
from flowalign.training.reference import pull_back, unguided
from flowalign.training.reward_gradient.frame_choice import chosen_frames
from flowalign.training.reward_gradient.reward_gradient_settings import RewardGradientSettings
from flowalign.training.update_checks import WeightChecks
from flowalign.types import MediaBatch, RewardOutput, SampleView, Trajectory
from flowalign.types.credit import MatchedLosses
from flowalign.utils.seeds import generator


class RewardGradientLoop(Loop):
    """Loop that samples, scores differentiably, and updates the policy."""

    def __init__(
        self,
        cfg: RewardGradientSettings,
        learner: Learner,
        rewards: Rewards,
        requests: Requests,
        seed: int,
        stored: StoredGradient | None = None,
        log: Log = lambda _: None,
    ):
        self.stored = stored
        """Gradient of the stored data that regularises the run, or None."""
        self.cfg, self.learner, self.rewards, self.seed = cfg, learner, rewards, seed
        self.requests, self.log, self.views = requests, log, cfg.cost.views
        self.conditional = unguided(learner.policy) if cfg.detach_unconditional else None

    @override
    def run(self, steps: Iterable[int]) -> Iterator[dict[str, float]]:
        checks = WeightChecks(self.learner, self.cfg.on_failed_check, self.log)
        steps = list(steps)
        regularised = self.stored.steps(steps) if self.stored else repeat({})
        for step in steps:
            start = time.perf_counter()
            trajectory, first = self.sample(step)
            sampled = time.perf_counter()
            scores = self.accumulate(step, trajectory, first)
            metrics = self.metrics(scores) | next(regularised)
            metrics |= self.update(metrics["reward_invalid"])
            checks.after_update(metrics)
            done = time.perf_counter()
            metrics |= {
                "timing/sample": sampled - start,
                "timing/update": done - sampled,
                "timing/step": done - start,
                "throughput": self.cfg.examples_per_step / (done - start),
            }
            yield metrics | checks.metrics()

    def sample(self, step: int) -> tuple[Trajectory, int]:
        """Return this rank's samples of a step, and the global index of its first sample."""
        cfg, processes = self.cfg, self.learner.processes
        requests = self.requests.batch(step, cfg.prompts_per_step)
        local = processes.share(range(len(requests)))
        with torch.no_grad():
            trajectory = cfg.start.trajectory(
                self.learner.policy,
                [requests[i] for i in local],
                [generator(self.seed, "noise", step, i) for i in local],
            )
        return trajectory, local[0] * cfg.start.samples_per_prompt

    def accumulate(self, step: int, trajectory: Trajectory, first: int) -> Float[Tensor, "n _"]:
        """Accumulate the gradient of all samples; return one row for the log per view.

        Columns: weighted reward, loss, root mean square of the gradient, the divergence if `kl` is
        set, then the scores of all dimensions.
        """
        rows = []
        for part, samples in self._micro_batches(first, len(trajectory.requests)):
            keys = [(self.seed, step, first + int(i)) for i in samples]
            policy = self.learner.policy
            base = partial(pull_back, self.learner.reference)
            replay = CachedReplay(policy, trajectory, samples, keys, self.conditional, base)
            # The string is part of the seed. Changing it would change every recorded run.
            drawn = generator(self.seed, "connection", step, *([part] if part else []))
            for view in self.cfg.gradient_path(replay, drawn):
                rows.append(self._backward(step, replay, view))
                replay.evaluated.clear()  # frees the graph of this view before the next
        return torch.cat(rows)

    def _micro_batches(self, first: int, count: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the micro-batches of this rank's samples, with the index of their draw."""
        part = (first + torch.arange(count)) // (self.cfg.samples_per_draw or first + count)
        for draw in part.unique().tolist():
            for samples in (part == draw).nonzero()[:, 0].split(self.cfg.micro_batch):
                yield draw, samples

    def update(self, invalid: float) -> dict[str, float]:
        """Make the update; skip it if no sample of any process has a gradient."""
        if invalid < 1:
            return self.learner.step()
        self.learner.optimizer.zero_grad(set_to_none=True)
        return {}

    def metrics(self, rows: Float[Tensor, "n _"]) -> dict[str, float]:
        """Return means over the usable views of all processes; all processes must call it."""
        rows = self.learner.processes.gather(rows)
        usable = rows[rows[:, 0].isfinite()]
        names = ["reward_mean", "policy_loss", "latent_gradient", *(["kl"] if self.cfg.kl else [])]
        names += ["matched_loss"] if self.cfg.gradient_path.matches else []
        names += [f"reward/{dim}" for dim in self.rewards.dims]
        means = dict(zip(names, usable.mean(0).tolist(), strict=True))
        return means | {
            "reward_std": float(usable[:, 0].std(correction=0)) if len(usable) else float("nan"),
            "reward_invalid": 1 - len(usable) / len(rows),
        }

    def _backward(self, step: int, replay: CachedReplay, view: SampleView) -> Float[Tensor, "n _"]:
        """Backpropagate the gradient of a view to the policy, and return its rows for the log."""
        cfg = self.cfg
        found = self._latent_gradient(step, replay, view)
        weight = view.clean.new_ones(len(view.clean)) if view.weight is None else view.weight
        size = sample_error(found.gradient).sqrt().cpu()
        logged, count = [found.total, weight.cpu() * found.loss, size], cfg.examples_per_step
        if view.matched is not None:
            logged.append(self._match(view.matched, found))
            return torch.cat([torch.stack(logged, 1), found.output.values], 1)
        loss = reward_gradient_loss(view.clean, found.gradient, weight)
        if cfg.kl:
            away = self._divergence(replay)
            loss = loss + cfg.kl * away.sum()
            logged.append(away.detach().cpu())
        self.learner.backward(loss / (count * self.views))
        return torch.cat([torch.stack(logged, 1), found.output.values], 1)

    def _match(self, matched: MatchedLosses, found: LatentGradient) -> Float[Tensor, "n"]:
        """Backpropagate matched losses part by part, and return their sum for each sample.

        Samples with a failed reward have no gradient.
        """
        usable, total = found.total.isfinite(), torch.zeros_like(found.loss)
        for part in matched(found.gradient):
            each = part * usable.to(part)
            self.learner.backward(each.sum() / (self.cfg.examples_per_step * self.views))
            total += each.detach().to(total)
        return total

    def _latent_gradient(self, step: int, replay: CachedReplay, view: SampleView) -> LatentGradient:
        cfg, rewards, policy = self.cfg, self.rewards, self.learner.policy

        def score(batch: MediaBatch) -> RewardOutput:
            if cfg.relative is None:
                return rewards.score_with_gradient(batch)
            return cfg.relative.score(rewards, batch, step, view.inverted, view.place)

        requests = [replay.trajectory.requests[int(i)] for i in replay.samples]
        frames = chosen_frames(cfg.frames, policy.num_frames, generator(self.seed, "frames", step))
        found = latent_gradient(policy, rewards, score, cfg.loss, view.clean, requests, frames)
        if cfg.on_failed_reward == "raise":
            rewards.require(found.output, lambda i: f"prompt {requests[i].prompt!r}")
        return found

    def _divergence(self, replay: CachedReplay) -> Float[Tensor, "n"]:
        """Return the mean squared difference from the reference over a view's evaluations."""
        reference = self.learner.reference
        away = [e.v - reference.velocity(e.x, e.sigma, replay.cond) for e in replay.evaluated]
        return torch.stack([sample_error(difference) for difference in away]).mean(0)
