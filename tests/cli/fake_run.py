"""A run directory as a healthy run of 40 steps leaves it."""

import json
import math
import random

from PIL import Image, ImageDraw

SHAPES = ("circle", "square", "triangle")
COLOURS = {"red": "#d33", "blue": "#36c", "green": "#2a4", "yellow": "#ec2"}
PROMPTS = [f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES]
CONFIG = "recipe:\n  prompts_per_step: 8\n  note: 'a < b & c'\n"
SUMMARY = {
    "status": "finished", "seconds": 754.0, "steps": 40, "network_evaluations": 1234567,
    "reward_calls": 5120, "seed": 7,
    "before": {"strict": 0.3125, "colour": 0.5, "seen/strict": 0.375, "unseen/strict": 0.25},
    "after": {"strict": 0.6875, "colour": 0.875, "seen/strict": 0.75, "unseen/strict": 0.625},
}  # fmt: skip


def training(step, rng):
    """Metrics as a healthy run has them: rewards rise, the clip share grows slowly."""
    rise = 1 - math.exp(-step / 15)
    low, high = (0.02 + 0.05 * rise + 0.01 * rng.random() for _ in range(2))
    row = {
        "reward/colour": 0.5 + 0.4 * rise + rng.gauss(0, 0.03),
        "reward/strict": 0.3 + 0.35 * rise + rng.gauss(0, 0.05),
        "ratio_mean": 1 + rng.gauss(0, 2e-6), "ratio_std": 2e-5 + 1e-5 * rise,
        "clip_frac_high": high, "clip_frac_low": low, "kl": 0.01 * rise + 5e-4 * rng.random(),
        "zero_std_ratio": 0.1 + 0.1 * rng.random(), "adv_abs_mean": 0.8,
        "optim/grad_norm": math.exp(rng.gauss(-1, 0.3)), "optim/learning_rate": 3e-4,
        "timing/sample": 6 + rng.random(), "timing/reward": 0.8 + 0.2 * rng.random(),
        "timing/update": 9 + rng.random(), "throughput": 7.5,
    }  # fmt: skip
    row |= {"cost/reward_calls": 96 * (step + 1), "cost/decodes": 48 * (step + 1)}
    row |= {"cost/network_evaluations": 528 * (step + 1), "cost/seconds": 17.5 * (step + 1)}
    row["reward_mean"] = (row["reward/colour"] + row["reward/strict"]) / 2
    return row | {"reward_std": 0.2, "timing/step": row["timing/sample"] + row["timing/update"] + 1}


def evaluation(step):
    rise = 1 - math.exp(-step / 15)
    dims = {"strict": (0.3, 0.4), "colour": (0.5, 0.4), "diversity": (0.6, -0.05)}
    row = {f"eval/seen/{dim}": base + gain * rise for dim, (base, gain) in dims.items()}
    row |= {f"eval/unseen/{dim}": 0.9 * (b + 0.8 * gain * rise) for dim, (b, gain) in dims.items()}
    return row | {"eval/strict": (row["eval/seen/strict"] + row["eval/unseen/strict"]) / 2}


def rows(num_steps=40):
    rng = random.Random(3)
    made = []
    for step in range(num_steps):
        row = {"step": step, "seconds": 18.0 * step} | training(step, rng)
        row |= evaluation(step) if step % 10 == 0 or step == num_steps - 1 else {}
        if step == 0:
            row |= {f"check/ratio_drift_{k}": 1e-7 * (k + 1) for k in (2, 10, 3)}
        if step < 2:
            row |= {"check/moved_share": 0.5 + step / 2, "check/rank_spread": 0.0}
        made.append(row)
    return made


def write_rows(folder, made):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))


def grid(skill, seed, columns=4, side=32):
    """Pictures in the layout of a run's grids; `skill` is how often they show what is asked."""
    rng = random.Random(seed)
    num_rows = -(-len(PROMPTS) // columns)
    pad = 2
    sheet = Image.new("RGB", (columns * (side + pad) + pad, num_rows * (side + pad) + pad))
    for i, prompt in enumerate(PROMPTS):
        _, colour, shape = prompt.split()
        x, y = pad + i % columns * (side + pad), pad + i // columns * (side + pad)
        picture = Image.new("RGB", (side, side), "#f2f0ea")
        colour = colour if rng.random() < skill else rng.choice(list(COLOURS))
        shape = shape if rng.random() < skill else rng.choice(SHAPES)
        sides = {"circle": 40, "square": 4, "triangle": 3}[shape]
        centre = (rng.uniform(10, 22), rng.uniform(10, 22), rng.uniform(6, 9))
        ImageDraw.Draw(picture).regular_polygon(centre, sides, fill=COLOURS[colour])
        sheet.paste(picture, (x, y))
    return sheet


def fake_run(folder):
    (folder / "samples").mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    write_rows(folder, rows())
    index = {"prompts": PROMPTS, "steps": [0, 20, 40], "columns": 4}
    (folder / "samples" / "index.json").write_text(json.dumps(index))
    for step, skill in ((0, 0.2), (20, 0.6), (40, 1.0)):
        grid(skill, step).save(folder / "samples" / f"step-{step:06}.png")
    return folder
