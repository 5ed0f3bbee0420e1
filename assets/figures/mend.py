"""Compare MEND with four methods at equal network evaluations on Shapes and Words.

    python assets/figures/mend.py shapes runs/mend                        # resumes
    python assets/figures/mend.py words runs/mend --only nft --seeds 0    # a part
    python assets/figures/mend.py words                                   # the stored table

See `equal_cost.py` for tuning and training. Every update has 48 samples of 8 prompts, and rates are
constant. Chosen is the rate with the highest reward on training prompts. Writes `mend_WORLD.json`
next to this script or into --to, and prints the table.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from equal_cost import Study, compared, finished, histories, kept, options, results, tuned

from flowalign.functional.resampling import smallest_difference

GROUPS = {"data": {"prompts_per_step": 8, "sampling": {"samples_per_prompt": 6}}}
LAST = {"class_path": "flowalign.gradient_paths.ReFL", "init_args": {"last_steps": 4}}
REFL = {"recipe": {"gradient_path": LAST}}
"""One of the last 4 of 8 steps; published: of the last 11 of 25."""
PIXELS = ("reward", "exact_match", "pixel_distance")
MEASURES = {"words": PIXELS, "shapes": (*PIXELS, "clip_score_distance", "diversity")}
"""Words has no image encoder, and one sample per prompt."""
ENCODER = {
    "class_path": "reward_models.CLIPScore",
    "init_args": {"model": "assets/shapes/clip", "pretrained": None},
}
"""Image encoder of the toy two-tower model, which the learned reward uses as well. It is scored
without a weight, so evaluations report the distance of its embeddings to those of the base."""
COSTS = {"mend": 480, "opsd": 480, "refl": 480, "nft": 432, "crd": 624}
"""Evaluations per step of 48 samples."""
REWARDS = {
    "shapes": [f"learned_{name}" for name in ("colour", "shape", "count", "position", "clean")],
    "words": ["text_likelihood"],
}


def read(path: str) -> dict[str, Any]:
    """Return the settings of a run file without those that it extends."""
    return yaml.safe_load(Path(path).read_text())


def rewards(path: str, dropped: str = "") -> dict[str, Any]:
    """Return the rewards of a run file, without those of one class."""
    found = read(path)["rewards"]
    return {"rewards": [one for one in found if one["class_path"] != dropped]}


def opsd_on_words() -> dict[str, Any]:
    """Return the settings that turn MEND's run file into one of DiffusionOPSD."""
    recipe = read("configs/shapes_opsd.yaml")["recipe"]
    ascent = recipe["data"]["ascent"] | {"micro_batch": 16}
    data = {"proposals": None, "ascent": ascent, "advantages": recipe["data"]["advantages"]}
    return {"recipe": {"data": data, "loss": recipe["loss"]}, "optimizer": {"eps": 1e-8}}


def steps_of(_files: Sequence[str], place: Path, budget: int) -> int:
    """Return the steps of a method in a budget; its name is that of the folder of its trials."""
    return round(budget / COSTS[place.name])


def study(world: str) -> Study:
    """Return the study of a toy model."""
    names = ("mend", "opsd", "refl", "nft", "crd")
    files = dict.fromkeys(names, f"configs/{world}_mend.yaml")
    files |= {"refl": f"configs/{world}_draft.yaml", "nft": f"configs/{world}_nft.yaml"}
    if world == "shapes":
        files |= {"opsd": "configs/shapes_opsd.yaml", "crd": "configs/shapes_crd.yaml"}
        asked, opsd = rewards("configs/shapes_learned.yaml"), {}
        asked["rewards"].append(ENCODER)
    else:
        files["crd"] = "configs/words.yaml"
        asked, opsd = rewards("configs/words_draft.yaml", "reward_models.OCR"), opsd_on_words()
    own = {"opsd": opsd, "refl": REFL, "nft": {"recipe": GROUPS}, "crd": {"recipe": GROUPS}}
    return Study(
        name=f"mend_{world}",
        methods={name: [file] for name, file in files.items()},
        settings={name: asked | own.get(name, {}) for name in names},
        budget=19_200 if world == "shapes" else 4_800,
        steps=steps_of,
        rates=(2e-3, 4e-3, 8e-3) if world == "shapes" else (2e-3, 4e-3),
        evaluations=1,
        images=512 if world == "shapes" else 256,
        prompts=f"assets/{world}/prompts",
        goal=tuple(REWARDS[world]),
        tuning_seed=101,
    )


def made(study: Study, args: argparse.Namespace) -> dict[str, Any]:
    """Run the requested part, and return the numbers of all finished runs."""
    for name in args.only:
        tuned(study, args, name)
        compared(study, args, name)
    runs = finished(study, args.folder)
    goal = study.goal or (study.metric,)
    measures = MEASURES.get(args.study, PIXELS)
    asked = {"reward": goal} | {name: [name] for name in measures[1:]}
    content = results(study, args.folder, runs)
    return {"tuning": content["tuning"], "histories": histories(runs, asked)}


def table(content: Mapping[str, Any]) -> str:
    """Tabulate every measure after training, and the differences that would be seen."""
    last = {n: [one["points"][-1] for one in runs] for n, runs in content["histories"].items()}
    first = next(iter(content["histories"].values()))[0]["points"][0]
    measures = [name for name in first if name not in ("evaluations", "reward_calls", "seconds")]
    lines = [f"| method | rate | {' | '.join(measures)} | evaluations | reward calls |"]
    lines += ["|---" * (len(measures) + 4) + "|"]
    lines += [f"| before | | {' | '.join(f'{first[m]:.3f}' for m in measures)} | | |"]
    for name, points in last.items():
        columns = {m: [p[m] for p in points] for m in (*measures, "evaluations", "reward_calls")}
        each = {m: ", ".join(f"{v:.3f}" for v in values) for m, values in columns.items()}
        cells = [f"{mean(columns[m]):.3f} ({each[m]})" for m in measures]
        cells += [f"{mean(columns[cost]):,.0f}" for cost in ("evaluations", "reward_calls")]
        tried = content["tuning"][name]
        lines.append(f"| {name} | {max(tried, key=tried.__getitem__)} | {' | '.join(cells)} |")
    every = {m: [[p[m] for p in points] for points in last.values()] for m in measures}
    seen = [f"{smallest_difference(values):.3f}" for values in every.values()]
    return "\n".join([*lines, f"| would be seen | | {' | '.join(seen)} | | |"])


def main(studies: Mapping[str, Study], description: str) -> None:
    """Run the requested part of a study, and print its table."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("study", choices=studies)
    study = studies[parser.parse_known_args()[0].study]
    args = options(description, study, parser).parse_args()
    args.folder = args.folder and args.folder / args.study
    make = (lambda: made(study, args)) if args.folder else None
    print(table(kept(args.to / f"{study.name}.json", make)))  # noqa: T201


if __name__ == "__main__":
    main({world: study(world) for world in REWARDS}, __doc__.splitlines()[0])
