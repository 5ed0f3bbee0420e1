"""Implements VQAScore, P(yes) to whether an image shows the prompt, and the log odds of yes.

Source: VLM3D, arXiv:2509.15772v1 and arXiv:2511.14271v1: the log odds of Qwen2.5-VL for a semantic
and a geometric question about rendered views. The papers do not give the wording of the questions
or the weights of the two rewards; the geometric question here is our choice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from flowalign.types import JudgeCalls, MediaBatch, PositiveInt, RewardSpec
from flowalign.utils.files import read_object
from reward_models.backbones.checkpoints import (
    find_file,
    find_folder,
    fingerprint_of,
    load_exactly,
    on_meta_device,
    read_weights,
    rename_tensors,
    require_settings,
)
from reward_models.backbones.libraries import transformers
from reward_models.backbones.pixels import normalise, pad_to_square, resize
from reward_models.backbones.reward_bases import (
    BatchScores,
    Composed,
    NetworkReward,
    ScreenedReward,
)
from reward_models.backbones.yes_no_judges import Dtype, QwenYesNo, YesNoJudge

QUESTION = 'Does this figure show "[[prompt]]"? Please answer yes or no.'
"""Question to the judge; `[[prompt]]` stands for the sample's prompt."""
_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions. USER: "
)
_LAYOUT = {
    "mm_projector_type": "mlp2x_gelu",
    "mm_vision_select_layer": -2,
    "mm_vision_select_feature": "patch",
}
_RENAMES = (
    (r"^(?!vision_tower\.|mm_projector\.)", "t5."),
    (r"^vision_tower\.vision_tower\.vision_model\.", "vision."),
)
_ALIASES = (r"t5\.embed_tokens\.weight", r"vision\.embeddings\.position_ids")
"""Unused keys: a second name of the word embedding, and a buffer of old versions."""
_TIED = ("t5.encoder.embed_tokens.weight", "t5.decoder.embed_tokens.weight", "t5.lm_head.weight")
"""Names that get the word embedding if a file lacks them. FlanT5's file has a separate head, but
transformers would tie it anyway; loading by assignment keeps both."""


def fill_questions(questions: Sequence[str], prompt: str) -> list[str]:
    """Return the questions with `[[prompt]]` replaced by the prompt."""
    return [question.replace("[[prompt]]", prompt) for question in questions]


def rate_answers(
    batch: MediaBatch,
    questions: Sequence[str],
    judge: YesNoJudge,
    ask: Callable[[MediaBatch, Sequence[Sequence[str]]], Float[Tensor, "m Q"]],
) -> BatchScores:
    """Return one score per question from the judge's answers to `ask` about each sample."""
    answers = ask(batch, [fill_questions(questions, prompt) for prompt in batch.prompts])
    silent = answers.isnan().any(1).nonzero().flatten().tolist()
    return BatchScores(answers, failed=dict.fromkeys(silent, judge.silence))


class VQAScore(Composed, ScreenedReward):
    """Scores a judge's P(yes) that the image or video shows the prompt."""

    def __init__(self, judge: YesNoJudge, question: str = QUESTION):
        if "[[prompt]]" not in question:
            raise ValueError(f"the question {question!r} must contain [[prompt]]")
        self.judge, self.question = judge, question
        self.spec = RewardSpec(
            name="vqa_score",
            dims=("alignment",),
            scale=(0.0, 1.0),
            licence="that of the judge",
            needs=("prompt",),
            normalisation="P(yes) relative to yes and no",
            version=f"{judge.version} {question}",
        )

    @override
    def judge_calls(self, group_sizes: Sequence[int]) -> JudgeCalls:
        return self.judge.calls(sum(group_sizes))

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Ask one question about each sample."""
        return rate_answers(batch, [self.question], self.judge, self.judge.ask)


@dataclass(eq=False, repr=False)
class ClipFlanT5(NetworkReward):
    """Scores with VQAScore's own model: T5 that reads projected CLIP patches among the words.

    Two layers project the patches. The score is the geometric mean of the probabilities of the two
    tokens of "Yes" (word and end), given the question in the chat format of the fine-tuning.
    `source` is a folder or repository such as `zhiqiulin/clip-flant5-xxl`; its weights include the
    image encoder. `vision` overrides only the encoder's config that `mm_vision_tower` names.
    """

    network: "_ClipT5" = field(init=False)
    source: str = "zhiqiulin/clip-flant5-xxl"
    tokenizer: str = "google/flan-t5-xxl"
    vision: str | None = None
    dtype: Dtype = "float32"
    batch_size: PositiveInt = field(default=8, kw_only=True)

    def declare(self) -> RewardSpec:
        """Return the declaration."""
        return RewardSpec(
            name="clip_flant5",
            dims=("alignment",),
            modality="image",
            scale=(0.0, 1.0),
            licence="Apache-2.0",
            differentiable=True,
            needs=("prompt",),
            normalisation="geometric mean over the tokens of Yes",
            version=f"{fingerprint_of(self.source)} {fingerprint_of(self.tokenizer)} {self.dtype}",
        )

    def read(self) -> nn.Module:
        """Read T5, image encoder and projector; every key of the checkpoint is accounted for."""
        config = read_object(find_file(self.source, "config.json"))
        require_settings(config, _LAYOUT, self.source)
        tower = find_file(self.vision or config.get("mm_vision_tower", ""), "config.json")
        words = find_folder(self.tokenizer, ("*.json", "*.model"))
        self.words = transformers.AutoTokenizer.from_pretrained(words)
        renamed = rename_tensors(read_weights(self.source), _RENAMES)
        dtype = getattr(torch, self.dtype)
        tensors = {key: tensor.to(dtype) for key, tensor in renamed.items()}
        for name in _TIED:
            tensors.setdefault(name, tensors.get("t5.shared.weight", torch.zeros(())))
        with on_meta_device():
            network = _ClipT5(config, transformers.CLIPVisionConfig.from_pretrained(tower.parent))
        load_exactly(network, tensors, self.source, unused=_ALIASES)
        return network

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n 1"]:
        """Return the probability of yes, differentiable in the pixels."""
        pixels = padded_square(batch.media[:, 0].to(self.place), self.network.image_size)
        asked = [QUESTION.replace("[[prompt]]", prompt) for prompt in batch.prompts]
        after = [self._tokens(f"\n{text} ASSISTANT: ") for text in asked]
        answer, dtype = self._tokens("Yes"), getattr(torch, self.dtype)
        logits = self.network(pixels.to(dtype), self._tokens(_SYSTEM), after, answer)
        log_p = logits.float().log_softmax(-1)
        return log_p[:, torch.arange(len(answer)), answer].mean(1, keepdim=True).exp()

    def _tokens(self, text: str) -> Tensor:
        """Tokenise one piece; every piece ends with an end token, also before the image."""
        return torch.tensor(self.words(text)["input_ids"], device=self.place)


class _ClipT5(nn.Module):
    def __init__(self, config: Mapping[str, Any], vision: Any):
        super().__init__()
        self.t5 = transformers.T5ForConditionalGeneration(
            transformers.T5Config.from_dict(dict(config))
        )
        self.vision = transformers.CLIPVisionModel(vision)
        width = self.t5.config.d_model
        self.mm_projector = nn.Sequential(
            nn.Linear(vision.hidden_size, width), nn.GELU(), nn.Linear(width, width)
        )
        if not isinstance(vision.image_size, int):
            raise ValueError(
                f"image_size of the image encoder is {vision.image_size}; it must be one number"
            )
        self.image_size = vision.image_size

    def forward(
        self,
        pixels: Float[Tensor, "n 3 h w"],
        before: Tensor,
        after: Sequence[Tensor],
        answer: Tensor,
    ) -> Float[Tensor, "n answer vocabulary"]:
        """Return logits of the answer's tokens; the image is between `before` and `after`."""
        hidden = self.vision(pixels, output_hidden_states=True).hidden_states[-2][:, 1:]
        image, embed = self.mm_projector(hidden), self.t5.shared
        first = embed(before).expand(len(pixels), -1, -1)
        rest = embed(pad_sequence(list(after), batch_first=True))
        lengths = torch.tensor([len(words) for words in after], device=pixels.device)
        given = first.shape[1] + image.shape[1]
        total = torch.arange(given + rest.shape[1], device=pixels.device)
        return self.t5(
            inputs_embeds=torch.cat([first, image, rest], dim=1),
            attention_mask=(total < (given + lengths)[:, None]).long(),
            labels=answer.repeat(len(pixels), 1),
        ).logits


def padded_square(frames: Float[Tensor, "n 3 h w"], size: int) -> Float[Tensor, "n 3 size size"]:
    """Pad to a square with the 8-bit mean colour, resize with PIL's arithmetic, and normalise."""
    return normalise(resize(pad_to_square(frames), size, size, quantised=True))


QUESTIONS = {
    "semantic": QUESTION,
    "geometric": "Is the shape of everything in this figure plausible, complete and consistent? "
    "Please answer yes or no.",
}
"""Question of each dimension; `[[prompt]]` stands for the sample's prompt."""


class YesNoOdds(Composed, ScreenedReward):
    """Scores log P(yes) - log P(no) for one question per dimension, differentiable in the pixels.

    Unlike VQAScore's probability, it keeps a gradient if the judge is certain. A video is one
    sample, so several views of an object can be its frames.
    """

    def __init__(self, judge: QwenYesNo, questions: Mapping[str, str] | None = None):
        self.judge, self.questions = judge, dict(QUESTIONS if questions is None else questions)
        if not self.questions:
            raise ValueError(
                f"questions of YesNoOdds are empty; the defaults are {list(QUESTIONS)}"
            )
        named = any("[[prompt]]" in question for question in self.questions.values())
        self.spec = RewardSpec(
            name="yes_no_odds",
            dims=tuple(self.questions),
            licence="that of the judge",
            differentiable=True,
            needs=("prompt",) if named else (),
            normalisation="log-odds",
            version=f"{judge.version} {list(self.questions.values())}",
        )

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Ask every question about each sample."""
        questions = [*self.questions.values()]
        return rate_answers(batch, questions, self.judge, self.judge.log_odds)
