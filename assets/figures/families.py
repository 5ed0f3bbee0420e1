"""Compare methods of several families at equal cost on the toy model, and draw the results.

    python assets/figures/families.py runs/families                           # resumes
    python assets/figures/families.py runs/families --only nft --seeds 0      # a part

See `equal_cost.py` for tuning and training. Writes `compare.*` of all finished runs into the
folder, and `families.json` and `families.png` next to this script or into --to. Prints the table.
Without a folder it draws the stored numbers.
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
        "nft_step_credit": ["configs/shapes_nft.yaml", "configs/tasks/shapes_step_credit.yaml"],
    },
    budget=52_800,
    rates=(1e-3, 2e-3),
)

if __name__ == "__main__":
    main(STUDY, __doc__.splitlines()[0])
