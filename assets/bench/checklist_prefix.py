"""Measure the speedup of answering 28 questions about an image with a shared prefix.

    python assets/bench/checklist_prefix.py [pixels of a side] [repetitions]

The model is a random Qwen2.5-VL of a few layers, on one thread, in float32. The baseline runs one
forward pass per full prompt, on inputs prepared beforehand. The judge is timed completely,
including preprocessing.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from flowalign.types import MediaBatch
from reward_models.backbones.yes_no_judges import QwenYesNo
from reward_models.questions.question_set import read_question_set

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.fixtures.tiny_qwen import WORDS, build_judge

TEXT = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
}
VISION = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_heads": 4,
    "out_hidden_size": 256,
    "window_size": 112,
}


def main(side: int = 560, repetitions: int = 3) -> dict[str, float]:
    """Return the seconds of both methods, their largest difference, and the numbers of tokens."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        questions = read_question_set("vision_reward_image").questions[2:]
        # One token a word, as in a real vocabulary: bytes would make the questions too long.
        words = {f" {word}" for question in questions for word in question.strip("?").split()}
        source = build_judge(
            Path(folder) / "judge", words=(*WORDS, *sorted(words)), text=TEXT, vision=VISION
        )
        judge = QwenYesNo(str(source), device="cpu", dtype="float32")
        judge.load()
        noise = torch.rand(1, 1, 3, side, side, generator=torch.Generator().manual_seed(0))
        batch = MediaBatch((noise * 255).round() / 255, ["a red circle"])
        prompts = full_prompts(source, batch, questions)
        model = AutoModelForImageTextToText.from_pretrained(source, attn_implementation="sdpa")
        together, shared = timed(lambda: judge.ask(batch, [questions])[0], repetitions)
        singly, alone = timed(lambda: forward_each(model.eval(), judge, prompts), repetitions)
    lengths = [prompt["input_ids"].shape[1] for prompt in prompts]
    return {
        "questions": len(questions),
        "vision_tokens": int(prompts[0]["mm_token_type_ids"].sum()),
        "tokens_of_a_prompt": statistics.mean(lengths),
        "seconds_singly": singly,
        "seconds_together": together,
        "ratio": singly / together,
        "largest_difference": float((shared - alone).abs().max()),
    }


def full_prompts(source: Path, batch: MediaBatch, questions: list[str]) -> list[dict]:
    """Return the inputs of one forward pass per question."""
    processor = AutoProcessor.from_pretrained(source)
    prompts = []
    for question in questions:
        content = [{"type": "image"}, {"type": "text", "text": question}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        image = (batch.media[0, 0] * 255).to(torch.uint8)
        prompts.append(processor(text=[text], images=[image], do_resize=False, return_tensors="pt"))
    return prompts


def forward_each(model: torch.nn.Module, judge: QwenYesNo, prompts: list[dict]) -> torch.Tensor:
    """Return P(yes) of every full prompt."""
    rows = [model(**prompt, logits_to_keep=1, use_cache=False).logits[0, -1] for prompt in prompts]
    yes, no = (torch.stack(rows)[:, ids].logsumexp(1) for ids in (judge.yes, judge.no))
    return (yes - no).sigmoid()


def timed(work: Callable[[], torch.Tensor], repetitions: int) -> tuple[float, torch.Tensor]:
    """Return median seconds after one warm-up, and the result of the work."""
    seconds = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        with torch.no_grad():
            result = work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:]), result


if __name__ == "__main__":
    for name, value in main(*map(int, sys.argv[1:3])).items():
        sys.stdout.write(f"{name:>20}: {value:.6g}\n")
