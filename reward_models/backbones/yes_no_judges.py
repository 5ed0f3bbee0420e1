"""Implements judges that answer questions about images and videos with the probability of yes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowalign.functional.path_gradient import straight_through
from flowalign.types import MediaBatch, PositiveFloat, PositiveInt, Range
from flowalign.utils.errors import explain_errors, require_known
from flowalign.utils.files import read_object
from flowalign.utils.imports import LazyModule
from reward_models.backbones.checkpoints import find_folder, fingerprint_of, read_transformers
from reward_models.backbones.libraries import name_cache, transformers
from reward_models.backbones.pixels import at_rate, each_second, resize
from reward_models.backbones.prefix import (
    PackedQuestions,
    find_answer_tokens,
    find_single_tokens,
    group_by_size,
    pack_questions,
)
from reward_models.backbones.qwen2_vl import cut_patches, fit_size
from reward_models.backbones.reward_bases import YesNoJudge, choose_device, require_device

_video_utils = LazyModule("transformers.video_utils")

Dtype = Literal["float32", "bfloat16", "float16"]
ARCHITECTURES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_VISION_END = "<|vision_end|>"
_MIN_PIXELS = 4 * 28 * 28


class QwenYesNo(YesNoJudge):
    """Local Qwen2-VL, Qwen2.5-VL or Qwen3-VL as a judge.

    P(yes) is relative to yes and no together. `canonical` adds up every spelling (case, leading
    space) that is a single token; otherwise only `Yes` and `No` count. Each frame is shrunk to at
    most `max_pixels`. Of a video, about `fps` evenly spaced frames per second are used, at most
    `max_frames`; with `fps: seconds` it is the frame nearest to each full second. A question that
    contains a special token, for example from a prompt, is not answered.

    All questions about a sample share a prefix of system prompt and vision tokens, computed once
    per `ask`. The questions are packed into one row after the cached keys. Each question attends to
    the prefix and to itself. Answers about samples that require a gradient have one, through the
    vision tower; the pixels are then prepared as tensors instead of by the processor.
    """

    video_needs: tuple[Literal["fps"], ...] = ("fps",)

    def __init__(
        self,
        source: str,
        device: str = "auto",
        dtype: Dtype = "bfloat16",
        batch_size: PositiveInt = 4,
        max_pixels: Annotated[int, Range(least=_MIN_PIXELS)] = 768 * 28 * 28,
        fps: PositiveFloat | Literal["seconds"] = 1.0,
        max_frames: Annotated[int, Range(least=2)] = 24,
        canonical: bool = True,
    ):
        self.source, self.batch_size, self.max_pixels = source, batch_size, max_pixels
        self.fps: float | Literal["seconds"] = fps
        self.max_frames, self.canonical = max_frames, canonical
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = choose_device(device)
        self.version = (
            f"{fingerprint_of(source)} {dtype} {max_pixels} pixels {fps} fps {max_frames} frames "
            f"{'canonical' if canonical else 'exact'}"
        )

    def load(self) -> None:
        """Read tokenizer and weights; raise ValueError if they are not a judge's."""
        require_device(self.device)
        folder = find_folder(self.source, ("*.json", "*.txt", "*.jinja", "*.safetensors"))
        self.processor = _read_processor(folder)
        self.yes, self.no = (
            torch.tensor(find_answer_tokens(self.processor.tokenizer, word, self.canonical))
            for word in ("yes", "no")
        )
        # The native class: a subclass would lose its language model when old keys are renamed.
        kind = transformers.AutoModelForImageTextToText
        network = read_transformers(kind, folder, dtype=self.dtype, attn_implementation="sdpa")
        self.network = network.eval().requires_grad_(False).to(self.device)

    def ask(
        self, batch: MediaBatch, questions: Sequence[Sequence[str]]
    ) -> Float[Tensor, "n questions"]:
        """Return P(yes), computed for `batch_size` samples of equal frame counts at a time."""
        return self.log_odds(batch, questions).sigmoid()

    def log_odds(
        self, batch: MediaBatch, questions: Sequence[Sequence[str]]
    ) -> Float[Tensor, "n questions"]:
        """Return log P(yes) - log P(no), which does not saturate if the judge is certain."""

        def odds(logits: Tensor, _: Sequence[int]) -> Tensor:
            return logits[..., self.yes].logsumexp(-1) - logits[..., self.no].logsumexp(-1)

        return self._asked(batch, questions, odds)

    def probability(
        self,
        batch: MediaBatch,
        questions: Sequence[Sequence[str]],
        spellings: Sequence[Sequence[Sequence[str]]],
    ) -> Float[Tensor, "n questions"]:
        """Return the probability, among all tokens, of an answer in any of its spellings.

        Spellings of several tokens do not count, and a token shared by several spellings counts
        once.

        Raises:
            ValueError: No spelling of an answer is a single token.
        """
        self.load()
        tokenizer = self.processor.tokenizer
        tokens = [[find_single_tokens(tokenizer, some) for some in row] for row in spellings]

        def answer(logits: Tensor, rows: Sequence[int]) -> Tensor:
            p = logits.softmax(-1)
            each = [
                p[k, j, ids].sum() for k, i in enumerate(rows) for j, ids in enumerate(tokens[i])
            ]
            return torch.stack(each).view(p.shape[:2])

        return self._asked(batch, questions, answer)

    def _asked(
        self,
        batch: MediaBatch,
        questions: Sequence[Sequence[str]],
        read: Callable[[Tensor, Sequence[int]], Tensor],
    ) -> Float[Tensor, "n questions"]:
        """Return `read(logits, rows)`, with the answers' logits [n, questions, V], for all rows."""
        self.load()
        tails = [[self.tail(question) for question in row] for row in questions]
        answers = self.read_logits(batch, tails, read, pack_questions)
        return answers.masked_fill(self.find_special(questions), torch.nan)

    def find_special(self, questions: Sequence[Sequence[str]]) -> Bool[Tensor, "n questions"]:
        """Return which questions contain a special token."""
        special = self.processor.tokenizer.all_special_tokens
        return torch.tensor(
            [[any(token in question for token in special) for question in row] for row in questions]
        )

    def read_logits(
        self,
        batch: MediaBatch,
        tails: Sequence[Sequence[Sequence[int]]],
        read: Callable[[Tensor, Sequence[int]], Tensor],
        pack: Callable[[Sequence[Sequence[Sequence[int]]]], PackedQuestions],
    ) -> Float[Tensor, "n questions"]:
        """Return `read(logits, rows)` for all rows, given the tokens that follow the media.

        Logits [n, places, V] are those of the successors that `pack` wants.
        """
        answers = torch.empty(len(batch), len(tails[0]))
        frames = {i: self._frames(batch, i) for i in range(len(batch))}
        for rows in group_by_size(frames, len):
            for start in range(0, len(rows), self.batch_size):
                some = rows[start : start + self.batch_size]
                packed = pack([tails[i] for i in some])
                with torch.set_grad_enabled(batch.media.requires_grad):
                    prefix = self._prefix(batch, some, [frames[i] for i in some])
                    answers[some] = read(self._continue(prefix, packed), some).cpu()
        return answers

    def _frames(self, batch: MediaBatch, i: int) -> list[int]:
        total = batch.media.shape[1]
        if total == 1:
            return [0]
        if len(batch.fps) != len(batch):
            raise ValueError(f"{self.source} needs the fps of every video")
        if self.fps == "seconds":
            return each_second(total, batch.fps[i], self.max_frames)
        return at_rate(total, batch.fps[i], self.fps, least=2, most=self.max_frames)

    def _prompt(self, kind: str, question: str) -> str:
        content = [{"type": kind}, {"type": "text", "text": question}]
        return self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )

    def tail(self, question: str) -> list[int]:
        """Tokenise the text after the image or video, which starts at a special token."""
        text = self._prompt("image", question).partition(_VISION_END)[2]
        return self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _prefix(
        self, batch: MediaBatch, rows: Sequence[int], frames: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        """Return the inputs up to the end of the image or video, of equal length for all rows."""
        media = [self._shrunk(batch.media[i, list(f)]) for i, f in zip(rows, frames, strict=True)]
        kind = "image" if batch.media.shape[1] == 1 else "video"
        text = "".join(self._prompt(kind, "").partition(_VISION_END)[:2])
        given: dict[str, Any] = {"images": [clip[0].detach() for clip in media]}
        if kind == "video":
            total = batch.media.shape[1]
            given = {
                "videos": [clip.detach() for clip in media],
                "video_metadata": [
                    _video_utils.VideoMetadata(total, fps=batch.fps[i], frames_indices=list(f))
                    for i, f in zip(rows, frames, strict=True)
                ],
                "do_sample_frames": False,
            }
        inputs = self.processor(
            text=[text] * len(rows), do_resize=False, do_rescale=False, return_tensors="pt", **given
        )
        unused = ("attention_mask", "video_metadata")
        inputs = {name: value for name, value in inputs.items() if name not in unused}
        if "second_per_grid_ts" in inputs:
            inputs["second_per_grid_ts"] = torch.as_tensor(inputs["second_per_grid_ts"])
        if batch.media.requires_grad:
            name = "pixel_values" if kind == "image" else "pixel_values_videos"
            vision = self.processor.image_processor
            settings = vision.patch_size, vision.image_mean, vision.image_std
            inputs[name] = torch.cat([cut_patches(clip, *settings)[0] for clip in media])
        return {name: value.to(self.device) for name, value in inputs.items()}

    def _shrunk(self, frames: Float[Tensor, "F 3 H W"]) -> Float[Tensor, "F 3 h w"]:
        vision = self.processor.image_processor
        factor = vision.patch_size * vision.merge_size
        _, _, height, width = frames.shape
        height, width = fit_size(height, width, _MIN_PIXELS, self.max_pixels, factor)
        frames = resize(frames.float().clamp(0, 1), height, width).clamp(0, 1)
        return straight_through((frames * 255).round() / 255, frames)

    def _continue(
        self, prefix: dict[str, Any], questions: PackedQuestions
    ) -> Float[Tensor, "n q V"]:
        core = self.network.model
        grids = {k: v for k, v in prefix.items() if k.endswith(("_grid_thw", "_grid_ts"))}
        positions, _ = core.get_rope_index(
            prefix["input_ids"], mm_token_type_ids=prefix["mm_token_type_ids"], **grids
        )
        seen = core(**prefix, position_ids=positions, use_cache=True)
        questions = questions.to(self.device)
        # The prefix ends in a text token, whose successor's position is the next integer. The
        # model's own rope_deltas would start after the largest temporal position of a video.
        hidden = core.language_model(
            inputs_embeds=core.get_input_embeddings()(questions.tokens),
            position_ids=positions[:, :, -1:] + 1 + questions.offset,
            attention_mask=questions.mask(positions.shape[-1]),
            use_cache=True,
            **{name_cache(): seen[name_cache()]},
        ).last_hidden_state
        last = questions.last[..., None].expand(-1, -1, hidden.shape[-1])
        return self.network.lm_head(hidden.gather(1, last)).float()


def _read_processor(folder: Path) -> Any:
    kind = read_object(folder / "config.json").get("model_type")
    require_known(f"{folder} must hold a judge, not a model of type", [str(kind)], ARCHITECTURES)
    with explain_errors(f"{folder} has no processor", OSError):
        return transformers.AutoProcessor.from_pretrained(folder)
