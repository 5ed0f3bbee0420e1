"""Define the settings of a run file; a component's constructor is its schema.

A constructor only stores settings. `load` reads weights, and `plan` reads only configuration files.
With weights in the constructor, a misspelt key in another section would cost the loading of a large
model; separate configuration classes would repeat every name.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch

from flowalign.data.compatibility import check_requests
from flowalign.data.requests import read_located_requests, read_requests
from flowalign.data.tensor_store import StoredPrompts
from flowalign.distributed.processes import Processes, join
from flowalign.rewards.composite import Rewards
from flowalign.rewards.config import WeightedReward, join_weights
from flowalign.runs.policy_setup import check_device, encode_prompts, load_policy
from flowalign.training.checkpoint import Checkpoints
from flowalign.training.held_out_evaluation import Evaluation
from flowalign.training.learner import Optimizer
from flowalign.training.recipe import Recipe, RunContext
from flowalign.training.reference import Ema
from flowalign.types import (
    Offload,
    Policy,
    PromptConditioning,
    Quantization,
    Setup,
    Sharding,
    Speed,
    with_setup,
)
from flowalign.utils.console import say
from flowalign.utils.costs import Costs
from flowalign.utils.ranges import PositiveInt, Range, Seed, require_ranges


@dataclass(frozen=True, kw_only=True)
class TrainingSamples:
    """Samples of the current weights during training, with fixed seeds and without rewards."""

    every: PositiveInt = 25
    """Number of training steps between samples."""
    num_prompts: PositiveInt = 8
    """Number of samples, of the first prompts."""
    prompts: str | None = None
    """Path of the prompts. Null: the training prompts."""
    num_steps: PositiveInt | None = None
    """Number of denoising steps. Null: as in evaluations, or as in training."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run file: a policy, a recipe that trains it, and rewards."""

    flat_lists: ClassVar = {"rewards": ("model", "weight")}
    """Fields of a reward, see `flowalign.utils.typed_settings`."""
    policy: Policy
    """Trained model, by dotted path of a class in `pipelines` or your own class."""
    num_steps: PositiveInt
    """Number of steps of the loop; each step makes one or more updates."""
    recipe: Recipe
    """Kind of training and its settings, by dotted path: `flowalign.training.PolicyGradient`,
    `flowalign.training.Matching` or your own class."""
    rewards: list[WeightedReward] = field(default_factory=list)
    """Reward models, by dotted path, each with its `weight`."""
    guidance: Literal["model", "off"] = "model"
    """Classifier-free guidance of the policy. model: as `policy` sets it. off: none, for methods
    that train the conditional velocity. A distilled scale stays an input of the network."""
    conditioning: PromptConditioning | None = None
    """Words added to the prompts of the policy, in training and in sampling: a class of
    `flowalign.extra`. Rewards see the plain prompts. Null: none."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """AdamW and its learning rate."""
    ema: Ema | None = field(default_factory=Ema)
    """Averaged weights. Null: none, and evaluation uses the live weights."""
    evaluation: Evaluation | None = None
    """Held-out evaluation. Null: none."""
    samples: TrainingSamples | None = None
    """Samples during training, in the run directory, the report and the trackers. Null: none."""
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    """Interval of checkpoints, and number of checkpoints kept."""
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = field(default_factory=list)
    """Trackers in addition to metrics.jsonl, which is always written."""
    notify: list[str] = field(default_factory=list)
    """Command and its arguments, started without a shell when the run finishes, fails or is
    interrupted, and on an alarm of `evaluation.watch`. It gets the event as JSON on its standard
    input. Empty: none."""
    seed: Seed = 0
    """Seed of every random draw except those of the evaluation."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the policy. auto: a GPU if there is one."""
    quantization: Quantization = field(default_factory=Quantization)
    """Storage of frozen weights in fewer bits."""
    speed: Speed = field(default_factory=Speed)
    """Attention backend and compilation of the trained network."""
    sharding: Sharding = field(default_factory=Sharding)
    """Sharding of the weights, or of the tokens, among processes."""
    offload: Offload = "none"
    """Storage of the frozen weights of the trained network. none: on the device. layers: in main
    memory; each layer moves to the GPU while it computes."""
    prompt_cache: str | None = None
    """Folder that stores encoded prompts and references, shared by all runs with the same encoders.
    Stored prompts need no encoder. Null: every run encodes."""
    text_micro_batch: PositiveInt | None = None
    """Prompts that the text encoders read together. Null: all of a rollout. It changes conditioning
    by rounding at most. A prompt cache encodes prompts one by one."""
    decode_micro_batch: PositiveInt | None = None
    """Samples that the VAE decodes together. Null: the micro-batch of the sampler. It changes no
    media but by rounding."""
    vae_tile: PositiveInt | None = None
    """Side in pixels of the overlapping tiles on which the VAE of images runs, one after another,
    as diffusers' `enable_tiling`. It changes media and encodings slightly. Null: whole images."""
    threads: Annotated[int, Range(least=1, most=1024)] | None = None
    """CPU threads per process. Null: torch's choice. One is best for small models on few cores."""
    output_dir: str = "runs/latest"
    """Run directory. Default: runs/ and the names of the run files, joined by hyphens."""

    def __post_init__(self) -> None:
        """Check everything that needs no weights."""
        require_ranges(self)
        if self.guidance == "off":
            object.__setattr__(self, "policy", self.policy.without_guidance())
        rows = self.recipe.micro_batch * self.policy.evaluations_per_velocity
        cache = None if self.prompt_cache is None else StoredPrompts(Path(self.prompt_cache))
        object.__setattr__(self, "policy", with_setup(self.policy, self.setup, rows, cache))
        self._check_setup()
        if self.evaluation:
            self.evaluation.items()
        self._check_guidance()
        rewards = self.build_rewards()
        self.recipe.check(self.context(rewards))
        if self.evaluation:
            weights = dict(zip(rewards.dims, rewards.weights.tolist(), strict=True))
            self.evaluation.check_watch(weights)
        if self.samples and not self.sampled:
            raise ValueError("samples.prompts is null, and the recipe has no prompts: name a file")
        if self.sharding.context_degree > 1:
            self.recipe.check_context()
        self._check_prompts(rewards)

    def _check_setup(self) -> None:
        if self.device == "cpu" and self.policy.precision == "fp16":
            raise ValueError("policy.precision fp16 needs a GPU; on the CPU choose fp32 or bf16")
        self.policy.check_setup(self.setup)
        if self.device == "cpu":
            check_device(self.setup, torch.device("cpu"))

    def _check_prompts(self, rewards: Rewards) -> None:
        for key, path in self._list_prompts():
            check_requests(self.policy, rewards.models, read_located_requests(path), key)

    def _list_prompts(self) -> list[tuple[str, str]]:
        """Return the key and the path of each prompt file, for training and for evaluation."""
        data = "" if hasattr(self.recipe, "prompts") else "data."
        files = [(f"recipe.{data}prompts", path) for path in self.recipe.prompt_files]
        if self.evaluation:
            files += [(f"evaluation.prompts.{a}", b) for a, b in self.evaluation.prompts.items()]
        if self.samples and self.samples.prompts:
            files.append(("samples.prompts", self.samples.prompts))
        return files

    @property
    def setup(self) -> Setup:
        """Return the settings of weight storage, speed and sharding."""
        return Setup(
            quantization=self.quantization,
            speed=self.speed,
            sharding=self.sharding,
            offload=self.offload,
            prompt_cache=self.prompt_cache,
            text_micro_batch=self.text_micro_batch,
            decode_micro_batch=self.decode_micro_batch,
            vae_tile=self.vae_tile,
        )

    @property
    def prompt_files(self) -> list[str]:
        """Return the prompt files that the run samples, for training and for evaluation."""
        return [path for _, path in self._list_prompts()]

    @property
    def sampled(self) -> Evaluation | None:
        """Return the samples during training as an evaluation; None if there are none."""
        if self.samples is None:
            return None
        file = self.samples.prompts or next(iter(self.recipe.prompt_files), None)
        if file is None:
            return None
        steps, rows = self.recipe.sampler or (40, 8)
        if self.evaluation:
            steps, rows = self.evaluation.num_steps, self.evaluation.micro_batch
        return Evaluation(
            prompts={"training": file},
            num_prompts=self.samples.num_prompts,
            num_steps=self.samples.num_steps or steps,
            micro_batch=rows,
            grid=self.samples.num_prompts,
        )

    def join(self, context_degree: int = 1) -> Processes:
        """Set the CPU threads, and return the processes that compute together."""
        if self.threads:
            torch.set_num_threads(self.threads)
        return join(self.device, context_degree)

    def load_policy(self, processes: Processes, costs: Costs | None = None) -> None:
        """Load the weights of the policy with the setup of this run.

        Evaluations of the network and of its copies are counted in `costs`.

        Raises:
            ValueError: The weights cannot be used at all, or not by this number of processes.
        """
        load_policy(self.policy, self.setup, processes, costs or Costs())

    def encode_prompts(self, processes: Processes) -> None:
        """Encode every prompt that `prompt_cache` lacks, if there is one, and free the encoders.

        Conditioning that is drawn at random during training is encoded at that time.
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

    def build_rewards(
        self,
        costs: Costs | None = None,
        log: Callable[[str], None] = say,
        ranks: Processes | None = None,
    ) -> Rewards:
        """Return the reward models with their weights, for the processes that score together.

        Raises:
            ValueError: The models contradict each other or the policy.
        """
        rewards = Rewards(
            [reward.model for reward in self.rewards],
            join_weights(self.rewards),
            self.recipe.on_failed_reward,
            costs or Costs(),
            log,
            ranks,
        )
        rewards.check_policy(self.policy)
        return rewards

    def load_rewards(self, rewards: Rewards) -> None:
        """Load the reward models, and check the needs that a reward server reports only now.

        Raises:
            ValueError: Weights or servers cannot be used, or the run lacks an input that a model
                needs.
        """
        rewards.load()
        rewards.check_policy(self.policy)
        self._check_prompts(rewards)

    def context(self, rewards: Rewards) -> RunContext:
        """Return the parts of this run that its recipe reads."""
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
