"""Scores consistency with a context of text and reference images, with a gradient.

Source: Hummingbird, arXiv:2502.05153v2, implemented from secondary sources. It has two rewards from
the frozen Q-Former of BLIP-2. The global semantic reward is the largest cosine between a query
token of the image and the text's first token. The fine-grained consistency reward is the match
logit of the image-text-matching head. The text describes the reference image with respect to the
request; a language model writes it beforehand. Hummingbird's rewards see the reference only through
this text. The third dimension compares with the reference images themselves and is our choice.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flowalign.types import MediaBatch, PositiveInt, RewardSpec
from reward_models.backbones.checkpoints import fingerprint_of, read_tokenizer, read_transformers
from reward_models.backbones.clip_towers import Preprocessing
from reward_models.backbones.libraries import transformers
from reward_models.backbones.reward_bases import NetworkReward, metadata_of


@dataclass(eq=False, repr=False)
class ContextConsistency(NetworkReward):
    """Scores an image against the context of its request: text and one or more references.

    semantic: cosine in [-1, 1] of image and text. consistency: match logit of image and text.
    reference: mean cosine of the query tokens of image and reference, over all references. The text
    is the metadata's `context` if present, else the prompt.
    """

    network: "transformers.Blip2ForImageTextRetrieval" = field(init=False)
    model: str = "Salesforce/blip2-itm-vit-g"
    batch_size: PositiveInt = field(default=8, kw_only=True)

    def declare(self) -> RewardSpec:
        """Return the declaration."""
        return RewardSpec(
            name="context_consistency",
            dims=("semantic", "consistency", "reference"),
            modality="image",
            licence="MIT",
            differentiable=True,
            needs=("prompt", "references"),
            version=fingerprint_of(self.model),
        )

    def read(self) -> nn.Module:
        """Read BLIP-2's image encoder, Q-Former and heads, and its tokenizer."""
        network = read_transformers(transformers.Blip2ForImageTextRetrieval, self.model)
        network.config.image_token_index = None  # the text has no image placeholders
        self.longest: int = network.config.qformer_config.max_position_embeddings
        self.preprocessing = Preprocessing(network.config.vision_config.image_size, "squash")
        self.tokenizer = read_tokenizer(self.model)
        return network

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n 3"]:
        """Compare each sample with its context, one at a time."""
        return torch.cat([self._rated(batch.take([i])) for i in range(len(batch))])

    def _rated(self, sample: MediaBatch) -> Float[Tensor, "1 3"]:
        text = self._tokens(str(metadata_of(sample).get("context") or sample.prompts[0]))
        pixels = self._pixels(sample.media[:, 0])
        contrast = self.network(pixels, **text)
        match = self.network(pixels, **text, use_image_text_matching_head=True)
        with torch.no_grad():
            shown = [self.network(self._pixels(r[None]), **text) for r in sample.references[0]]
        references = torch.cat([one.image_embeds for one in shown])
        alike = (contrast.image_embeds * references).sum(-1).mean()
        return torch.stack(
            [contrast.logits_per_image[0, 0], match.logits_per_image[0, 1], alike]
        ).float()[None]

    def _pixels(self, pictures: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 3 s s"]:
        return self.preprocessing(pictures.to(self.place, torch.float32))

    def _tokens(self, text: str) -> dict[str, Any]:
        tokens = self.tokenizer(text, return_tensors="pt", truncation=True, max_length=self.longest)
        return {name: tokens[name].to(self.place) for name in ("input_ids", "attention_mask")}
