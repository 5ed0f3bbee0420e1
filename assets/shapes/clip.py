"""Train the two-tower model of Shapes, the bundled toy world, and write it to `clip/`.

    python assets/shapes/clip.py          # about twenty minutes on one CPU core, seeded

It learns contrastively on rendered images; half of them are passed through the toy model's
autoencoder. A batch holds scenes and their near misses (one word of the prompt changed), so that
the towers must read every word. The prompts of the *unseen* split never occur. open_clip can load
the folder.
"""

import argparse
import json
import random
import time
from pathlib import Path

import open_clip
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from toy_training import make_tokenizer
from transformers import PreTrainedTokenizerFast
from world import COLOURS, COUNTS, RELATIONS, SHAPES, phrase, render, splits

HERE = Path(__file__).parent
CONFIG = {
    "model_cfg": {
        "embed_dim": 64,
        "vision_cfg": {
            "image_size": 32,
            "patch_size": 4,
            "width": 64,
            "layers": 4,
            "head_width": 16,
        },
        "text_cfg": {
            "context_length": 12,
            "vocab_size": 0,
            "width": 64,
            "heads": 4,
            "layers": 3,
            "hf_tokenizer_name": "local",
            "tokenizer_kwargs": {"clean": "whitespace"},
        },
    },
    "preprocess_cfg": {
        "mean": [0.1, 0.1, 0.12],
        "std": [0.2, 0.2, 0.2],
        "interpolation": "bicubic",
        "resize_mode": "shortest",
    },
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a whole-word tokenizer; `<eos>` has the highest id, where open_clip looks for it."""
    words = {w for c in COUNTS for o in COLOURS for s in SHAPES for w in phrase(c, o, s).split()}
    words |= {w for r in RELATIONS for w in r.split()}
    vocab = {w: i for i, w in enumerate(["<pad>", "<bos>", "<unk>", *sorted(words), "<eos>"])}
    return make_tokenizer(vocab, 12)


def near_misses(prompts: list[str]) -> dict[str, list[str]]:
    """Return, for each prompt, prompts of equal length with one word or the order changed."""
    known, words = set(prompts), [*COLOURS, *SHAPES, *(s + "s" for s in SHAPES), "two", "three"]
    found: dict[str, list[str]] = {}
    for prompt in prompts:
        split = prompt.split()
        edits = [[*split[:i], w, *split[i + 1 :]] for i in range(len(split)) for w in words]
        for a, b in (("left", "right"), ("above", "below")):
            swap = {a: b, b: a}
            edits.append([swap.get(w, w) for w in split])
        for relation in RELATIONS:
            first, _, second = prompt.partition(f" {relation} ")
            edits.append([*second.split(), *relation.split(), *first.split()])
        found[prompt] = sorted({" ".join(e) for e in edits} & known - {prompt})
    return found


def pictures(prompts: list[str], copies: int, seed: int) -> Tensor:
    """Render images [copies, prompts, 3, 32, 32] in 8 bits."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.stack([render(p, generator) for p in prompts]) for _ in range(copies)]
    return (torch.stack(drawn) * 255).round().to(torch.uint8)


@torch.no_grad()
def reproduced(drawn: Tensor) -> Tensor:
    """Pass images through the toy model's autoencoder, so that they have its artefacts."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(HERE / "sd3" / "vae").eval()
    chunks = drawn.flatten(0, 1).split(256)
    out = [vae(c.float() / 127.5 - 1).sample.add(1).mul(127.5) for c in chunks]
    return torch.cat(out).round().clamp(0, 255).to(torch.uint8).view_as(drawn)


def batch_of(rng: random.Random, prompts: list[str], misses: dict, size: int) -> list[str]:
    """Draw scenes with up to three near misses each; no prompt occurs twice."""
    chosen: dict[str, None] = {}
    while len(chosen) < size:
        prompt = rng.choice(prompts)
        for p in [prompt, *rng.sample(misses[prompt], min(3, len(misses[prompt])))]:
            chosen[p] = None
    return list(chosen)[:size]


def train(args: argparse.Namespace) -> tuple[open_clip.CLIP, PreTrainedTokenizerFast]:
    """Train contrastively; print the loss and the running accuracy within batches."""
    torch.manual_seed(0)
    words, shown = tokenizer(), [p for name in ("train", "seen") for p in splits()[name]]
    CONFIG["model_cfg"]["text_cfg"]["vocab_size"] = len(words)
    model = open_clip.CLIP(**CONFIG["model_cfg"])
    drawn = pictures(shown, args.copies, seed=1)
    drawn[1::2] = reproduced(drawn[1::2])
    ids = words(shown, padding="max_length", return_tensors="pt").input_ids
    index, misses = {p: i for i, p in enumerate(shown)}, near_misses(shown)
    mean, std = (torch.tensor(CONFIG["preprocess_cfg"][k]).view(3, 1, 1) for k in ("mean", "std"))
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps, pct_start=0.05)
    rng, start, right = random.Random(2), time.time(), 0.0
    singles = [p for p in shown if len(p.split()) == 3]
    for step in range(args.steps):
        some = batch_of(rng, singles * 4 + shown if step % 3 == 0 else shown, misses, args.batch)
        rows = torch.tensor([index[p] for p in some])
        copy = torch.tensor([rng.randrange(args.copies) for _ in some])
        x = (drawn[copy, rows].float() / 255 - mean) / std
        image, text, scale = model(x, ids[rows])
        logits, target = scale * image @ text.T, torch.arange(len(some))
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=4.6)
        right += 0.01 * (float((logits.argmax(1) == target).float().mean()) - right)
        if step % 50 == 0 or step == args.steps - 1:
            figures = f"loss {loss.item():.3f} right {right:.3f} scale {scale.item():.1f}"
            print(f"{step:5d} {time.time() - start:6.0f}s {figures}", flush=True)  # noqa: T201
    return model, words


@torch.no_grad()
def choice_accuracy(model: open_clip.CLIP, words: PreTrainedTokenizerFast, split: str) -> float:
    """Return how often a new image is closer to its own prompt than to a near miss."""
    mean, std = (torch.tensor(CONFIG["preprocess_cfg"][k]).view(3, 1, 1) for k in ("mean", "std"))
    everything, generator = [p for some in splits().values() for p in some], torch.Generator()
    misses, rng = near_misses(everything), random.Random(5)
    own = [p for p in splits()[split] if misses[p]]
    x = torch.stack([render(p, generator.manual_seed(9 + i)) for i, p in enumerate(own)])
    image = model.encode_image((x - mean) / std, normalize=True)

    def text(prompts: list[str]) -> Tensor:
        tokens = words(prompts, padding="max_length", return_tensors="pt").input_ids
        return model.encode_text(tokens, normalize=True)

    other = [rng.choice(misses[p]) for p in own]
    return float(((image * text(own)).sum(1) > (image * text(other)).sum(1)).float().mean())


def main() -> None:
    """Train, measure and write the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--copies", type=int, default=12)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, default=HERE / "clip")
    args = parser.parse_args()
    model, words = train(args)
    model.eval()
    args.out.mkdir(parents=True, exist_ok=True)
    figures = {f"near_miss_{s}": choice_accuracy(model, words, s) for s in ("seen", "unseen")}
    print(figures)  # noqa: T201
    tensors = {k: v.contiguous() for k, v in model.state_dict().items() if k != "attn_mask"}
    save_file(tensors, args.out / "open_clip_model.safetensors")
    text = json.dumps(CONFIG | {"figures": figures}, indent=1)
    (args.out / "open_clip_config.json").write_text(text + "\n")
    words.save_pretrained(args.out)


if __name__ == "__main__":
    main()
