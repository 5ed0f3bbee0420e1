"""Compare outcome credit with single-step credit, and step weights, at equal cost.

    python assets/figures/step_credit.py runs/step_credit --seeds 0 1 2 3 4         # resumes
    python assets/figures/step_credit.py runs/step_credit --only comb --seeds 0     # a part
    python assets/figures/step_credit.py runs/late --setting late --seeds 0 1 2 3 4
    python assets/figures/step_credit.py runs/drm --setting drm    # with runs/shapes_drm/model

All methods of a setting train the same steps, with the same kernel, noise and loss. They differ in
the branching of a group's samples and in the credited quantity, or, in the setting `weights`, in
the step weights, or, in the setting `drm`, in the values of noisy states. The setting `drm` needs
the reward of configs/reward/shapes_drm.yaml. See `equal_cost.py` for tuning and training. Writes
`compare.*` of all finished runs into the folder, and `step_credit*.json` and `step_credit*.png` of
the setting next to this script or into --to. Prints the tables. Without a folder it draws the
stored numbers.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from both_costs import report
from equal_cost import Study, options
from step_signal import ALL, ONE, window

SHAPES = ("configs/shapes.yaml",)
BRANCH = {"class_path": "flowalign.credit.Branch", "init_args": {"compare": "siblings"}}
JPEG = {
    "rewards": [
        {"class_path": "reward_models.JpegSize", "weight": 1.0},
        {"class_path": "reward_models.ShapesVerifier"},
    ],
}
"""DDPO's compressibility, with the verifier as a guard of weight 0."""


def recipes(
    steps: int, start: int, stop: int, children: int, samples: int = 192
) -> dict[str, dict[str, Any]]:
    """Return outcome credit with several noises and with one, and a comb of equal size."""
    trained = window(start, stop) | {"num_steps": steps}
    each = children * (stop - start)
    comb = {"class_path": "flowalign.sampling.Comb", "init_args": {"children": children}}
    group = {"samples_per_prompt": each, "seeds_per_prompt": 1, "branching": comb}
    return {
        "outcome": {"sampling": trained},
        "outcome_one_noise": {"sampling": trained | ONE},
        "comb": {
            "credit": BRANCH,
            "prompts_per_step": samples // each,
            "sampling": trained | group,
        },
    }


def weighted() -> dict[str, dict[str, Any]]:
    """Return outcome credit of all steps except the last of six, with several step weights."""
    trained = {"sampling": ALL | {"num_steps": 6}}
    measured = {"measured": "gradient"}
    weights = {"uniform": "uniform", "std": "std", "measured": measured}
    return {name: trained | {"step_weight": weight} for name, weight in weights.items()}


def latent(path: str) -> dict[str, Any]:
    """Return credit of each step by its gain in a reward of noisy states."""
    reward = {
        "class_path": "reward_models.TrainedLatentReward",
        "init_args": {"path": path, "units": "calibrated"},
    }
    return {
        "credit": {"class_path": "flowalign.credit.LatentGain", "init_args": {"reward": reward}}
    }


VALUES = {
    "outcome": {},
    "completions": {"credit": {"class_path": "flowalign.credit.Gain"}},
    "first_blocks": latent("assets/shapes/latent"),
    "drm": latent("runs/shapes_drm/model"),
}
"""Credit of the same steps, by the values of noisy states."""


def study(
    setting: str,
    made: Mapping[str, Mapping[str, Any]],
    *,
    files: Sequence[str] = SHAPES,
    more: Mapping[str, Any] | None = None,
    methods: Sequence[str] | None = None,
    **changes: Any,
) -> Study:
    """Return the comparison of recipes in a setting; `more` changes the run files."""
    methods = methods or tuple(made)
    return Study(
        name="_".join(["step_credit", *([setting] if setting != "early" else [])]),
        methods=dict.fromkeys(methods, files),
        settings={name: {**(more or {}), "recipe": {"init_args": made[name]}} for name in methods},
        **({"budget": 52_800, "rates": (2e-3, 4e-3)} | changes),
    )


FEW = ("outcome", "comb")
STUDIES = {
    "early": study("early", recipes(6, 0, 2, 8)),
    "late": study(
        "late",
        recipes(8, 5, 7, 8),
        more=JPEG,
        metric="compressibility",
        guards=("exact_match",),
        budget=10_560,
        evaluations=2,
    ),
    "steps20": study(
        "steps20",
        recipes(20, 0, 6, 4),
        more={"evaluation": {"num_steps": 20}},
        methods=FEW,
        evaluations=2,
    ),
    "guidance": study(
        "guidance",
        recipes(6, 0, 2, 8),
        more={"policy": {"init_args": {"guidance": 2.5}}},
        methods=FEW,
        evaluations=2,
    ),
    "learned": study(
        "learned",
        recipes(6, 0, 2, 8),
        files=["configs/shapes_learned.yaml"],
        methods=FEW,
        evaluations=2,
    ),
    "weights": study("weights", weighted(), evaluations=2),
    "drm": study(
        "drm",
        VALUES,
        files=["configs/models/toy_shapes.yaml"],
        more={
            "rewards": [
                {
                    "class_path": "reward_models.ShapesVerifier",
                    "weight": dict.fromkeys(("colour", "shape", "count", "position", "clean"), 0.2),
                }
            ]
        },
        rates=(1e-3, 2e-3),
        evaluations=2,
    ),
    "video": study(
        "video",
        recipes(6, 0, 2, 8),
        files=["configs/models/shapes_video.yaml"],
        methods=FEW,
        prompts="assets/shapes_video/prompts",
        rates=(1e-3, 2e-3),
    ),
}


if __name__ == "__main__":
    description = (__doc__ or "").splitlines()[0]
    first = argparse.ArgumentParser(description=description, add_help=False)
    first.add_argument("--setting", choices=STUDIES, default="early")
    asked = STUDIES[first.parse_known_args()[0].setting]
    parser = argparse.ArgumentParser(description=description, parents=[first])
    report(asked, options(description, asked, parser).parse_args())
