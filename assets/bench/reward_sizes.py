"""Size of published reward models, and the batch that fits a GPU, without their weights.

    python assets/bench/reward_sizes.py        # about a minute of a core; writes reward_sizes.json

Networks are built at published size without values, from the classes that load the weights.
Memory per sample is the difference between scoring two samples and one, without gradients.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_position_ids,
    get_vision_window_index,
)

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from flowalign.utils.files import write_text  # noqa: E402
from pipelines.parts.memory import peak_bytes  # noqa: E402
from reward_models.backbones.qwen2_vl import Qwen2VLReward  # noqa: E402
from reward_models.preference.hpsv3 import preference_head  # noqa: E402
from reward_models.preference.image_reward import SIZES, ImageRewardNetwork  # noqa: E402

RESULTS = Path(__file__).with_suffix(".json")
GPUS = 16, 24, 48, 80
"""Memory of GPUs, in GB."""
CLIP_H = {
    "text_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "projection_dim": 1024,
    },
    "vision_config": {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "patch_size": 14,
        "projection_dim": 1024,
    },
    "projection_dim": 1024,
}
"""Sizes of laion/CLIP-ViT-H-14-laion2B-s32B-b79K, from its config.json."""
MED = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
}
"""Sizes of ImageReward's text encoder, from its med_config.json."""
WORDS = 30524
"""Vocabulary of ImageReward: BERT's and two tokens."""
QWEN2_VL = {
    "2B": {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12}
    | {"num_key_value_heads": 2, "vocab_size": 151936, "num_hidden_layers": 28},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vocab_size": 152064, "num_hidden_layers": 28},
}
"""Sizes of Qwen2-VL's language models, from the config.json of each."""


@dataclass(frozen=True)
class Reward:
    """Network of a reward model, and how it scores a batch."""

    network: nn.Module
    score: Callable[[int], object]
    """Function that scores a number of samples."""
    sample: str
    """What one sample is."""


@contextmanager
def in_half_precision() -> Iterator[None]:
    """Build networks without values in bfloat16 inside this context."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def qwen2_vl(size: str, head: Callable[[int], nn.Module]) -> Qwen2VLReward:
    """Return a reward on a Qwen2-VL of published size."""
    config = transformers.Qwen2VLConfig(
        text_config=QWEN2_VL[size], vision_config={"hidden_size": QWEN2_VL[size]["hidden_size"]}
    )
    with in_half_precision():
        return Qwen2VLReward(config, head(QWEN2_VL[size]["hidden_size"]), "sequential")


def qwen25_vl() -> nn.Module:
    """Return Qwen2.5-VL 7B, the backbone of judges, from the values of its published encoder."""
    parts = json.loads((ROOT / "pipelines/parts/published/parts.json").read_text())
    config = transformers.Qwen2_5_VLConfig.from_dict(parts["qwen2_5_vl_7b"]["config"])
    with in_half_precision():
        return transformers.Qwen2_5_VLForConditionalGeneration(config)


def rewards() -> dict[str, Callable[[], Reward]]:
    """Return the rewards by name."""
    return {
        "PickScore": _pick_score,
        "HPSv2": _hpsv2,
        "ImageReward": _image_reward,
        "HPSv3": lambda: _vision_language(
            qwen2_vl("7B", preference_head), 1, 16, 700, "an image of 448 x 448"
        ),
        "VideoReward": lambda: _vision_language(
            qwen2_vl("2B", lambda width: nn.Linear(width, 3, bias=False)),
            *(8, 16, 1000, "16 frames of 448 x 448"),
        ),
        "Qwen2.5-VL 7B judge": lambda: _vision_language(
            qwen25_vl(), 1, 16, 300, "an image of 448 x 448"
        ),
    }


def measure(reward: Reward) -> dict[str, Any]:
    """Return parameters, bytes of weights and of scoring, and the batches that fit."""
    reward.network.eval()
    parameters = [*reward.network.parameters()]
    weights = sum(p.numel() * p.itemsize for p in parameters)
    one, two = (peak_bytes(lambda n=n: reward.score(n), existing=parameters) for n in (1, 2))
    fits = {gb: (gb * 10**9 - weights - (2 * one - two)) // (two - one) for gb in GPUS}
    return {
        "parameters": sum(p.numel() for p in parameters),
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "weights": weights,
        "sample": reward.sample,
        "one_sample": one,
        "each_further": two - one,
        "batch_that_fits": {f"{gb} GB": max(0, batch) for gb, batch in fits.items()},
    }


def _pixels(count: int, side: int = 224, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(count, 3, side, side, dtype=dtype)


def _ids(count: int, length: int) -> torch.Tensor:
    return torch.zeros(count, length, dtype=torch.long)


def _pick_score() -> Reward:
    model: Any = transformers.CLIPModel(transformers.CLIPConfig(**CLIP_H))

    def score(count: int) -> None:
        model.get_image_features(pixel_values=_pixels(count))
        model.get_text_features(input_ids=_ids(count, 77))

    return Reward(model, score, "an image of 224 x 224 and 77 tokens")


def _hpsv2() -> Reward:
    import open_clip  # 50 MB that readers of the sizes do not need

    model = open_clip.CLIP(**open_clip.get_model_config("ViT-H-14"))

    def score(count: int) -> None:
        model.encode_image(_pixels(count))
        model.encode_text(_ids(count, 77))

    return Reward(model, score, "an image of 224 x 224 and 77 tokens")


def _image_reward() -> Reward:
    network = ImageRewardNetwork(SIZES, MED, WORDS)

    def score(count: int) -> None:
        seen = network.vision(pixel_values=_pixels(count)).last_hidden_state
        network.text(input_ids=_ids(count, 35), encoder_hidden_states=seen, is_decoder=False)

    return Reward(network, score, "an image of 224 x 224 and 35 tokens")


def _vision_language(network: Any, pairs: int, side: int, text: int, sample: str) -> Reward:
    """Return a model that sees `pairs` pairs of frames of `side`^2 tokens, and `text` tokens.

    Image tower and language model run one after another, as in `forward`.
    """
    backbone = network.backbone if isinstance(network, Qwen2VLReward) else network.model
    width = backbone.language_model.config.hidden_size

    def score(count: int) -> None:
        patches = torch.empty(count * pairs * 4 * side**2, 3 * 2 * 14 * 14, dtype=torch.bfloat16)
        backbone.visual(patches, **_grids(backbone.visual, count, pairs, side))
        length = pairs * side**2 + text
        backbone.language_model(
            inputs_embeds=torch.empty(count, length, width, dtype=torch.bfloat16),
            position_ids=torch.zeros(3, count, length, dtype=torch.long),
            use_cache=False,
        )

    return Reward(network, score, f"{sample} and about {text} tokens")


def _grids(visual: Any, count: int, pairs: int, side: int) -> dict[str, Any]:
    """Return the sizes of images on the host, and the places of their patches, without values."""
    merge = visual.spatial_merge_size
    with torch.device("cpu"):
        grid = torch.tensor([[pairs, 2 * side, 2 * side]] * count)
        found = {"grid_thw": grid, "cu_seqlens": get_vision_cu_seqlens(grid)}
        places = {"position_ids": get_vision_position_ids(grid, merge)}
        if hasattr(visual, "window_size"):
            places["window_index"], found["cu_window_seqlens"] = get_vision_window_index(
                grid, merge, visual.window_size, visual.patch_size
            )
    return found | {name: one.to("meta") for name, one in places.items()}


def main() -> None:
    """Measure all rewards."""
    found = {}
    for name, build in rewards().items():
        with torch.device("meta"):
            found[name] = measure(build())
        sys.stdout.write(f"{name}: {json.dumps(found[name])}\n")
    write_text(RESULTS, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
