"""Make examples from the policy's own samples (online DPO): sample, score, pair, learn, repeat."""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.data.preference.pair_rules import BestWorst, Rule
from flowalign.data.requests import Requests, read_requests
from flowalign.distributed.processes import Processes
from flowalign.rewards.composite import Rewards
from flowalign.sampling.rollout import generate
from flowalign.training.matching.source import NO_LABELS, Batch, BatchStream, DataSource
from flowalign.training.recipe import Log, RunContext
from flowalign.types import Examples, Label, Policy, Request
from flowalign.utils.ranges import DenoisingSteps, GroupSize, PositiveInt
from flowalign.utils.seeds import generator


@dataclass(frozen=True, kw_only=True)
class Rollouts(DataSource):
    """Samples prompts by the deterministic sampler, and pairs the samples by weighted rewards."""

    prompts: str
    """Path of a prompts file: a text file, one a line, or JSONL with a field `prompt`,
    and `image`, `images` or `mask` where the policy takes them."""
    prompts_per_step: PositiveInt = 16
    """Prompts of a step, over all processes."""
    samples_per_prompt: GroupSize = 8
    """K, samples of a prompt among which pairs are chosen; at least 2."""
    num_steps: DenoisingSteps = 10
    """Denoising steps of the sampler."""
    rule: Rule = field(default_factory=BestWorst)
    """Rule that chooses the pairs among the samples of a prompt."""
    micro_batch: PositiveInt = 64
    """Samples per network call, decode and reward call."""
    on_failed_reward: Literal["raise", "drop_sample"] = "raise"
    """raise: a failed reward ends the run. drop_sample: a sample without a score is not paired."""

    def __post_init__(self) -> None:
        """Reject numbers with which nothing can be compared."""
        if self.samples_per_prompt < 2:
            raise ValueError(
                f"recipe.data.samples_per_prompt is {self.samples_per_prompt}; "
                "a pair takes at least 2"
            )
        for name in ("prompts_per_step", "num_steps", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"recipe.data.{name} is {getattr(self, name)}; it must be at least 1"
                )

    @property
    @override
    def paired(self) -> bool:
        return True

    @property
    @override
    def provides(self) -> Set[Label]:
        return {"labels"}

    @property
    @override
    def needs_expert(self) -> bool:
        return False

    @property
    @override
    def examples_per_step(self) -> int:
        """Return the number of pairs if no two samples are equally good."""
        return self.prompts_per_step * self.rule.most(self.samples_per_prompt)

    @property
    @override
    def prompt_files(self) -> list[str]:
        return [self.prompts]

    @override
    def check(self, run: RunContext) -> None:
        """Raise ValueError if no reward decides which sample is better."""
        read_requests(self.prompts)
        if not run.rewards.weights.any():
            raise ValueError(
                "recipe.data of class Rollouts pairs samples by rewards: name reward models in "
                "rewards, and weigh at least one dimension in reward_weights"
            )

    @override
    def plan(self, evaluations_per_velocity: int, num_rewards: int) -> dict[str, str]:
        samples = self.prompts_per_step * self.samples_per_prompt
        evaluations = samples * self.num_steps * evaluations_per_velocity
        return {
            "samples per step": f"{samples} = {self.prompts_per_step} prompts x "
            f"{self.samples_per_prompt}",
            "pairs per step": f"at most {self.examples_per_step}",
            "sampling evaluations per step": f"{evaluations}",
            "decodes per step": f"{samples}",
            "reward calls per step": f"{samples * num_rewards}",
        }

    @override
    def open(
        self,
        policy: Policy,
        rewards: Rewards,
        seed: int,
        processes: Processes,
        requires: Set[Label] = NO_LABELS,
        log: Log = lambda _: None,
    ) -> "RolloutStream":
        """Check that every process samples something; batches are made at their steps."""
        if self.prompts_per_step < processes.world:
            raise ValueError(
                f"recipe.data.prompts_per_step is {self.prompts_per_step}, "
                f"fewer than the {processes.world} processes"
            )
        rewards = replace(rewards, on_failure=self.on_failed_reward)
        return RolloutStream(self, policy, rewards, seed, processes)


class RolloutStream(BatchStream):
    """Samples batches from the policy as it is at each step."""

    def __init__(
        self, cfg: Rollouts, policy: Policy, rewards: Rewards, seed: int, processes: Processes
    ):
        self.cfg, self.policy, self.rewards, self.seed = cfg, policy, rewards, seed
        self.processes = processes
        self.requests = Requests(read_requests(cfg.prompts), seed)

    @override
    def batches(self, steps: Iterable[int]) -> Iterator[Batch]:
        """Sample each batch at its step."""
        for step in steps:
            yield self._batch(step)

    @override
    def held_out(self) -> Examples | None:
        """Return None: pairs age with the policy that made them."""
        return None

    def _batch(self, step: int) -> Batch:
        cfg, requests = self.cfg, self.requests.batch(step, self.cfg.prompts_per_step)
        local = list(self.processes.share(range(len(requests))))
        latents, scores = self._sampled(step, [requests[i] for i in local], local)
        total = (scores.nan_to_num() * self.rewards.weights).sum(1)
        total = total.where(self.rewards.usable(scores.isfinite()), torch.tensor(torch.nan))
        weighted = self.rewards.weights != 0
        better = scores[:, weighted] * self.rewards.weights[weighted].sign()
        found = [
            cfg.rule.pairs(some, t)
            for some, t in zip(
                better.split(cfg.samples_per_prompt),
                total.split(cfg.samples_per_prompt),
                strict=True,
            )
        ]
        examples = self._paired(latents, scores, [requests[i] for i in local], found)
        counts = self.processes.gather(torch.tensor([len(examples.latents) // 2]))
        first = int(counts[: self.processes.rank].sum())
        return Batch(examples, first, int(counts.sum()), self._metrics(scores, total, counts))

    def _sampled(
        self, step: int, requests: Sequence[Request], places: Sequence[int]
    ) -> tuple[Float[Tensor, "n *latent"], Float[Tensor, "n R"]]:
        """Draw K samples of each request, and return them with all their rewards."""
        cfg, copies = self.cfg, range(self.cfg.samples_per_prompt)
        repeated = [request for request in requests for _ in copies]
        seeds = [generator(self.seed, "rollout", step, i, k) for i in places for k in copies]
        policy = self.policy
        latents = generate(policy, repeated, cfg.num_steps, seeds, cfg.micro_batch)
        scoring = self.rewards.scoring()
        groups = [i for i in places for _ in copies]
        for start in range(0, len(repeated), cfg.micro_batch):
            part = slice(start, start + cfg.micro_batch)
            media = policy.decode(latents[part]).cpu()
            self.rewards.costs.decodes += len(media)
            scoring.add(self.rewards.batch(media, repeated[part], groups[part], policy.fps))
        output = scoring.result()
        if cfg.on_failed_reward == "raise":
            self.rewards.require(output, lambda i: f"sample {i}, prompt {repeated[i].prompt!r}")
        return latents, output.values.float()

    def _paired(
        self,
        latents: Float[Tensor, "n *latent"],
        scores: Float[Tensor, "n R"],
        requests: Sequence[Request],
        found: Sequence[tuple[Int[Tensor, "_"], Int[Tensor, "_"]]],
    ) -> Examples:
        """Return the winners of all requests, then their losers."""
        starts = range(0, len(latents), self.cfg.samples_per_prompt)
        offset = zip(found, starts, strict=True)
        winners, losers = (
            torch.cat([side + start for side, start in zip(sides, starts, strict=True)])
            for sides in zip(*(pair for pair, _ in offset), strict=True)
        )
        rows = torch.cat([winners, losers])
        owner = (rows // self.cfg.samples_per_prompt).to(latents.device)
        cond = self.policy.encode(requests)
        return Examples(
            latents=latents[rows.to(latents.device)],
            cond={name: value[owner] for name, value in cond.items()},
            paired=True,
            weight=torch.ones(len(rows)),
            desirable=torch.arange(len(rows)) < len(winners),
            scores=dict(zip(self.rewards.dims, scores[rows].unbind(1), strict=True)),
        )

    def _metrics(
        self, scores: Float[Tensor, "n R"], total: Float[Tensor, "n"], counts: Int[Tensor, "w"]
    ) -> dict[str, float]:
        """Return statistics of the rewards of all processes' samples."""
        all_scores, totals = self.processes.gather(scores), self.processes.gather(total)
        usable = totals[totals.isfinite()]
        means = zip(self.rewards.dims, all_scores.nanmean(0).tolist(), strict=True)
        nothing = float("nan")
        return {
            **{f"reward/{dim}": mean for dim, mean in means},
            "reward_mean": float(usable.mean()) if len(usable) else nothing,
            "reward_std": float(usable.std(correction=0)) if len(usable) else nothing,
            "reward_invalid": 1 - len(usable) / len(totals),
            "pairs": float(counts.sum()),
        }
