"""Compare outcomes with credit of single steps where both train the same steps, at equal cost.

    python assets/figures/step_credit.py runs/step_credit --seeds 0 1 2 3 4         # goes on
    python assets/figures/step_credit.py runs/step_credit --only comb --seeds 0     # a slice

All train the first two of six steps, which the probe finds best, with the same kernel, noise, step
weights and loss. They differ in how a group's samples come apart and in what is credited. How
methods are tuned and trained is in `equal_cost.py`. Writes `compare.*` of all runs that are
finished into the folder, `step_credit.json` and `step_credit.png` beside this script, or into --to,
and prints the tables. Without a folder it draws what is there.
"""

from typing import Any

from both_costs import main
from equal_cost import Study
from step_signal import ONE, arranged, window

EARLY: dict[str, Any] = window(0, 2) | {"num_steps": 6}
RECIPES: dict[str, dict[str, Any]] = {
    "outcome": {"sampling": EARLY},
    "outcome_one_noise": {"sampling": EARLY | ONE},
    "comb": arranged("Comb", 8),
}
STUDY = Study(
    name="step_credit",
    methods={name: ["configs/shapes.yaml"] for name in RECIPES},
    settings={name: {"recipe": {"init_args": recipe}} for name, recipe in RECIPES.items()},
    budget=52_800,
    rates=(2e-3, 4e-3),
)


if __name__ == "__main__":
    main(STUDY, __doc__.splitlines()[0])
