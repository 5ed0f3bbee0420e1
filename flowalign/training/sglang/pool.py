"""Sample rollouts on SGLang-Diffusion servers, with checks after each sync of the weights."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, NoReturn, TypeVar

from torch import Tensor
from typing_extensions import override

from flowalign.distributed.processes import Processes
from flowalign.rewards.composite import Rewards
from flowalign.training.learner import Learner, TrainingFailure
from flowalign.training.rollouts.collecting import RolloutSampler
from flowalign.training.rollouts.trajectory_tensors import to_tensors
from flowalign.training.sglang.client import ServerError, ServerLost, SGLangServer
from flowalign.training.sglang.compare import (
    REWARD_PROMPTS,
    REWARD_SAMPLES,
    BackendComparison,
)
from flowalign.training.sglang.messages import (
    SampleReader,
    first_seed,
    rollout_request,
    to_trajectory,
)
from flowalign.training.sglang.weights import SyncedWeights
from flowalign.training.workers import RolloutPool, RolloutWorkers
from flowalign.training.workers.rollout_pool import Answer
from flowalign.types import Request
from flowalign.utils.seeds import generator

T = TypeVar("T")
Samples = list[list[dict[str, Tensor]]]


class SGLangPool(RolloutPool):
    """Servers of one training process. `sampler` samples the same rollouts in this process."""

    same_kernels = False

    def __init__(
        self,
        cfg: RolloutWorkers,
        sampler: RolloutSampler,
        rewards: Rewards,
        processes: Processes,
        num_steps: int,
        log: Callable[[str], None] = lambda _: None,
    ):
        assert cfg.sglang is not None, "settings without servers have worker processes"
        self.servers = [
            SGLangServer(url, cfg.timeout)
            for url in cfg.sglang.urls[processes.rank :: processes.world]
        ]
        super().__init__(cfg, num_steps, len(self.servers))
        self.sglang, self.sampler, self.policy, self.log = cfg.sglang, sampler, sampler.policy, log
        self.costs, self.restarts = rewards.costs, cfg.restarts
        sampling, seed = sampler.cfg.sampling, sampler.requests.seed
        self.comparison = BackendComparison(self.policy, rewards, sampling, seed)
        self.weights = SyncedWeights(cfg.sglang)
        self.precision, *_ = [self._ask(one, self._check_model) for one in self.servers]
        self._threads = [ThreadPoolExecutor(1, "sglang") for _ in self.servers]
        self._parts: list[tuple[Sequence[int], Future[tuple[Samples, float]]]] = []
        self._step, self._noise = 0, dict[str, Tensor]()

    @cached_property
    def reader(self) -> SampleReader:
        """Return the reader of answers; it needs the loaded policy."""
        return SampleReader(self.policy, self.sampler.cfg.sampling.num_steps)

    @override
    def begin(self, step: int, parts: Sequence[Sequence[int]], learner: Learner) -> None:
        self._step, self.checks = step, {}
        _ = self.reader  # made here, because the servers' threads use it
        self.weights.write(self.policy.denoiser, self.precision)
        with self.costs.paused():  # checks are no cost of training
            for server in self.servers:
                self._ask(server, self.weights.send)
                self._compare(server)
        self.checks["rollout/synced_tensors"] = float(len(self.weights.digests))
        window, asked = self._window(step), self._requests(step)
        self._parts = []
        for number, part in enumerate(parts):
            i = number % len(self.servers)
            bodies = [self._body(window, asked[place], step, place) for place in part]
            future = self._threads[i].submit(self._sample, self.servers[i], bodies)
            self._parts.append((part, future))

    @override
    def collect(self, number: int) -> Answer:
        part, future = self._parts[number]
        samples, seconds = future.result()
        cfg, requests, window = self.sampler.cfg, self._requests(self._step), self._window()
        flat = [sample for one in samples for sample in one]
        chosen = [requests[place] for place in part]
        trajectory = to_trajectory(cfg, window, self.policy, chosen, flat)
        count = len(flat) * cfg.sampling.num_steps * self.policy.evaluations_per_velocity
        named = to_tensors(cfg, window, trajectory)
        return Answer(named, seconds, {"sampling_evaluations": count})

    @override
    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
        self.weights.close()

    def _window(self, step: int | None = None) -> tuple[int, ...]:
        step = self._step if step is None else step
        return self.sampler.cfg.window(step, generator(self.sampler.requests.seed, "window", step))

    def _requests(self, step: int) -> Sequence[Request]:
        return self.sampler.requests.batch(step, self.sampler.cfg.prompts_per_step)

    def _body(self, window: Sequence[int], request: Request, step: int, place: int) -> Any:
        cfg, seed = self.sampler.cfg, self.sampler.requests.seed
        counts = cfg.prompts_per_step, cfg.sampling.samples_per_prompt
        first = first_seed(seed, step, place, *counts)
        return self._complete(
            rollout_request(cfg.sampling, window, request, first, self.policy.guidance)
        )

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a request with the settings of the servers."""
        body["generator_device"] = self.sglang.generator_device
        if self.sglang.sampling_params:
            body["extra_sampling_params"] = self.sglang.sampling_params
        return body

    def _sample(self, server: SGLangServer, bodies: Sequence[Any]) -> tuple[Samples, float]:
        """Return the samples of some prompts, and the time; runs in the thread of a server."""
        start = time.perf_counter()
        samples = [
            self._ask(server, lambda s, body=body: self._generate(s, body)) for body in bodies
        ]
        return samples, time.perf_counter() - start

    def _generate(self, server: SGLangServer, body: dict[str, Any]) -> list[dict[str, Tensor]]:
        try:
            return self.reader.read(body, server.post("/rollout/generate", body))
        except ValueError as error:
            raise ServerError(f"{server.url}/rollout/generate: {error}") from error

    def _compare(self, server: SGLangServer) -> None:
        """Compare the sample of the fixed seed, and before the first step the rewards.

        Raises:
            TrainingFailure: The backends differ.
        """
        requests, ask = self._requests(0), self.comparison.request
        fixed = self._complete(ask(requests[0], 1, self.policy.guidance))
        (sample,) = self._ask(server, lambda s: self._generate(s, fixed))
        noise = self._noise.get(server.url)
        if noise is not None and not noise.equal(sample["latents"][0]):
            _fail(server, "gives other initial noise for the same seed than before")
        gap = self.comparison.seed_gap(requests[0], sample)
        self.checks["check/seed_gap"] = gap
        if not gap <= self.sglang.tolerance:
            _fail(
                server,
                f"samples another result for the fixed seed: the distance is {gap:.3g} of the "
                f"norm, above rollouts.sglang.tolerance {self.sglang.tolerance:g}. Compare model, "
                "precision, guidance, prompt length and schedule",
            )
        if noise is None:
            self._noise[server.url] = sample["latents"][0]
            self._compare_rewards(server, requests[:REWARD_PROMPTS])

    def _compare_rewards(self, server: SGLangServer, requests: Sequence[Request]) -> None:
        bodies = [
            self._complete(self.comparison.request(one, REWARD_SAMPLES, self.policy.guidance))
            for one in requests
        ]
        try:
            gaps = self.comparison.reward_gap(requests, self._sample(server, bodies)[0])
        except ValueError as error:
            _fail(server, f"sends media that cannot be scored: {error}")
        self.checks |= {f"check/reward_gap_{name}": gap for name, gap in gaps.items()}
        shown = ", ".join(f"{name} {gap:.2g}" for name, gap in gaps.items())
        self.log(f"rewards of equal samples, difference in standard deviations: {shown}")
        worst = max(gaps, key=lambda name: gaps[name], default=None)
        if worst is not None and not gaps[worst] <= self.sglang.max_reward_gap:
            _fail(
                server,
                f"gets another {worst} for equal samples: the means differ by {gaps[worst]:.2g} "
                "standard deviations, above rollouts.sglang.max_reward_gap "
                f"{self.sglang.max_reward_gap:g}. Compare the VAE and its precision",
            )

    def _check_model(self, server: SGLangServer) -> str:
        """Return the precision of a server after a check of its model."""
        cards = server.get("/v1/models").get("data") or [{}]
        names = [card.get("id") for card in cards]
        if self.sglang.model not in names:
            raise ServerError(
                f"{server.url} serves {', '.join(map(str, names))}, but rollouts.sglang.model is "
                f"{self.sglang.model}"
            )
        return str(cards[names.index(self.sglang.model)].get("dit_precision"))

    def _ask(self, server: SGLangServer, call: Callable[[SGLangServer], T]) -> T:
        """Return the answer of a server; if it is lost, wait for it and send the weights again."""
        while True:
            try:
                return call(server)
            except ServerError as error:
                raise TrainingFailure(f"SGLang server: {error}") from error
            except ServerLost as error:
                self._await(server, error)

    def _await(self, server: SGLangServer, error: ServerLost) -> None:
        """Wait until a lost server answers, and send it the weights, which a new one lacks."""
        if not self.restarts:
            raise TrainingFailure(
                f"SGLang server lost, and rollouts.restarts are used up: {error}. Start it with "
                f"`sglang serve --model-path {self.sglang.model}`, or correct "
                "rollouts.sglang.urls"
            ) from error
        self.restarts -= 1
        self.log(f"SGLang server lost, waiting for it: {error}")
        end = time.monotonic() + self.cfg.start_timeout
        while True:
            try:
                self._check_model(server)
                if self.weights.digests:
                    self.weights.send(server)
                return
            except ServerLost as again:
                if time.monotonic() > end:
                    raise TrainingFailure(f"SGLang server did not return: {again}") from again
                time.sleep(min(1.0, self.cfg.start_timeout / 10))


def _fail(server: SGLangServer, what: str) -> NoReturn:
    raise TrainingFailure(f"the SGLang server {server.url} {what}")
