"""Settings that are refused: each error names the place, the value and what is allowed."""

import re

import pytest

from tests.fixtures.preference import painted
from tests.fixtures.run_files import complaint, write_changed

SHAPES, DPO = "configs/shapes.yaml", "configs/preference/shapes/dpo.yaml"
INIT, RECIPE = "policy/init_args/", "recipe/init_args/"
SAMPLING, DATA = RECIPE + "sampling/", RECIPE + "data/init_args/"
SURROGATE, WINDOW = RECIPE + "algorithm/init_args/surrogate/", SAMPLING + "sde_window"
STORED = "flowalign.training.matching.StoredDataset"


def window(name: str, **settings: object) -> dict[str, object]:
    return {"class_path": f"flowalign.sampling.{name}", "init_args": settings}


MISSPELT = {
    SHAPES: {
        "nun_steps": "num_steps",
        SAMPLING + "num_step": "recipe.sampling.num_steps",
        RECIPE + "micro_bach": "recipe.micro_batch",
        "optimizer/learning_rat": "optimizer.learning_rate",
        "ema/decai": "decay",
        "evaluation/promts": "prompts",
        INIT + "guidence": "guidance",
        INIT + "lora/rnk": "rank",
        SURROGATE + "init_args/clp": "recipe.algorithm.surrogate.clip",
        SAMPLING + "sde_window/init_args/stp": "stop",
        SAMPLING + "states/device_of": "recipe.sampling.states.device",
        RECIPE + "samplng/num_steps": "recipe.sampling",
    },
    DPO: {
        "num_stpes": "num_steps",
        DATA + "batch_siz": "batch_size",
        DATA + "prompt_dropot": "prompt_dropout",
        RECIPE + "updates_per_stp": "recipe.updates_per_step",
        RECIPE + "loss/init_args/bta": "beta",
        RECIPE + "times/init_args/hgh": "high",
        RECIPE + "sfft": "recipe.sft",
    },
}
"""Keys, and the one that was meant."""
WRONG = {
    SHAPES: {
        "num_steps": ("many", "num_steps", "many"),
        "seed": (1.5, "seed", "1.5"),
        "device": ("gpu", "device", "gpu"),
        SAMPLING + "eta": ("loud", "recipe.sampling.eta", "loud"),
        RECIPE + "advantages.scale": ("gruop", "recipe.advantages.scale", "gruop", "batch"),
        SAMPLING + "states": ({"dtype": "fp32"}, "sampling.states.dtype", "fp32", "bfloat16"),
        INIT + "precision": ("fp8", "policy.precision", "fp8", "bf16"),
        INIT + "height": ("tall", "policy.height", "tall"),
        INIT + "lora": ({"rank": "x"}, "policy.lora.rank", "x"),
        "checkpoints": ({"verify": "maybe"}, "checkpoints.verify", "maybe", "first_and_last"),
        "trackers": (["tensorbord"], "trackers", "tensorbord", "tensorboard"),
        "policy/class_path": ("pipelines.SD4", "SD4", "did you mean SD3"),
        "rewards/0/class_path": (
            "reward_models.verifiers.shapes.ShapeVerifier",
            "did you mean ShapesVerifier",
        ),
        SAMPLING + "kernel/class_path": ("flowalign.functional.FlowSD", "did you mean FlowSDE"),
        SURROGATE + "class_path": ("flowalign.sampling.Fixed", "sampling.Fixed", "Surrogate"),
        "rewards/0/weight": ({"stict": 1.0, "colour": 1.0}, "stict", "exact_match"),
        "rewards": ([], "rewards is empty"),
        RECIPE + "prompts": ("no/such.txt", "no/such.txt", "does not exist"),
        "evaluation/prompts": ({"seen": "no/such.txt"}, "no/such.txt"),
        SAMPLING + "samples_per_prompt": (1, "samples_per_prompt is 1", "advantages.scale"),
        INIT + "path": (None, "policy", "path"),
        WINDOW: (window("Fixed", start=2, stop=9), "[2, 9)"),
    },
    DPO: {
        RECIPE + "space": ("nois", "recipe.space", "noise"),
        RECIPE + "loss/class_path": ("flowalign.losses.DPOO", "did you mean DPO"),
        RECIPE + "reference": ({"class_path": STORED}, STORED, "Reference"),
        RECIPE + "micro_batch": (0, "recipe.micro_batch is 0"),
        RECIPE + "kl": (-1.0, "recipe.kl is -1.0"),
        DATA + "kind": ("triples", "kind", "triples", "pairs"),
        DATA + "batch_size": (0, "recipe.data.batch_size is 0"),
        DATA + "flip": (2.0, "recipe.data.flip is 2.0"),
        DATA + "cache_dtype": ("fp8", "cache_dtype", "fp8", "bfloat16"),
        DATA + "path": ("no/train.jsonl", "'no/train.jsonl' does not exist"),
        "rewards/0/weight": ({"strickt": 1.0}, "strickt", "exact_match"),
        DATA + "user_dropout": (
            0.25,
            "recipe.data.user_dropout is 0.25, but policy SD3 has no user conditioning",
        ),
    },
}
"""Values, and what their messages name."""
OUT_OF_RANGE = {
    "num_steps": 0,
    "threads": 0,
    "rewards/0/weight": {"exact_match": 0.0, "clean": 0.0},
    "optimizer/learning_rate": -1.0,
    "optimizer/max_grad_norm": 0.0,
    "ema/decay": 1.5,
    "ema/every": 0,
    "checkpoints": {"every": 0},
    "text_micro_batch": 0,
    "decode_micro_batch": 0,
    RECIPE + "prompts_per_step": 0,
    RECIPE + "micro_batch": 0,
    RECIPE + "updates_per_step": 0,
    RECIPE + "epochs_per_step": 0,
    SAMPLING + "num_steps": 0,
    SAMPLING + "micro_batch": 0,
    SAMPLING + "eta": 0.0,
    "evaluation/num_prompts": 1,
    "evaluation/num_steps": 0,
    "evaluation/micro_batch": 0,
    "evaluation/grid": 0,
    "evaluation/prompts": {},
}
"""Numbers that cannot be used; the message names the last key."""
CASES = [
    *((SHAPES, key, value, [key.rpartition("/")[2]]) for key, value in OUT_OF_RANGE.items()),
    *((file, key, value, words) for file in WRONG for key, (value, *words) in WRONG[file].items()),
    (SHAPES, "rewards/0/weight", {"exact_match": float("nan")}, ["finite"]),
    (SHAPES, WINDOW, window("Fixed", start=3, stop=3), ["[3, 3)"]),
    (SHAPES, WINDOW, window("Random", size=3, low=0, high=7), ["[6, 9)"]),
    (SHAPES, WINDOW, window("Sliding", size=9), ["[0, 9)"]),
    (SHAPES, WINDOW, window("RandomSubset", share=0.1), ["0.1"]),
    (SHAPES, SAMPLING[:-1], {"num_steps": 1, "sde_window": window("AllButLast")}, ["1 steps"]),
    (SHAPES, RECIPE + "prompts", ..., ["prompts"]),
]


@pytest.fixture
def refused(tmp_path):
    """Changes one setting of a run file, and returns the message."""
    data = painted(tmp_path, 4), painted(tmp_path, 2, "shown")
    pairs = dict(zip((DATA + "path", DATA + "held_out"), data, strict=True))

    def change(file: str, key: str, value: object) -> str:
        own = pairs | {DATA + "cache": None} if file == DPO else {}
        return complaint(write_changed(file, tmp_path, own | {key: value}))

    return change


@pytest.mark.parametrize(("file", "key", "value", "words"), CASES, ids=str)
def test_a_wrong_value_is_named_with_its_place_and_what_is_allowed(
    refused, file, key, value, words
):
    message = refused(file, key, value)
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize(
    ("file", "key", "meant"),
    [(file, key, meant) for file, keys in MISSPELT.items() for key, meant in keys.items()],
)
def test_a_misspelt_key_is_named_with_the_one_that_was_meant(refused, file, key, meant):
    message = refused(file, key, 1)
    wrong = key.removeprefix(RECIPE).removesuffix("/num_steps").rpartition("/")[2]
    assert wrong in message
    assert re.search(rf"did you mean .*{re.escape(meant)}", message), message
