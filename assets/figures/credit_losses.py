"""Compare late siblings with outcomes in DiffusionNFT and online DPO, at equal cost on Shapes.

    python assets/figures/credit_losses.py nft runs/credit_losses    # resumes
    python assets/figures/credit_losses.py dpo runs/credit_losses
    python assets/figures/credit_losses.py dpo                       # the stored table

See `mend.py` for the arguments. Both arms of a study make 14 updates. Their evaluations differ by
at most 5 %.

Predicted before training: `siblings` end above `outcome` in both studies. With the exact reward of
Shapes the law gives siblings of steps 5 and 6 a gain of 3.2 and 8.3 at the costs of DiffusionNFT,
and about 1.7 in the sum over all steps. These steps hold 6 % of the summed shares of the steps, so
the difference may be too small to be seen.
"""

from equal_cost import Study
from mend import main

UPDATES = 14


def study(loss: str, base: str, prompts: int) -> Study:
    """Return the study of a loss, with the prompts per update that give siblings equal cost."""
    return Study(
        name=f"credit_{loss}",
        methods={
            "outcome": [base],
            "siblings": [base, f"configs/tasks/shapes_{loss}_siblings.yaml"],
        },
        settings={"siblings": {"recipe": {"data": {"prompts_per_step": prompts}}}},
        budget=24_192,
        steps=lambda _files, _place, _budget: UPDATES,
        rates=(2e-3, 4e-3),
        evaluations=1,
        images=256,
        tuning_seed=101,
    )


STUDIES = {
    "nft": study("nft", "configs/shapes_nft.yaml", 7),
    "dpo": study("dpo", "configs/preference/shapes/online_dpo.yaml", 10),
}

if __name__ == "__main__":
    main(STUDIES, __doc__.splitlines()[0])
