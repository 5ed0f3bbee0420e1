"""Runs the stock `__call__` of a diffusers pipeline with replaced methods and scheduler.

The pipeline's own code then provides the velocity, the schedule and the decoder, so that it is not
reimplemented.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from pipelines.any_pipeline.recorded import STATE

STAGES = (
    "encode_prompt",
    "encode_image",
    STATE,
    "prepare_image_latents",
    "prepare_mask_latents",
)
"""Methods with results that are recorded once and replayed."""


WAY_OUT = "use a policy of pipelines/ or write one, docs/tutorials/103_your_pipeline.md"
_FAILURES = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError)
"""Errors of pipelines that do more than can be replayed."""


class CallStopped(Exception):
    """Stops a call as soon as the result is available."""

    def __init__(self, found: Any = None):
        super().__init__()
        self.found = found


@dataclass(frozen=True)
class Step:
    """One step of a recorded rollout."""

    x: Tensor
    sigma: Tensor
    v: Tensor


class _Recorder:
    """Scheduler mixin that makes Euler steps along the scheduler's own sigmas and records them."""

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Any = None,
        sigmas: Any = None,
        mu: float | None = None,
        timesteps: Any = None,
    ) -> None:
        given = {"sigmas": sigmas, "mu": mu, "timesteps": timesteps}
        known = {name: value for name, value in given.items() if value is not None}
        super().set_timesteps(num_inference_steps, device=device, **known)  # type: ignore[misc]
        self.steps: list[Step] = []

    def step(self, v: Tensor, _t: Any, x: Tensor, return_dict: bool = True, **_: Any) -> Any:  # noqa: ARG002 (their signature)
        sigma, after = self.sigmas[len(self.steps) :][:2].to(x.device)  # type: ignore[attr-defined]
        self.steps.append(Step(x, sigma, v))
        return ((x.float() + (after - sigma) * v.float()).to(x.dtype),)


class _Velocity:
    """Scheduler mixin with one timestep or none that stops the call with the velocity."""

    times: Tensor

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,  # noqa: ARG002 (pipelines look for these names)
        device: Any = None,
        sigmas: Any = None,  # noqa: ARG002
        mu: float | None = None,  # noqa: ARG002
        timesteps: Any = None,  # noqa: ARG002
    ) -> None:
        self.timesteps = self.times.to(device)
        self.sigmas = torch.cat([self.timesteps.float() / 1000, self.times.new_zeros(1).float()])
        self.num_inference_steps = len(self.times)
        self._step_index = self._begin_index = None

    def step(self, v: Tensor, *_: Any, **__: Any) -> Any:
        raise CallStopped(v)


class _StandStill(_Velocity):
    """Scheduler mixin with one timestep and a step that returns its state unchanged."""

    times = torch.ones(1)

    def step(self, v: Tensor, _t: Any, x: Tensor, **_: Any) -> Any:  # noqa: ARG002 (their signature)
        return (x,)


@cache
def _mix(mixin: type, kind: type) -> Any:
    return type(f"{mixin.__name__}{kind.__name__}", (mixin, kind), {})


def build_recorder(scheduler: Any) -> Any:
    """Return a scheduler with the same config that records its Euler steps."""
    return _mix(_Recorder, type(scheduler)).from_config(scheduler.config)


def build_at_times(scheduler: Any, times: Tensor) -> Any:
    """Return a scheduler with these timesteps (one or none) that stops with the velocity."""
    made = _mix(_Velocity, type(scheduler)).from_config(scheduler.config)
    made.times = times
    return made


def build_standing(scheduler: Any) -> Any:
    """Return a scheduler that makes one step and leaves the state unchanged."""
    return _mix(_StandStill, type(scheduler)).from_config(scheduler.config)


@contextmanager
def skip_network(network: nn.Module) -> Iterator[None]:
    """Replace the network by the identity on its state, inside this context."""
    vars(network)["forward"] = lambda hidden_states, **_: (hidden_states,)
    try:
        yield
    finally:
        del vars(network)["forward"]


@contextmanager
def exchange(pipe: Any, others: Mapping[str, Any]) -> Iterator[None]:
    """Replace methods and components of a pipeline inside this context."""
    kept = dict(vars(pipe))
    vars(pipe).update(others)
    try:
        yield
    finally:
        vars(pipe).clear()
        vars(pipe).update(kept)


def call(pipe: Any, **arguments: Any) -> Any:
    """Run the pipeline's `__call__` without its decorator, which switches gradients off."""
    return inspect.unwrap(type(pipe).__call__)(pipe, **arguments)


@dataclass
class Recording:
    """Results of the `STAGES` that a pipeline runs during a call."""

    pipe: Any
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Return wrapped methods that record their results."""
        return {name: self._keep(name) for name in STAGES if name in dir(type(self.pipe))}

    def _keep(self, name: str) -> Callable[..., Any]:
        method = getattr(self.pipe, name)

        def keep(*given: Any, **named: Any) -> Any:
            self.calls.append((name, method(*given, **named)))
            return self.calls[-1][1]

        return keep


def replay_calls(calls: Sequence[tuple[str, Any]]) -> dict[str, Callable[..., Any]]:
    """Return methods that replay the recorded results in the order of their calls."""
    results: dict[str, list[Any]] = {}
    for name, result in calls:
        results.setdefault(name, []).append(result)
    return {name: _take_turns(found) for name, found in results.items()}


def _take_turns(results: Sequence[Any]) -> Callable[..., Any]:
    left = iter(results)
    return lambda *_, **__: next(left)


@contextmanager
def catch_result() -> Iterator[CallStopped]:
    """Yield an object with `found`, the velocity at which the call stops inside this context."""
    stop = CallStopped()
    try:
        yield stop
    except CallStopped as reached:
        stop.found = reached.found


@contextmanager
def count_rows(network: nn.Module) -> Iterator[list[int]]:
    """Yield a list to which every network evaluation in this context appends its number of rows."""
    rows: list[int] = []

    def count(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        state: Any = given[0] if given else named.get("hidden_states", named.get("x"))
        rows.append(len(state))

    handle = network.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield rows
    finally:
        handle.remove()


@contextmanager
def failure_context(path: str, cls: type) -> Iterator[None]:
    """Turn errors of a call into one line that names the pipeline and the alternative."""
    try:
        yield
    except _FAILURES as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(
            f"{path} ({cls.__name__}) cannot be replayed: {type(error).__name__}: {reason}; "
            + WAY_OUT
        ) from error


@contextmanager
def stop_at_network(network: nn.Module) -> Iterator[None]:
    """Stop a call at its first network evaluation, inside this context."""

    def stop(*_: Any) -> None:
        raise CallStopped

    handle = network.register_forward_pre_hook(stop, prepend=True)  # before row-counting hooks
    try:
        yield
    except CallStopped:
        pass
    finally:
        handle.remove()


def initial_state(result: Any) -> Any:
    """Return the initial state from the results of `prepare_latents`."""
    return result[0] if isinstance(result, tuple) else result
