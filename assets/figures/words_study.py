"""Compare credit methods at equal cost on Words with the OCR reward, and draw the results.

    python assets/figures/words_study.py runs/words_study                     # resumes
    python assets/figures/words_study.py runs/words_study --only nft --seeds 0

See `equal_cost.py` for training. Every method trains at the rate of configs/words_flow_grpo.yaml,
so none is tuned. Writes `words_study.json` and `words_study.png` next to this script or into --to.
Without a folder it draws the stored numbers.

Predicted before training, from the credit benchmark (`words_credit.py`): `comb_late` ends above
`flow_grpo_late`, because its credit agrees best with the truth and a sample costs half as much.
Both end above `flow_grpo`, because the last steps decide the letters. `nft` leads.

Predicted after these four and before the others, which train all stochastic steps: `shared_noise`
and `control_variate` end above `flow_grpo_all`, because prompt and initial noise explain 30 % of
the variance of outcomes, which both remove from the credit. `dense_grpo` ends below it, because a
sample costs 4.5 times as much. `critic` is equal to it. `tempflow_grpo` ends below `flow_grpo`, as
`comb_late` does below `flow_grpo_late`.
"""

from both_costs import main
from equal_cost import Study

OUTCOME = "configs/words_flow_grpo.yaml"
NFT = "configs/words_nft.yaml"
FIXED = "flowalign.sampling.Fixed"
LATE = {"eta": 0.7, "sde_window": {"class_path": FIXED, "init_args": {"start": 4, "stop": 7}}}
SIBLINGS = {"class_path": "flowalign.credit.Branch", "init_args": {"compare": "siblings"}}
ALL = {"eta": 0.7, "sde_window": {"class_path": "flowalign.sampling.AllButLast"}}
"""All steps that can be stochastic, with the noise of the credit benchmark."""
SOME = {"class_path": "flowalign.credit.ControlVariate", "init_args": {"steps": [3, 4, 5, 6]}}
COMB = {"class_path": "flowalign.sampling.Comb", "init_args": {"children": 4}}

STUDY = Study(
    name="words_study",
    methods={
        "flow_grpo": [OUTCOME],
        "flow_grpo_late": [OUTCOME],
        "comb_late": [OUTCOME],
        "nft": [NFT],
        "flow_grpo_all": [OUTCOME],
        "shared_noise": [OUTCOME],
        "dense_grpo": [OUTCOME, "configs/methods/dense_grpo.yaml"],
        "control_variate": [OUTCOME, "configs/methods/control_variate.yaml"],
        "critic": [OUTCOME, "configs/methods/critic.yaml"],
        "tempflow_grpo": ["configs/words_tempflow.yaml"],
    },
    settings={
        "flow_grpo_late": {"recipe": {"sampling": LATE}},
        "comb_late": {"recipe": {"credit": SIBLINGS, "sampling": LATE | {"branching": COMB}}},
        "flow_grpo_all": {"recipe": {"sampling": ALL}},
        "shared_noise": {"recipe": {"sampling": ALL | {"seeds_per_prompt": 1}}},
        "dense_grpo": {"recipe": {"sampling": ALL}},
        "control_variate": {"recipe": {"credit": SOME, "sampling": ALL}},
        "critic": {"recipe": {"sampling": ALL}},
    },
    budget=40_000,
    rates=(2e-3,),
    evaluations=2,
    images=256,
    prompts="assets/words/prompts",
    guards=("cer",),
)

if __name__ == "__main__":
    main(STUDY, __doc__.splitlines()[0])
