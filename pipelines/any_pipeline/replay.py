"""Runs the stock `__call__` of a diffusers pipeline with some methods and the scheduler exchanged.

The pipeline's own code then is the velocity, the schedule and the decoder, and nothing of it is
written a second time.
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
"""Methods whose results are recorded once and returned again."""


WAY_OUT = "use a policy of pipelines/ or write one, docs/tutorials/103_your_pipeline.md"
_FAILURES = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError)
"""What pipelines raise that do more, or other things, than is replayed."""


class CallStopped(Exception):
    """Stops a call where what was wanted of it is there."""

    def __init__(self, found: Any = None):
        super().__init__()
        self.found = found


@dataclass(frozen=True)
class Step:
    """Holds one step of a recorded rollout."""

    x: Tensor
    sigma: Tensor
    v: Tensor


class _Recorder:
    """Makes Euler steps along the scheduler's own sigmas, and keeps them."""

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
    """Has one time or none, and stops the call with the velocity at that time."""

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
    """Has one time, and a step that changes nothing."""

    times = torch.ones(1)

    def step(self, v: Tensor, _t: Any, x: Tensor, **_: Any) -> Any:  # noqa: ARG002 (their signature)
        return (x,)


@cache
def _mix(mixin: type, kind: type) -> Any:
    return type(f"{mixin.__name__}{kind.__name__}", (mixin, kind), {})


def build_recorder(scheduler: Any) -> Any:
    """Return a scheduler of the same configuration that keeps the Euler steps it makes."""
    return _mix(_Recorder, type(scheduler)).from_config(scheduler.config)


def build_at_times(scheduler: Any, times: Tensor) -> Any:
    """Return a scheduler that has these times, one or none, and stops with the velocity."""
    made = _mix(_Velocity, type(scheduler)).from_config(scheduler.config)
    made.times = times
    return made


def build_standing(scheduler: Any) -> Any:
    """Return a scheduler that makes one step, and changes nothing by it."""
    return _mix(_StandStill, type(scheduler)).from_config(scheduler.config)


@contextmanager
def skip_network(network: nn.Module) -> Iterator[None]:
    """Let a network return its state and compute nothing, inside this context."""
    vars(network)["forward"] = lambda hidden_states, **_: (hidden_states,)
    try:
        yield
    finally:
        del vars(network)["forward"]


@contextmanager
def exchange(pipe: Any, others: Mapping[str, Any]) -> Iterator[None]:
    """Give a pipeline other methods and components inside this context."""
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
    """Keeps what the `STAGES` of a pipeline return during a call."""

    pipe: Any
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Return the methods that keep their results."""
        return {name: self._keep(name) for name in STAGES if name in dir(type(self.pipe))}

    def _keep(self, name: str) -> Callable[..., Any]:
        method = getattr(self.pipe, name)

        def keep(*given: Any, **named: Any) -> Any:
            self.calls.append((name, method(*given, **named)))
            return self.calls[-1][1]

        return keep


def replay_calls(calls: Sequence[tuple[str, Any]]) -> dict[str, Callable[..., Any]]:
    """Return methods that give these results, each in the order in which it was called."""
    results: dict[str, list[Any]] = {}
    for name, result in calls:
        results.setdefault(name, []).append(result)
    return {name: _take_turns(found) for name, found in results.items()}


def _take_turns(results: Sequence[Any]) -> Callable[..., Any]:
    left = iter(results)
    return lambda *_, **__: next(left)


@contextmanager
def catch_result() -> Iterator[CallStopped]:
    """Yield what later holds the velocity at which a call stops inside this context."""
    stop = CallStopped()
    try:
        yield stop
    except CallStopped as reached:
        stop.found = reached.found


@contextmanager
def count_rows(network: nn.Module) -> Iterator[list[int]]:
    """Yield a list that gets the number of rows of each evaluation inside this context."""
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
    """Turn the failure of a call into one line that names the pipeline and the way out."""
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
    """Stop a call where it would evaluate a network, inside this context."""

    def stop(*_: Any) -> None:
        raise CallStopped

    handle = network.register_forward_pre_hook(stop, prepend=True)  # before those that count
    try:
        yield
    except CallStopped:
        pass
    finally:
        handle.remove()


def initial_state(result: Any) -> Any:
    """Return the initial state among what `prepare_latents` returns."""
    return result[0] if isinstance(result, tuple) else result


def select_accepted(cls: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the `__call__` of a pipeline has."""
    known = inspect.signature(cls.__call__).parameters
    return {name: value for name, value in arguments.items() if name in known}
