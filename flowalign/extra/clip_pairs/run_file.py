"""Define the run file of `flowalign clip-pairs`: policy, videos, method, and rewards if needed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import yaml

from flowalign.data.readers import Dataset, open_dataset
from flowalign.extra.clip_pairs.denoiser import ClipRegenerator
from flowalign.extra.clip_pairs.generators import PairGenerator
from flowalign.rewards.composite import Rewards
from flowalign.rewards.config import WeightedReward, join_weights
from flowalign.types import Policy
from flowalign.types.ranges import Decay, DenoisingSteps, PositiveInt, Seed, require_ranges
from flowalign.utils.typed_settings import load_typed


@dataclass(frozen=True, kw_only=True)
class ClipPairs:
    """Run file of the generation of pairs; one YAML file sets all fields."""

    policy: Policy
    """Policy that noises and denoises the videos: the one that will be trained."""
    clips: str
    """Path of a dataset in any format of `flowalign score`: a folder with captions, or a table."""
    method: PairGenerator
    """Pair generator, by dotted path: `flowalign.extra.DensePairs`, `flowalign.extra.LocalPairs` or
    your own class."""
    schema: str = "auto"
    root: str | None = None
    """Folder where relative paths begin. Null: the folder of the file."""
    columns: dict[str, str | list[str]] | None = None
    """Columns of the dataset by their names in flowalign, such as `prompt: caption`. Null: as they
    are."""
    limit: PositiveInt | None = None
    """Number of records to read, from the first one. Null: all."""
    num_frames: PositiveInt | None = None
    """Frames read per video at the policy's fps; shorter videos are dropped. Null: the policy's
    number. Needed for policies without a fixed number of frames."""
    rewards: list[WeightedReward] = field(default_factory=list)
    """Reward models, each with its `weight`; methods compare the weighted sum."""
    num_steps: DenoisingSteps = 40
    """Steps of the sampler from pure noise; a video uses the steps below its noise level."""
    batch_size: PositiveInt = 4
    """Number of videos that are processed and written together."""
    micro_batch: PositiveInt = 4
    """Number of videos per network call and decode."""
    held_out: Decay = 0.1
    """Share of the prompts that are held out with their pairs, in [0, 1)."""
    max_dropped_fraction: Decay = 0.05
    """Largest share of unusable videos, in [0, 1]; above it, the command fails at the end."""
    seed: Seed = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: PositiveInt | None = None
    """CPU threads. Null: torch's choice."""
    output_dir: str = "runs/clip_pairs"

    def __post_init__(self) -> None:
        """Check everything that needs neither weights nor videos."""
        require_ranges(self)
        if self.num_steps < 2:
            raise ValueError(f"num_steps is {self.num_steps}; it must be at least 2")
        self._check_policy()
        rewards = self._build_rewards()
        rewards.check_policy(self.policy)
        self.method.check(rewards)

    def _check_policy(self) -> None:
        self.policy.check_stored_media("clips")
        if self.policy.fps is None:
            raise ValueError(
                f"the policy {type(self.policy).__name__} makes images; clip pairs need videos"
            )
        if self.policy.num_frames and self.num_frames not in (None, self.policy.num_frames):
            raise ValueError(
                f"num_frames is {self.num_frames}, but the policy makes {self.policy.num_frames} "
                "frames: remove num_frames, or change the policy's"
            )

    def _build_rewards(self) -> Rewards:
        return Rewards([one.model for one in self.rewards], join_weights(self.rewards))

    def dataset(self) -> Dataset:
        """Open the dataset of videos; raise ValueError if there is none."""
        return open_dataset(self.clips, self.schema, self.root, self.columns)

    def regenerator(self, device: torch.device) -> ClipRegenerator:
        """Load the policy and the rewards; raise ValueError if they cannot be used."""
        if self.threads:
            torch.set_num_threads(self.threads)
        rewards = self._build_rewards()
        rewards.load()
        rewards.check_policy(self.policy)  # a reward server reports its dimensions only now
        self.policy.load(device)
        rewards.costs.count(self.policy.denoiser)
        return ClipRegenerator(self.policy, rewards, self.num_steps, self.seed, self.micro_batch)


_CHANGES_NOTHING = ("output_dir", "device", "threads", "held_out", "max_dropped_fraction")


def settings_of(text: str, dataset: Dataset) -> dict[str, Any]:
    """Return the settings of a resolved run file that decide the pairs, for the manifest."""
    settings = yaml.safe_load(text)
    kept = {name: value for name, value in settings.items() if name not in _CHANGES_NOTHING}
    return kept | {"identity": dataset.identity()}


def load(config: str, overrides: Sequence[str] = ()) -> tuple[ClipPairs, str]:
    """Load a run file with overrides such as `--seed 3`; return it with the resolved YAML.

    Raises:
        ConfigError: The run file is wrong. The message has at most five lines; it names the key or
            value.
    """
    return load_typed(ClipPairs, config, overrides)
