"""Compare late siblings with outcomes in DiffusionNFT and online DPO, at equal cost on Shapes.

    python assets/figures/credit_losses.py nft runs/credit_losses    # resumes
    python assets/figures/credit_losses.py dpo runs/credit_losses
    python assets/figures/credit_losses.py dpo                       # the stored table

See `mend.py` for the arguments. All arms of a study make equal numbers of updates and evaluations.

Predicted before training: `siblings` end above `outcome` in both studies. With the exact reward of
Shapes the law gives siblings of steps 5 and 6 a gain of 3.2 and 8.3 at the costs of DiffusionNFT,
and about 1.7 in the sum over all steps. These steps hold 7 % of the summed shares of the steps, so
the difference may be too small to be seen. `siblings_only` end below `outcome`, because nothing
trains the steps that decide most.
"""

from equal_cost import Study
from mend import main

NFT, DPO = "configs/shapes_nft.yaml", "configs/preference/shapes/online_dpo.yaml"
UPDATES = 14
SIBLINGS = {
    "nft": "configs/tasks/shapes_nft_siblings.yaml",
    "dpo": "configs/tasks/shapes_dpo_siblings.yaml",
}
CHAINS = {"eta": 0.7, "sde_window": {"class_path": "flowalign.sampling.AllButLast"}}
ONLY = {"credit": {"init_args": {"compare": "siblings", "depths": [5, 6]}}}


def study(loss: str, base: str, siblings: int, chains: dict, only: int) -> Study:
    """Return the study of a loss, with the prompts per update of two arms."""
    both = [base, SIBLINGS[loss]]
    return Study(
        name=f"credit_{loss}",
        methods={"outcome": [base], "siblings": both, "chains": [base], "siblings_only": both},
        settings={
            "siblings": {"recipe": {"data": {"prompts_per_step": siblings}}},
            "chains": {"recipe": chains},
            "siblings_only": {"recipe": {"data": {"prompts_per_step": only} | ONLY}},
        },
        budget=24_192,
        steps=lambda _files, _place, _budget: UPDATES,
        rates=(2e-3, 4e-3),
        evaluations=1,
        images=256,
        tuning_seed=101,
    )


GRID = {
    "class_path": "flowalign.training.matching.SamplerGrid",
    "init_args": {"num_steps": 8, "stop": 7, "distinct": True},
}
STUDIES = {
    "nft": study(
        "nft",
        NFT,
        siblings=7,
        chains={
            "data": {
                "prompts_per_step": 13,
                "sampling": CHAINS | {"samples_per_prompt": 6, "tail_ratio": None},
            },
            "times_per_sample": 7,
        },
        only=8,
    ),
    "dpo": study(
        "dpo",
        DPO,
        siblings=10,
        chains={
            "data": {
                "prompts_per_step": 10,
                "credit": {"class_path": "flowalign.credit.Outcome"},
                "sampling": CHAINS,
            },
            "times": GRID,
            "times_per_sample": 7,
        },
        only=12,
    ),
}

if __name__ == "__main__":
    main(STUDIES, __doc__.splitlines()[0])
