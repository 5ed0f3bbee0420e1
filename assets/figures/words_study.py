"""Compare credit methods at equal cost on Words with the OCR reward, and draw the results.

    python assets/figures/words_study.py runs/words_study                     # resumes
    python assets/figures/words_study.py runs/words_study --only nft --seeds 0

See `equal_cost.py` for training. Every method trains at the rate of configs/words_flow_grpo.yaml,
so none is tuned. Writes `words_study.json` and `words_study.png` next to this script or into --to.
Without a folder it draws the stored numbers.

Predicted before training, from the credit benchmark (`words_credit.py`): `comb_late` ends above
`flow_grpo_late`, because its credit agrees best with the truth and a sample costs half as much.
Both end above `flow_grpo`, because the last steps decide the letters. `nft` leads.
"""

from both_costs import main
from equal_cost import Study

OUTCOME = "configs/words_flow_grpo.yaml"
NFT = "configs/words_nft.yaml"
FIXED = "flowalign.sampling.Fixed"
LATE = {"eta": 0.7, "sde_window": {"class_path": FIXED, "init_args": {"start": 4, "stop": 7}}}
SIBLINGS = {"class_path": "flowalign.credit.Branch", "init_args": {"compare": "siblings"}}
COMB = {"class_path": "flowalign.sampling.Comb", "init_args": {"children": 4}}

STUDY = Study(
    name="words_study",
    methods={
        "flow_grpo": [OUTCOME],
        "flow_grpo_late": [OUTCOME],
        "comb_late": [OUTCOME],
        "nft": [NFT],
    },
    settings={
        "flow_grpo_late": {"recipe": {"sampling": LATE}},
        "comb_late": {"recipe": {"credit": SIBLINGS, "sampling": LATE | {"branching": COMB}}},
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
