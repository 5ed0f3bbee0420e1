"""A tiny random Qwen2-VL, Qwen2.5-VL or Qwen3-VL judge, written to a folder as published ones are.

Its tokenizer knows bytes, the special tokens of Qwen, and a few spellings of yes and no.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
)

WORDS = ("yes", "Yes", " yes", "no", "No", " No")
TEMPLATE = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}<|vision_start|><|{{ part['type'] }}_pad|><|vision_end|>{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad")
_PROCESSOR = {
    "qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor, "qwen3_vl": Qwen3VLProcessor,
}  # fmt: skip
_VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 48,
        "fullatt_block_indexes": [1], "window_size": 56,
    },
    "qwen3_vl": {
        "hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 48,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 16, "patch_size": 14,
    },
}  # fmt: skip


def build_judge(
    folder: Path,
    kind: str = "qwen2_5_vl",
    words: tuple[str, ...] = WORDS,
    text: Mapping[str, Any] = MappingProxyType({}),
    vision: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """The folder, with a model whose answers depend strongly on media and question.

    `text` and `vision` replace sizes of the language model and of the image encoder.
    """
    tokenizer = _tokenizer(words)
    _PROCESSOR[kind](
        Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(), chat_template=TEMPLATE
    ).save_pretrained(folder)
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 48, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
        "max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": None, **text,
    }  # fmt: skip
    names = ("image_pad", "video_pad", "vision_start", "vision_end")
    image, video, start, end = tokenizer.convert_tokens_to_ids([f"<|{name}|>" for name in names])
    config = AutoConfig.for_model(
        kind, text_config=sizes,
        vision_config={"depth": 2, "num_heads": 2, **_VISION[kind], **vision},
        tie_word_embeddings=False, image_token_id=image, video_token_id=video,
        vision_start_token_id=start, vision_end_token_id=end,
    )  # fmt: skip
    torch.manual_seed(3)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=1.5 * parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)
    return folder


def _tokenizer(words: tuple[str, ...]) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    special = [f"<|{name}|>" for name in (*_SPECIAL, "video_pad")]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, pad_token=special[0], extra_special_tokens=special[1:]
    )
    tokenizer.add_tokens(list(words))
    return tokenizer
