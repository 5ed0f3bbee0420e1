"""Every component that a code block of the README defines trains when a run file names it."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml

from flowalign.config import load
from flowalign.distributed import Processes
from flowalign.rollout import generate

README = Path(__file__).parents[2] / "README.md"


def block(module: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    return next(b for b in blocks if b.startswith(f"# {module}.py"))


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str):
        (tmp_path / f"{name}.py").write_text(block(name))
        sys.modules.pop(name, None)
        return importlib.import_module(name)

    return write


def train_pixels(tmp_path: Path, changes: dict) -> dict:
    from flowalign import run as runs

    content = {
        "policy": {"class_path": "tests.pixel.PixelPolicy"},
        "rewards": [{"class_path": "tests.pixel.Redness"}],
        "reward_weights": {"redness": 1.0},
        "prompts": str(tmp_path / "prompts.txt"),
        "num_steps": 2,
        "recipe": {
            "prompts_per_step": 2,
            "sampling": {"num_steps": 4, "samples_per_prompt": 5},
            "algorithm": {"class_path": "flowalign.algorithms.grpo.GRPO"},
        },
        "device": "cpu",
        "output_dir": str(tmp_path / "run"),
    } | changes
    (tmp_path / "prompts.txt").write_text("a\nbb\n")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    run, text = load(str(tmp_path / "run.yaml"))
    session = runs.start(run, text, lambda _: None)
    assert isinstance(session.processes, Processes)
    return runs.train(session)


def test_the_credit_method_of_the_readme_trains(tmp_path, write_module):
    write_module("my_credit")
    recipe = {
        "prompts_per_step": 2,
        "sampling": {"num_steps": 4, "samples_per_prompt": 5},
        "credit": {"class_path": "my_credit.Merit"},
        "algorithm": {"class_path": "flowalign.algorithms.grpo.GRPO"},
    }
    summary = train_pixels(tmp_path, {"recipe": recipe})
    assert summary["reward_calls"] == 2 * 10 * 4  # four states of ten samples, in two steps


def test_the_reward_of_the_readme_trains(tmp_path, write_module):
    write_module("my_reward")
    summary = train_pixels(
        tmp_path,
        {"rewards": [{"class_path": "my_reward.Warmth"}], "reward_weights": {"warmth": 1.0}},
    )
    assert summary["steps"] == 2


def tiny_flux(folder: Path) -> None:
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        FluxPipeline,
        FluxTransformer2DModel,
    )
    from transformers import (
        CLIPTextConfig,
        CLIPTextModel,
        PreTrainedTokenizerFast,
        T5Config,
        T5EncoderModel,
    )

    torch.manual_seed(0)
    words = PreTrainedTokenizerFast.from_pretrained("assets/shapes/sd3/tokenizer")
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(4, 4), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, norm_num_groups=1,
        latent_channels=4, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06,
        scaling_factor=1.5,
    )  # fmt: skip
    clip = CLIPTextConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=37, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=77, eos_token_id=3, pad_token_id=0,
    )  # fmt: skip
    t5 = T5Config(vocab_size=len(words), d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4)
    FluxPipeline(
        transformer=transformer, vae=vae, text_encoder=CLIPTextModel(clip), tokenizer=words,
        text_encoder_2=T5EncoderModel(t5), tokenizer_2=words,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    ).save_pretrained(folder)  # fmt: skip


def test_the_pipeline_of_the_readme_equals_its_official_pipeline(tmp_path, write_module):
    flux = write_module("my_flux")
    tiny_flux(tmp_path / "flux")
    policy = flux.Flux(str(tmp_path / "flux"), height=16, width=32, precision="fp32")
    plan = policy.plan()
    policy.load(torch.device("cpu"))
    prompts = ["a red circle", "two blue squares"]
    seeds = [torch.Generator().manual_seed(i) for i in (3, 4)]
    ours = policy.decode(generate(policy, prompts, 3, seeds, 2))
    seeds = [torch.Generator().manual_seed(i) for i in (3, 4)]
    noise = torch.cat([policy.noise(1, seed) for seed in seeds])
    assert tuple(noise.shape[1:]) == plan.latent_shape == (32, 16)
    policy.pipe.set_progress_bar_config(disable=True)
    theirs = policy.pipe(
        prompts, height=16, width=32, num_inference_steps=3, guidance_scale=3.5, latents=noise,
        output_type="pt",
    ).images  # fmt: skip
    torch.testing.assert_close(ours[:, 0], theirs, atol=1e-4, rtol=1e-4)
