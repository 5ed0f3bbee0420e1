"""Small Wan pipelines of random weights, as folders and as policies; no test judges their films."""

import copy
import inspect
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from PIL import Image
from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    UMT5Config,
    UMT5EncoderModel,
)

from pipelines.video import Memory, Video
from pipelines.wan import LORA
from pipelines.wan22 import Wan22
from pipelines.wan_i2v import WanI2V, cropped
from pipelines.weights import Lora
from tests.contracts import test_policies, test_policy_encoding
from tests.contracts.families import Family, noise, ours

RECORDED = Path("assets/golden/I_wan_pipeline")
"""A recorded pipeline: its configurations and its tokenizer with weights of their own below."""
PICTURES = {
    "a red ball": "ball.png", "two cats on a sofa": "cats.png", "a white circle": "circle.png",
}  # fmt: skip
"""Prompts of image-to-video; pictures are noise of different sizes."""


def build_wan(folder: Path, scheduler: Any = None, **transformer: Any) -> str:
    """Wan 2.1: one network; UniPC, with whole times, unless there is a scheduler."""
    parts = _parts({}, transformer)
    return _saved(WanPipeline(**parts | ({"scheduler": scheduler} if scheduler else {})), folder)


def build_wan22(folder: Path, **transformer: Any) -> str:
    """Wan 2.2 A14B: two networks that differ, shift 12 as released."""
    parts = _parts({}, transformer)
    torch.manual_seed(1)
    parts["transformer_2"] = _transformer(transformer)
    parts["scheduler"] = UniPCMultistepScheduler.from_config(
        UniPCMultistepScheduler.load_config(RECORDED / "scheduler"), flow_shift=12.0
    )
    return _saved(WanPipeline(**parts, boundary_ratio=0.875), folder)


def build_wan22_5b(folder: Path) -> str:
    """Wan 2.2 5B: a time for every token, a residual VAE of 16 pixels a latent and 48 channels."""
    vae = {
        "z_dim": 48, "is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12,
        "base_dim": 8, "decoder_base_dim": 12, "scale_factor_spatial": 16,
        "latents_mean": torch.linspace(-0.4, 0.7, 48).tolist(),
        "latents_std": torch.linspace(0.5, 1.4, 48).tolist(),
        "temperal_downsample": (False, True, True),
    }  # fmt: skip
    parts = _parts(vae, {"in_channels": 48, "out_channels": 48})
    return _saved(WanPipeline(**parts, expand_timesteps=True), folder)


def build_wan_i2v(folder: Path, **transformer: Any) -> str:
    """Wan 2.1 image-to-video, with `images.jsonl` beside it."""
    inputs = {"in_channels": 36, "image_dim": 8, "added_kv_proj_dim": 24}
    parts = _parts({}, inputs | transformer)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "image_size": 32, "patch_size": 8,
             "num_attention_heads": 2, "num_hidden_layers": 3, "projection_dim": 8}  # fmt: skip
    path = _saved(
        WanImageToVideoPipeline(
            **parts,
            image_encoder=CLIPVisionModel(CLIPVisionConfig(**sizes)).eval(),
            image_processor=CLIPImageProcessor(crop_size=32, size=32),
        ),
        folder,
    )
    write_pictures(folder)
    return path


def write_pictures(folder: Path) -> None:
    """`images.jsonl` and the pictures that it names."""
    generator = torch.Generator().manual_seed(4)
    for k, name in enumerate(PICTURES.values()):
        size = (40 + 7 * k, 70 - 9 * k, 3)
        values = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
        Image.fromarray(values.numpy()).save(folder / name)
    rows = [json.dumps({"prompt": p, "image": name}) for p, name in PICTURES.items()]
    (folder / "images.jsonl").write_text("\n".join(rows) + "\n")


def tiny_video(
    cls: type, path: str, height: int = 32, width: int = 48, num_frames: int = 9, **changes: Any
) -> Any:
    """A policy of a small clip that is not square; a flag of `Memory` may be given by itself, and
    so may the shift of the schedule."""
    flags = {name: changes.pop(name) for name in [*changes] if name in Memory.__dataclass_fields__}
    shift = changes.pop("shift", None)
    video = Video(height=height, width=width, num_frames=num_frames, fps=8.0, shift=shift)
    return cls(path, video=video, memory=Memory(**flags), **changes)


def new_video(cls: type, folder: str, **changes: Any) -> Any:
    """Loaded, with a small adapter whose alpha is not its rank."""
    lora = Lora(rank=3, alpha=7, target_modules=LORA.target_modules)
    defaults = {"precision": "fp32", "max_sequence_length": 24, "lora": lora, "guidance": 1.0}
    policy = tiny_video(cls, **{"path": folder, **defaults, **changes})
    policy.load(torch.device("cpu"))
    return policy


def new_i2v(folder: str, **changes: Any) -> Any:
    """`new_video` with the pictures that lie in the folder, and prompts of the only length."""
    defaults = {"images": f"{folder}/images.jsonl", "max_sequence_length": 512}
    return new_video(WanI2V, folder, **defaults | changes)


def official_wan(policy: Any, prompts, x, num_steps, output_type) -> torch.Tensor:
    """What the pipeline makes with Euler steps along its own schedule."""
    pipe = copy.copy(policy.pipe)
    pipe.scheduler = Euler(policy)
    return call_wan(policy, pipe, prompts, x, num_steps, output_type)


def call_wan(policy: Any, pipe: Any, prompts, x, num_steps, output_type) -> torch.Tensor:
    """The pipeline's own `__call__`; image-to-video takes one picture a call."""
    video = policy.video
    given = {
        "height": video.height, "width": video.width, "num_frames": video.num_frames,
        "num_inference_steps": num_steps, "guidance_scale": policy.guidance,
        "output_type": output_type, "max_sequence_length": policy.max_sequence_length,
    }  # fmt: skip
    if isinstance(policy, Wan22):
        given["guidance_scale_2"] = policy.experts.guidance_2
    if not isinstance(policy, WanI2V):
        return pipe(list(prompts), latents=x, **given).frames
    frames = [cropped(policy.pictures[p], video.width / video.height) for p in prompts]
    calls = [
        pipe(frame, prompt, latents=x[k : k + 1], **given).frames
        for k, (prompt, frame) in enumerate(zip(prompts, frames, strict=True))
    ]
    return torch.cat(calls)


def steps_of(policy: Any, prompts, x, num_steps) -> list[tuple[torch.Tensor, ...]]:
    """(state, time, guided answer) of every `scheduler.step` of the pipeline with its scheduler."""
    seen, step = [], policy.pipe.scheduler.step

    def record(answer, time, state, **named):
        seen.append((state.clone(), time.clone(), answer.clone()))
        return step(answer, time, state, **named)

    policy.pipe.scheduler.step = record
    try:
        call_wan(policy, policy.pipe, prompts, x, num_steps, "latent")
    finally:
        del policy.pipe.scheduler.step
    return seen


def assert_official_film(policy: Any, prompts, num_steps=4) -> None:
    """Latents and frames are those of the pipeline's own `__call__` with Euler steps."""
    x = noise(policy)
    latents = ours(policy, prompts, x, num_steps)
    theirs = official_wan(policy, prompts, x, num_steps, "latent")
    assert (latents[0] - latents[1]).abs().max() > 0.1
    assert (latents - x).abs().max() > 0.1
    torch.testing.assert_close(latents, theirs, atol=1e-5, rtol=1e-5)
    film, video = policy.decode(latents), policy.video
    assert film.shape == (2, video.num_frames, 3, video.height, video.width)
    assert film.min() >= 0
    assert film.max() <= 1
    theirs = official_wan(policy, prompts, x, num_steps, "pt")
    torch.testing.assert_close(film, theirs, atol=1e-4, rtol=1e-4)


def assert_official_velocities(policy: Any, prompts, num_steps=5) -> None:
    """At every state that the pipeline's own scheduler visits, and at its times and sigmas."""
    seen = steps_of(policy, prompts, noise(policy), num_steps)
    sigmas, cond = policy.schedule(num_steps), policy.encode(prompts)
    assert len(seen) == num_steps
    assert (seen[-1][0] - seen[0][0]).abs().max() > 0.1
    for k, (state, time, answer) in enumerate(seen):
        assert policy.times(state, sigmas[k]).unique().tolist() == [time.item()]
        with torch.no_grad():
            velocity = policy.velocity(state, sigmas[k], cond)
        torch.testing.assert_close(velocity, answer, atol=1e-5, rtol=1e-5)


PICTURES_ONLY = (
    "test_latents_and_pictures_are_those_of_the_official_pipeline",
    "test_the_plan_agrees_with_the_loaded_model",
    "test_the_plan_reads_no_weights",
    "test_latents_of_a_picture_are_the_mode_that_the_pipeline_s_parts_give",
    "test_velocities_are_float32_and_gradients_reach_the_adapter_only",
)
"""Tests of the contract that say one frame, from sigma 1, or all in bf16; films have others."""


def contract(*without: str) -> dict[str, Any]:
    """The tests that hold for every family, to be collected where a fixture `family` is."""
    found = {**vars(test_policies), **vars(test_policy_encoding)}
    return {
        name: test
        for name, test in found.items()
        if name.startswith("test_") and name not in (*PICTURES_ONLY, *without)
        and "family" in inspect.signature(test).parameters
    }  # fmt: skip


def video_family(cls: type, new: Any, path: str, other: str) -> Family:
    """Of two folders with pipelines of different networks."""
    prompts = tuple(PICTURES)[:2]
    return Family(
        cls=partial(tiny_video, cls), path=path, new=partial(new, path), official=official_wan,
        prompts=prompts, other={"path": other, "lora": None}, other_prompts=prompts,
        query="attn1.to_q",
    )  # fmt: skip


class Euler:
    """A scheduler of Euler steps along the schedule of a policy, with the times it tells."""

    order, config = 1, SimpleNamespace(num_train_timesteps=1000)

    def __init__(self, policy: Any):
        self.policy = policy

    def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
        self.sigmas, self.k = self.policy.schedule(num_inference_steps), 0
        times = 1000 * self.sigmas[:-1]
        self.timesteps = times.long() if self.policy.whole_times else times

    def set_begin_index(self, k: int) -> None:
        self.k = k

    def step(self, answer, time, state, return_dict=False) -> tuple[torch.Tensor]:
        assert time == self.timesteps[self.k]
        self.k += 1
        return (state + (self.sigmas[self.k] - self.sigmas[self.k - 1]) * answer,)


def _parts(vae: Mapping[str, Any], transformer: Mapping[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    recorded = AutoencoderKLWan.load_config(RECORDED / "vae")
    text = UMT5EncoderModel(UMT5Config.from_pretrained(RECORDED / "text_encoder"))
    return {
        "transformer": _transformer(transformer),
        "vae": AutoencoderKLWan.from_config({**recorded, **vae}).eval(),
        "text_encoder": text.eval(),
        "tokenizer": AutoTokenizer.from_pretrained(RECORDED / "tokenizer"),
        "scheduler": UniPCMultistepScheduler.from_pretrained(RECORDED / "scheduler"),
    }


def _transformer(changes: Mapping[str, Any]) -> WanTransformer3DModel:
    recorded = WanTransformer3DModel.load_config(RECORDED / "transformer")
    return WanTransformer3DModel.from_config({**recorded, **changes})


def _saved(pipe: Any, folder: Path) -> str:
    pipe.save_pretrained(folder)
    return str(folder)
