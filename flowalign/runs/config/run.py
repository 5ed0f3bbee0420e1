"""Define the settings of a run file; a component's constructor is its schema."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from flowalign.data.requests import read_located_requests, read_requests
from flowalign.distributed.processes import Processes
from flowalign.rewards.composite import Rewards
from flowalign.runs.policy_setup import check_device, encode_prompts, load_policy
from flowalign.training.checkpoint import Checkpoints
from flowalign.training.compatibility import check_requests
from flowalign.training.ema import Ema
from flowalign.training.evaluate import Evaluation
from flowalign.training.learner import Optimizer
from flowalign.training.recipe import Recipe, RunContext
from flowalign.types import (
    Offload,
    Policy,
    PromptConditioning,
    Quantization,
    RewardModel,
    Setup,
    Sharding,
    Speed,
)
from flowalign.types.ranges import FiniteFloat, PositiveInt, Seed
from flowalign.utils.costs import Costs


@dataclass(frozen=True, kw_only=True)
class Run:
    """Holds a run file: what is trained, by which recipe, on which rewards."""

    policy: Policy
    """Model that is trained, by dotted path of a class in `pipelines` or of your own."""
    num_steps: PositiveInt
    """Steps of the loop, each with its updates."""
    recipe: Recipe
    """Kind of training and its settings, by dotted path: `flowalign.training.PolicyGradient`,
    `flowalign.training.Matching` or your own."""
    rewards: list[RewardModel] = field(default_factory=list)
    """Reward models, by dotted path."""
    reward_weights: dict[str, FiniteFloat | None] = field(default_factory=dict)
    """Weight per reward dimension; unnamed dimensions are only logged, as are those with null,
    which takes back a weight that an earlier file gives."""
    conditioning: PromptConditioning | None = None
    """Words that the policy is asked with beside prompts, at training and at sampling, a class of
    `flowalign.conditioning`; rewards see the prompts. Null: none."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """AdamW and its learning rate."""
    ema: Ema | None = field(default_factory=Ema)
    """Averaged weights. Null: none; the live weights are evaluated."""
    evaluation: Evaluation | None = None
    """Held-out evaluation. Null: none."""
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    """When checkpoints are written, and how many are kept."""
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = field(default_factory=list)
    """Trackers besides metrics.jsonl, which is always written."""
    seed: Seed = 0
    """Seed of every random draw but those of the evaluation."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the policy; auto: a GPU if there is one."""
    quantization: Quantization = field(default_factory=Quantization)
    """Storage of frozen weights in fewer bits."""
    speed: Speed = field(default_factory=Speed)
    """Attention backend and compilation of the trained network."""
    sharding: Sharding = field(default_factory=Sharding)
    """Division of the weights, or of the tokens, among processes."""
    offload: Offload = "none"
    """Where frozen weights of the trained network wait. none: on the device. layers: in main
    memory, from where those of each layer come to the GPU while it computes."""
    prompt_cache: str | None = None
    """Folder where conditioning on prompts and references is kept, for all runs with these
    encoders: what is found there needs none of them. Null: every run encodes."""
    threads: PositiveInt | None = None
    """CPU threads per process. Null: torch's choice. One is best for small models on few cores."""
    output_dir: str = "runs/latest"
    """Run directory. If no file sets it: runs/ and the names of the run files, joined by
    hyphens."""

    def __post_init__(self) -> None:
        """Check everything that needs no weights."""
        if self.num_steps < 1:
            raise ValueError(f"num_steps is {self.num_steps}; it must be at least 1")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads is {self.threads}; it must be at least 1, or null")
        if self.device == "cpu" and self.policy.precision == "fp16":
            raise ValueError("policy.precision fp16 needs a GPU; on the CPU choose fp32 or bf16")
        if self.evaluation:
            self.evaluation.items()
        self._check_setup()
        self._check_guidance()
        rewards = self.build_rewards()
        self.recipe.check(self.context(rewards))
        if self.sharding.context_degree > 1:
            self.recipe.check_context()
        self._check_prompts(rewards)

    def _check_setup(self) -> None:
        self.policy.check_setup(self.setup)
        if self.device == "cpu":
            check_device(self.setup, torch.device("cpu"))
        if self.policy.network:
            self.policy.network.setup = self.setup

    def _check_prompts(self, rewards: Rewards) -> None:
        for path in self.prompt_files:
            check_requests(self.policy, rewards.models, read_located_requests(path))

    @property
    def setup(self) -> Setup:
        """Return how the weights are stored, computed with and divided."""
        return Setup(
            quantization=self.quantization,
            speed=self.speed,
            sharding=self.sharding,
            offload=self.offload,
            prompt_cache=self.prompt_cache,
        )

    @property
    def prompt_files(self) -> list[str]:
        """Return the files of requests that the run samples, for training and for evaluation."""
        held_out = self.evaluation.prompts.values() if self.evaluation else ()
        return [*self.recipe.prompt_files, *held_out]

    def load_policy(self, processes: Processes, costs: Costs | None = None) -> None:
        """Read the weights of the policy, stored, computed with and divided as asked.

        Evaluations of the network, and of copies that are made of it, are counted in `costs`.

        Raises:
            ValueError: The weights cannot be used, or not by this number of processes.
        """
        load_policy(self.policy, self.setup, processes, costs or Costs())

    def encode_prompts(self, processes: Processes) -> None:
        """Encode every prompt that `prompt_cache` lacks, if there is one, and free the encoders.

        Words beside prompts that are drawn at training are encoded when they are.
        """
        if self.prompt_cache is not None:
            found = [one for path in self.prompt_files for one in read_requests(path)]
            conditioning = self.conditioning
            asked = [conditioning.for_inference(one) for one in found] if conditioning else found
            encode_prompts(self.policy, [one.policy_request for one in asked], processes)

    def _check_guidance(self) -> None:
        guided = self.evaluation and self.evaluation.reward_guidance
        if guided and self.conditioning and self.conditioning.guidance:
            raise ValueError(
                "evaluation.reward_guidance and conditioning.guidance both guide the sampler: set "
                "one of them to null"
            )

    def build_rewards(self, costs: Costs | None = None) -> Rewards:
        """Return the reward models with their weights.

        Raises:
            ValueError: The models do not fit.
        """
        rewards = Rewards(
            self.rewards,
            {dim: weight for dim, weight in self.reward_weights.items() if weight is not None},
            self.recipe.on_failed_reward,
            costs or Costs(),
        )
        rewards.check_policy(self.policy)
        return rewards

    def load_rewards(self, rewards: Rewards) -> None:
        """Load the reward models; a served one says only now what it needs, which is checked.

        Raises:
            ValueError: Weights or servers cannot be used, or the run lacks what a model needs.
        """
        rewards.load()
        rewards.check_policy(self.policy)
        self._check_prompts(rewards)

    def context(self, rewards: Rewards) -> RunContext:
        """Return what the recipe needs to know of this run."""
        return RunContext(
            policy=self.policy,
            rewards=rewards,
            num_steps=self.num_steps,
            seed=self.seed,
            evaluates=self.evaluation is not None,
            evaluate_every=self.evaluation.every if self.evaluation else 0,
            optimizer=self.optimizer,
            has_ema=self.ema is not None,
            conditioning=self.conditioning,
        )
