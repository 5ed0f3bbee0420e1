"""Compare methods of several families at equal cost on the embedded model, and draw it.

    python assets/figures/families.py runs/families                           # goes on
    python assets/figures/families.py runs/families --only nft --seeds 0      # a slice of it

How methods are tuned and trained is in `equal_cost.py`. Writes `compare.*` of all runs that are
finished into the folder, `families.json` and `families.png` beside this script, or into --to, and
prints the table. Without a folder it draws what is there.
"""

from both_costs import main
from equal_cost import Study

GROUPS = "configs/tasks/shapes_groups.yaml"
STUDY = Study(
    name="families",
    methods={
        "flow_grpo": ["configs/shapes.yaml"],
        "tempflow_grpo": ["configs/shapes_tempflow.yaml"],
        "online_dpo": ["configs/preference/shapes/online_dpo.yaml"],
        "nft": ["configs/shapes_nft.yaml"],
        "awm": ["configs/shapes.yaml", "configs/methods/awm.yaml", GROUPS],
        "dgpo": ["configs/shapes.yaml", "configs/methods/dgpo.yaml", GROUPS],
        "crd": ["configs/shapes.yaml", "configs/methods/crd.yaml", GROUPS],
        "nft_step_credit": ["configs/shapes_nft.yaml", "configs/methods/nft_step_credit.yaml"],
    },
    budget=52_800,
    rates=(1e-3, 2e-3),
)

if __name__ == "__main__":
    main(STUDY, __doc__.splitlines()[0])
