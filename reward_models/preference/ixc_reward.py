"""Runs IXC-2.5-Reward through its published interface, `get_score(chat, images, hd_num)`.

The model is code of its repository, written for transformers 4. `trust_remote_code` allows it to
run, in an environment with compatible packages, for example behind `flowalign serve-reward`. It was
trained to score an assistant's answers about images. Here the answer is the sample's prompt, so an
image scores high if the prompt describes it well. Its authors did not publish this use.

Source: InternLM-XComposer2.5-Reward, arXiv:2501.12368. The internals of its head are not used.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from flowalign.types import Loadable, MediaBatch, PositiveInt, RewardSpec
from reward_models.backbones.reward_bases import RuleReward, Verdict, to_uint8

QUESTION = "Describe this image."


class IXCReward(RuleReward, Loadable):
    """Scores the prompt as an answer to `question` about the image; an unbounded logit.

    `hd_num` is the maximum number of tiles per image.
    """

    def __init__(
        self,
        path: str = "internlm/internlm-xcomposer2d5-7b-reward",
        trust_remote_code: bool = False,
        question: str = QUESTION,
        hd_num: PositiveInt = 9,
        device: str = "cuda",
    ):
        if not trust_remote_code:
            raise ValueError(
                f"{path} is code that runs on this machine; set trust_remote_code: true if you "
                "have read it, and load it where transformers 4 is installed"
            )
        if not question:
            raise ValueError("question of IXCReward is empty")
        self.path, self.question, self.hd_num, self.device = path, question, hd_num, device
        self.spec = RewardSpec(
            name="ixc_reward",
            dims=("ixc_reward",),
            modality="image",
            licence="see the model's repository",
            needs=("prompt",),
            version=f"{path} {hd_num} tiles {question}",
        )

    def load(self) -> None:
        """Load the model with its repository's code, in half precision."""
        from transformers import AutoModel, AutoTokenizer

        given: dict[str, Any] = {"trust_remote_code": True}  # keyword names of transformers 4
        model: Any = AutoModel.from_pretrained(self.path, torch_dtype=torch.float16, **given)
        model.to(self.device).eval()
        model.tokenizer = AutoTokenizer.from_pretrained(self.path, **given)
        self.model = model

    def judge(self, sample: MediaBatch) -> Verdict:
        """Score a single image, because batches change scores in half precision."""
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            file = Path(folder) / "image.png"
            Image.fromarray(to_uint8(sample.media[0])[0]).save(file)
            with torch.autocast(self.device.partition(":")[0], dtype=torch.float16):
                chat = [
                    {"role": "user", "content": self.question},
                    {"role": "assistant", "content": sample.prompts[0]},
                ]
                score = self.model.get_score(chat, [str(file)], hd_num=self.hd_num)
        return [float(score)], {}
