"""Runs a reward model in a separate process and environment on the training machine."""

import re
import shutil
import sys
from typing import Any

from flowalign.rewards.checked import RewardGone
from flowalign.rewards.reward_client import failed_answer
from flowalign.rewards.scorer import Scorer, declare
from flowalign.types import MediaBatch, NonNegativeInt, PositiveFloat, RewardOutput
from reward_models.wrappers.out_of_process import OutOfProcessReward


class ScorerProcess(OutOfProcessReward):
    """Scores with a reward model in a separate process on this machine.

    `reward` is an entry of `rewards:`, a class with its settings. `python` is the interpreter of an
    environment with flowalign and its extra `serve` (null: the current one). `device` is `cpu` or
    `cuda:N`, by default the device of the training process. Without `dims` the class is also
    constructed in the training process, so that its settings and needs are checked before anything
    starts. With `dims` it need not be importable in the training process. Each process of a run has
    a separate scorer.

    The scorer gets each batch whole, in float32. It has `timeout` seconds per batch and
    `start_timeout` seconds to load. A scorer that dies is restarted, up to `restarts` times per
    run, and gets the batch again; after that the run ends. There is no gradient.
    """

    def __init__(
        self,
        reward: dict[str, Any],
        python: str | None = None,
        device: str | None = None,
        dims: list[str] | None = None,
        timeout: PositiveFloat = 600.0,
        start_timeout: PositiveFloat = 1800.0,
        restarts: NonNegativeInt = 3,
    ):
        self.python = shutil.which(python or sys.executable) or ""
        if not self.python:
            raise ValueError(
                f"python of a scorer is {python!r}, which is not an executable on this machine"
            )
        if device is not None and not re.fullmatch(r"cpu|cuda:\d+", device):
            raise ValueError(f"device of a scorer is {device!r}; it must be cpu, cuda:N or null")
        self.reward, self.device = reward, device
        self.timeout, self.start_timeout, self.restarts = timeout, start_timeout, restarts
        self.spec = declare(reward, dims)

    def connect(self) -> None:
        """Start the process, and wait until it has loaded the model."""
        self._scorer = Scorer(self.reward, self.python, self.device, self.timeout)
        self._client = self._scorer.ready(self.start_timeout)
        self.take_over(self._client.spec("float32"), f"the scorer of {self._scorer.name} gives")

    def request(self, batch: MediaBatch) -> RewardOutput:
        """Return the scores of the batch; a process that died is restarted."""
        message = self._client.pack(batch, "float32")
        while True:
            answer = self._client.score(message, self.spec, len(batch))
            if isinstance(answer, RewardOutput):
                return answer
            why = self._scorer.ending() if answer.disconnected else ""
            if not why:
                return failed_answer(self.spec, len(batch), f"the scorer failed with {answer.why}")
            self._restart(why)

    def _restart(self, why: str) -> None:
        """Restart the process; raise RewardGone if no restarts are left or the start fails."""
        if self.restarts == 0:
            raise RewardGone(f"the process of the reward {self.spec.name!r} died: {why}")
        self.restarts -= 1
        try:
            self.connect()
        except ValueError as error:
            raise RewardGone(
                f"the process of the reward {self.spec.name!r} died, and: {error}"
            ) from error
