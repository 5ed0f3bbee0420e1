"""Uses a reward model behind `flowalign serve-reward` like a local one."""

import os
import random
import time
from dataclasses import replace

import torch

from flowalign.rewards.protocol import Pixels
from flowalign.rewards.reward_client import RewardClient, failed_answer
from flowalign.types import (
    MediaBatch,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RewardOutput,
    RewardSpec,
)
from reward_models.wrappers.out_of_process import OutOfProcessReward


class RemoteReward(OutOfProcessReward):
    """Requests the scores of one of a server's models.

    `dims` must equal the dimensions that the server lists under /spec; `load` compares them. `8bit`
    pixels are rounded as in an image file and transfer four times faster. A failed request is sent
    again up to `retries` times, with growing delays. If it still fails, its samples are invalid. A
    request that the server rejects raises ValueError. If the server is busy, the request is
    repeated after the delay that the server names; this counts as a failure only after `timeout`
    seconds. The token is read from the environment variable `token_env`.
    """

    def __init__(
        self,
        url: str,
        dims: list[str],
        model: str | None = None,
        pixels: Pixels = "float32",
        batch_size: PositiveInt = 64,
        timeout: PositiveFloat = 60.0,
        retries: NonNegativeInt = 3,
        token_env: str = "FLOWALIGN_REWARD_TOKEN",
    ):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url {url!r} must start with http:// or https://")
        if batch_size < 1 or timeout <= 0 or retries < 0:
            raise ValueError(
                f"batch_size {batch_size}, timeout {timeout}, retries {retries}: need at least 1, "
                "more than 0, and at least 0"
            )
        self.url, self.model = url.rstrip("/"), model
        self.pixels: Pixels = pixels
        self.batch_size, self.timeout, self.retries = batch_size, timeout, retries
        self.token_env = token_env
        self.spec = RewardSpec(
            name=model or "remote",
            dims=tuple(dims),
            modality="any",
            scale=(-torch.inf, torch.inf),
            licence="that of the server's model",
            version=f"{url} {pixels}",
        )

    def connect(self) -> None:
        """Wait until the server has loaded the model."""
        token = os.environ.get(self.token_env)
        self._client = RewardClient(self.url, self.model, self.timeout, token)
        self._client.wait_until_ready()
        theirs = self._client.spec(self.pixels)
        self.take_over(replace(theirs, name=self.spec.name), f"{self.url} gives")

    def chunk_size(self, num_samples: int) -> int:
        """Return the batch size, or the number of all samples if the model compares groups."""
        return num_samples if "groups" in self.spec.needs else self.batch_size

    def request(self, batch: MediaBatch) -> RewardOutput:
        """Return the scores of the batch; its samples are invalid after too many failures."""
        message, failures = self._client.pack(batch, self.pixels), 0
        until = time.monotonic() + self.timeout
        while True:
            answer = self._client.score(message, self.spec, len(batch))
            if isinstance(answer, RewardOutput):
                return answer
            if answer.retry_after is not None and time.monotonic() < until:
                time.sleep(answer.retry_after * random.uniform(1.0, 1.5))
                continue
            failures += 1
            if failures > self.retries:
                break
            time.sleep(min(0.25 * 2**failures, 8.0) * random.uniform(0.5, 1.0))
        reason = f"the reward server failed {failures} times, last with {answer.why} ({self.url})"
        return failed_answer(self.spec, len(batch), reason)
