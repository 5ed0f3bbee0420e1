"""Draw what the embedded editing model makes of held-out requests, beside what was wanted.

    PYTHONPATH=assets/shapes:assets/shapes_edit python assets/figures/shapes_edit.py

Writes `shapes_edit.png`: source, instruction, result and target, two requests of every verb a side.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from diffusers import FluxKontextPipeline
from edited_world import Edit, picture, splits
from torch import Tensor
from train import TOKENS

HERE = Path(__file__).parent
ROWS = 4


def results(pipe: FluxKontextPipeline, some: list[Edit]) -> Tensor:
    """Return the pipeline's pictures of requests."""
    return pipe(
        image=torch.stack([picture(edit.change.source) for edit in some]),
        prompt=[edit.instruction for edit in some],
        height=32,
        width=32,
        max_area=32 * 32,
        _auto_resize=False,
        max_sequence_length=TOKENS,
        num_inference_steps=8,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).images


def figure(some: list[Edit], made: Tensor) -> None:
    """Draw a row of three pictures for each request, two requests a row."""
    fig, axes = plt.subplots(ROWS, 6, figsize=(9, 6.4), dpi=100, layout="constrained")
    for axis in axes.flat:
        axis.axis("off")
    for i, (edit, result) in enumerate(zip(some, made, strict=True)):
        row = axes[i % ROWS][3 * (i // ROWS) :][:3]
        shown = {
            "source": picture(edit.change.source),
            f'result of\n"{edit.instruction}"': result,
            "target": picture(edit.change.target),
        }
        for axis, (title, pixels) in zip(row, shown.items(), strict=True):
            axis.imshow(pixels.permute(1, 2, 0).clamp(0, 1), interpolation="nearest")
            axis.set_title(title, fontsize=7)
    fig.savefig(HERE / "shapes_edit.png")


def main() -> None:
    """Parse the options, edit and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=HERE.parent / "shapes_edit" / "kontext")
    args = parser.parse_args()
    some = splits()["seen"][: 2 * ROWS]
    figure(some, results(FluxKontextPipeline.from_pretrained(args.model), some))


if __name__ == "__main__":
    main()
