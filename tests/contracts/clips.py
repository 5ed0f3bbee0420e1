"""The contract of policies on families of video, and what their tests do with clips."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.contracts import test_policies, test_policy_encoding
from tests.contracts.families import Family, noise, ours
from tests.tiny_video_others import new_clips, of_clips

PROMPTS = ("a red ball rolls", "two cats on a sofa")
OF_PICTURES = (
    "test_latents_and_pictures_are_those_of_the_official_pipeline",
    "test_the_plan_reads_no_weights",
    "test_latents_of_a_picture_are_the_mode_that_the_pipeline_s_parts_give",
)
"""Tests that clips have their own of."""


def contract() -> Iterator[tuple[str, Callable]]:
    """Tests of the contract of policies that hold for clips as they stand."""
    for module in (test_policies, test_policy_encoding):
        for name, test in vars(module).items():
            wanted = name.startswith("test_") and name not in OF_PICTURES
            if wanted and "family" in inspect.signature(test).parameters:
                yield name, test


def clip_family(
    cls: type, path: str, other: str, layers: tuple[str, ...], official: Callable, **settings: Any
) -> Family:
    """Of two folders with pipelines of different networks."""
    return Family(
        cls=partial(of_clips, cls),  # type: ignore[arg-type]
        path=path,
        new=partial(new_clips, cls, layers, path=path, **settings),
        official=official,
        prompts=PROMPTS,
        other={"path": other, "lora": None},
        other_prompts=PROMPTS,
        query="to_q",
    )


def official_steps(family: Family, policy: Any, x: Tensor, num_steps: int) -> list[dict[str, Any]]:
    """What the pipeline's own `__call__` gives to each of its scheduler's steps, in its layout."""
    scheduler, steps = policy.pipe.scheduler, []
    step = scheduler.step

    def recorded(prediction, time, sample, **named):
        steps.append({"prediction": prediction, "time": time, "sample": sample})
        return step(prediction, time, sample, **named)

    scheduler.step = recorded
    try:
        family.official(policy, family.prompts, x, num_steps, "latent")
    finally:
        del scheduler.step
    return steps


def assert_official_clips(family: Family, policy: Any, num_steps: int = 4) -> None:
    """Latents and frames are those of the pipeline's own `__call__`, and differ by sample."""
    x = noise(policy)
    latents = ours(policy, family.prompts, x, num_steps)
    theirs = family.official(policy, family.prompts, x, num_steps, "latent")
    assert (latents[0] - latents[1]).abs().max() > 0.1
    assert (latents - x).abs().max() > 0.1
    torch.testing.assert_close(latents, theirs, atol=1e-4, rtol=1e-4)
    frames = policy.decode(latents)
    video = policy.video
    assert frames.shape == (2, video.num_frames, 3, video.height, video.width)
    assert frames.min() >= 0
    assert frames.max() <= 1
    assert (frames[:, 0] - frames[:, -1]).abs().max() > 1e-3
    theirs = family.official(policy, family.prompts, x, num_steps, "pt")
    torch.testing.assert_close(frames, theirs, atol=1e-4, rtol=1e-4)


def assert_same_velocities(steps, velocities) -> None:
    """Velocities are those that the pipeline steps with, at each of its steps."""
    assert len(steps) == len(velocities) > 0
    for step, velocity in zip(steps, velocities, strict=True):
        torch.testing.assert_close(velocity, step, atol=1e-5, rtol=1e-5)


def clips(policy: Any, count: int = 2, frames: int | None = None) -> Tensor:
    """Random media of the policy's size."""
    shape = count, frames or policy.video.num_frames, 3, policy.height, policy.width
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


def assert_reads_prompts_with_its_encoders_on_the_device(policy: Any, prompts) -> None:
    """Offloaded text encoders work only within `text_encoders`, and all of them do."""
    inside, worked, within = [False], [], policy.text_encoders

    @contextmanager
    def entered():
        with within():
            inside[0] = True
            yield
        inside[0] = False

    policy.text_encoders = entered
    encoders = [n for n in policy.pipe.components if n.startswith("text_encoder")]
    for name in encoders:
        policy.pipe.components[name].register_forward_pre_hook(
            lambda module, inputs, name=name: worked.append((name, inside[0]))
        )
    policy.encode(prompts)
    assert {name for name, _ in worked} == set(encoders)
    assert all(there for _, there in worked)
    assert not inside[0]
