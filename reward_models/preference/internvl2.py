"""Loads InternVL2 into transformers' native InternVL: names, packed attention, config.

The released model is code on the hub for transformers 4 (`internvl_chat`, with InternLM2 as its
language model). Native InternVL with a llama computes the same function. This module splits the
packed projections and accounts for every key.

Source: InternVL2-2B as contained in MJ-Video @ cc1d2c9.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from flowalign.utils.files import read_object
from reward_models.backbones.checkpoints import (
    find_file,
    fingerprint_of,
    load_exactly,
    on_meta_device,
    rename_tensors,
    require_settings,
)
from reward_models.backbones.libraries import transformers
from reward_models.backbones.qwen2_vl import Dtype, check_chat
from reward_models.preference.internlm2_tokenizer import convert_tokenizer

SYSTEM = (
    (Path(__file__).parents[1] / "instructions" / "internvl2.txt")
    .read_text(encoding="utf-8")
    .strip()
)
"""System prompt that the model was trained with; part of its interface."""
TURN = (92542, 92543, 525, 11353, 364)
"""InternLM2's tokens for the end of the user's turn, `_END`, with which every text ends."""
SIDE = 448
"""Height and width of an image in pixels."""
_END = "<|im_end|><|im_start|>assistant\n"
_IMAGE = "<IMG_CONTEXT>"
_NAMES = (
    (r"^vision_model\.embeddings\.class_embedding$", "vision_tower.embeddings.cls_token"),
    (r"^(vision_)model\.(embeddings\.position_embedding)$", r"\1tower.\2s"),
    (r"^(vision_)model\.(embeddings\.patch_embedding)\.", r"\1tower.\2s.projection."),
    (r"^vision_model\.encoder\.layers\.", "vision_tower.encoder.layer."),
    (r"\.attn\.proj\.", ".attention.projection_layer."),
    (r"\.attn\.", ".attention."),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
    (r"\.ls([12])$", r".lambda_\1"),
    (r"^mlp1\.0\.", "multi_modal_projector.layer_norm."),
    (r"^mlp1\.1\.", "multi_modal_projector.linear_1."),
    (r"^mlp1\.3\.", "multi_modal_projector.linear_2."),
    (r"^language_model\.model\.tok_embeddings\.", "language_model.embed_tokens."),
    (r"^language_model\.model\.", "language_model."),
    (r"^language_model\.output\.", "language_model.lm_head."),
    (r"\.attention\.wo\.", ".self_attn.o_proj."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
)
"""Maps names of the release to names in transformers' InternVLModel."""
_SUPPORTED = {
    "model_type": "internvl_chat",
    "select_layer": -1,
    "ps_version": "v2",
    "template": "internlm2-chat",
    "llm_config.architectures": ["InternLM2ForCausalLM"],
    "llm_config.bias": False,
    "vision_config.qk_normalization": False,
}


def split_qkv(packed: Float[Tensor, "O *rest"]) -> dict[str, Tensor]:
    """Split the image encoder's packed projection into three equal parts."""
    return dict(zip("qkv", packed.chunk(3), strict=True))


def split_wqkv(packed: Float[Tensor, "O D"], heads: int, groups: int) -> dict[str, Tensor]:
    """Split InternLM2's packed projection into queries, keys and values.

    Each of the `groups` key heads follows the query heads that share it and precedes its value
    head.
    """
    shared = heads // groups
    parts = packed.unflatten(0, (groups, shared + 2, -1))
    rows = {"q": parts[:, :shared], "k": parts[:, -2], "v": parts[:, -1]}
    return {name: part.reshape(-1, packed.shape[1]) for name, part in rows.items()}


def convert_tensors(
    tensors: Mapping[str, Tensor], heads: int, groups: int
) -> dict[str, Float[Tensor, "..."]]:
    """Return the tensors of a release under the names of transformers' InternVLModel."""
    result: dict[str, Tensor] = {}
    for name, tensor in rename_tensors(tensors, _NAMES).items():
        head, packed, part = name.rpartition(".attention.qkv.")
        if packed:
            rows = split_qkv(tensor)
            result |= {f"{head}.attention.{k}_proj.{part}": v for k, v in rows.items()}
        elif name.endswith(".attention.wqkv.weight"):
            head = name.removesuffix(".attention.wqkv.weight")
            rows = split_wqkv(tensor, heads, groups)
            result |= {f"{head}.self_attn.{k}_proj.weight": v for k, v in rows.items()}
        else:
            result[name] = tensor
    return result


def convert_config(released: Mapping[str, Any], source: str | Path, image: int) -> Any:
    """Translate a config of type `internvl_chat`; `image` is the id of an image token.

    Raises:
        ValueError: The native classes do not support a setting. The message names it.
    """
    side = released.get("force_image_size") or released["vision_config"]["image_size"]
    supported = {**_SUPPORTED, "force_image_size": SIDE}
    require_settings({**released, "force_image_size": side}, supported, source)
    return transformers.InternVLConfig(
        vision_config=_vision(released["vision_config"], side),
        text_config=_text(released["llm_config"]),
        image_token_id=image,
        downsample_ratio=released["downsample_ratio"],
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )


class InternVL2:
    """Reader of videos and prompts with the InternVL2-2B in an MJ-VIDEO checkpoint.

    `base` has the config in the released form. `tokenizer` has InternLM2's tokenizer; null takes it
    from `base`. Its released sentencepiece file is converted on load. A tokenizer that encodes the
    end of a turn with other ids than the released one raises ValueError.
    """

    def __init__(
        self,
        base: str = "OpenGVLab/InternVL2-2B",
        tokenizer: str | None = None,
        dtype: Dtype = "bfloat16",
    ):
        self.base, self.source = base, tokenizer or base
        self.dtype: Dtype = dtype
        self.name = f"InternVL2 {fingerprint_of(base)} {fingerprint_of(self.source)} {dtype}"

    def read(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Return the network with these tensors of a release, and set the width of its states."""
        self.tokenizer = read_tokenizer(self.source)
        path = find_file(self.base, "config.json")
        image = self.tokenizer.convert_tokens_to_ids(_IMAGE)
        config = convert_config(read_object(path), path, image)  # pyright: ignore[reportArgumentType]
        text: Any = config.text_config
        self.width = text.hidden_size
        with on_meta_device():
            backbone = transformers.InternVLModel(config)
        native = convert_tensors(tensors, text.num_attention_heads, text.num_key_value_heads)
        dtype = getattr(torch, self.dtype)
        native = {name: tensor.to(dtype) for name, tensor in native.items()}
        load_exactly(backbone, native, self.base, unused=[r"language_model\.lm_head\.weight"])
        return _Network(backbone, self.tokenizer)

    def check(self, prompt: str) -> None:
        """Raise Unscorable if a prompt contains a special token."""
        check_chat(self.tokenizer, prompt)


class _Network(nn.Module):
    """Native InternVL that is prompted in the format of the release."""

    def __init__(self, backbone: Any, tokenizer: Any):
        super().__init__()
        self.backbone, self.tokenizer = backbone, tokenizer

    @override
    def forward(
        self, frames: Float[Tensor, "n F 3 h w"], prompts: Sequence[str]
    ) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]:
        """Return the hidden states of the last token, and of the first one of the turn's end.

        Frames are normalised with ImageNet's mean and standard deviation.
        """
        vision: Any = self.backbone.config.vision_config
        patches = frames.shape[-1] // vision.patch_size[0]
        tokens = int((patches * self.backbone.config.downsample_ratio) ** 2)
        rows = [self._ids(prompt, frames.shape[1], tokens) for prompt in prompts]
        ids = pad_sequence(rows, batch_first=True).to(frames.device)
        # no mask: padding comes last, where causal attention does not see it
        hidden = self.backbone(
            input_ids=ids, pixel_values=frames.flatten(0, 1), use_cache=False
        ).last_hidden_state
        ends, numbers = torch.tensor([len(row) for row in rows]), torch.arange(len(rows))
        return hidden[numbers, ends - 1].float(), hidden[numbers, ends - len(TURN)].float()

    def _ids(self, prompt: str, num_frames: int, tokens: int) -> Tensor:
        image = f"<img>{_IMAGE * tokens}</img>"
        film = "".join(f"Frame{i + 1}: {image}\n" for i in range(num_frames))
        text = f"<|im_start|>system\n{SYSTEM}<|im_end|><|im_start|>user\n{film}{prompt}{_END}"
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return torch.tensor([self.tokenizer.bos_token_id, *ids])


def read_tokenizer(source: str) -> Any:
    """Read a `tokenizer.json`, or convert a `tokenizer.model` where there is none.

    Raises:
        ValueError: Neither can be read, or the end of a turn has other ids.
    """
    try:
        path = find_file(source, "tokenizer.json")
    except ValueError:
        tokenizer = convert_tokenizer(source)
    else:
        find_file(source, "tokenizer_config.json")
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path.parent)
    found = tokenizer.encode(_END, add_special_tokens=False)
    if tuple(found) != TURN or tokenizer.bos_token_id is None:
        raise ValueError(
            f"the tokenizer of {source} encodes the end of a turn as {found}; it must be "
            f"{list(TURN)}, with a beginning-of-text token, as in InternLM2"
        )
    return tokenizer


def _vision(released: Mapping[str, Any], side: int) -> dict[str, Any]:
    same = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return {
        **{name: released[name] for name in (*same, "hidden_act", "norm_type", "layer_norm_eps")},
        "attention_bias": released["qkv_bias"],
        "image_size": side,
        "patch_size": released["patch_size"],
        "use_mean_pooling": True,  # no norm after the last layer
    }


def _text(released: Mapping[str, Any]) -> dict[str, Any]:
    same = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    scaling = released.get("rope_scaling") or {"type": "default"}
    rope = {"rope_type": scaling["type"], "rope_theta": float(released["rope_theta"])}
    return {
        "model_type": "llama",
        **{name: released[name] for name in (*same, "num_key_value_heads", "vocab_size")},
        **{name: released[name] for name in ("max_position_embeddings", "rms_norm_eps")},
        "rope_parameters": rope | {k: v for k, v in scaling.items() if k != "type"},
        "hidden_act": released.get("hidden_act", "silu"),
        "tie_word_embeddings": False,
    }
