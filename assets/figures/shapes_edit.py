"""Draw the results of training the toy editing model, from finished runs of several seeds.

    PYTHONPATH=assets/shapes:assets/shapes_edit python assets/figures/shapes_edit.py RUN [RUN ...]

Writes `shapes_edit.png` and `shapes_edit.json` (numbers of all runs) next to this script. The
figure shows source, result before and after the first run, and target. It has two held-out requests
per verb for which exactly one of the two results is right.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from diffusers import FluxKontextPipeline
from edited_world import EDITS, Edit, picture, splits
from torch import Tensor
from train import TOKENS

from flowalign.training.checkpoint import latest
from flowalign.types import MediaBatch
from reward_models.verifiers.shapes_edit import ShapesEditVerifier

HERE = Path(__file__).parent
MODEL = HERE.parent / "shapes_edit" / "kontext"
EACH = 2
"""Requests per verb."""
KEYS = ("seed", "before", "after", "seconds", "steps", "network_evaluations", "reward_calls")


def results(pipe: FluxKontextPipeline, some: Sequence[Edit]) -> Tensor:
    """Return the pipeline's images for requests."""
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


def right(some: Sequence[Edit], made: Tensor) -> list[bool]:
    """Return whether each result matches exactly."""
    batch = MediaBatch(
        made[:, None],
        [edit.instruction for edit in some],
        [edit.change.metadata() for edit in some],
        references=[[picture(edit.change.source)] for edit in some],
    )
    return [bool(value) for value in ShapesEditVerifier().score(batch).values[:, -1]]


def changed(some: Sequence[Edit], before: Tensor, after: Tensor) -> list[int]:
    """Return requests for which exactly one of two results is right, `EACH` per verb."""
    pairs = zip(right(some, before), right(some, after), strict=True)
    found = [i for i, (was, became) in enumerate(pairs) if was != became]
    by_verb = [[i for i in found if some[i].combination[0] == verb][:EACH] for verb in EDITS]
    return [i for chosen in by_verb for i in chosen]


def figure(some: Sequence[Edit], before: Tensor, after: Tensor, chosen: Sequence[int]) -> None:
    """Draw four images for each selected request, `EACH` requests per row."""
    fig, axes = plt.subplots(len(EDITS), 4 * EACH, figsize=(11, 6.6), dpi=100, layout="constrained")
    for axis in axes.flat:
        axis.axis("off")
    for k, i in enumerate(chosen):
        change = some[i].change
        shown = {
            "source": picture(change.source),
            "before": before[i],
            "after": after[i],
            "target": picture(change.target),
        }
        row = axes.flat[4 * k : 4 * k + 4]
        for axis, (title, pixels) in zip(row, shown.items(), strict=True):
            axis.imshow(pixels.permute(1, 2, 0).clamp(0, 1), interpolation="nearest")
            axis.set_title(title, fontsize=8)
        row[0].set_title(None)
        row[0].set_title(f"{some[i].instruction}\n\nsource", fontsize=8, loc="left")
    fig.savefig(HERE / "shapes_edit.png")


def main() -> None:
    """Parse the options, edit before and after, draw, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories")
    folders = parser.parse_args().runs
    some = [edit for name in ("seen", "unseen") for edit in splits()[name]]
    pipe = FluxKontextPipeline.from_pretrained(MODEL)
    before = results(pipe, some)
    newest = latest(folders[0] / "checkpoints")
    assert newest, f"{folders[0]} has no checkpoint"
    pipe.load_lora_weights(newest / "ema")
    after = results(pipe, some)
    figure(some, before, after, changed(some, before, after))
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    rows = {"runs": [{key: summary[key] for key in KEYS} for summary in summaries]}
    (HERE / "shapes_edit.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
