"""Forty toy steps of every method of `configs/methods` do not lower the reward: `make test-long`.

One step cannot show a method that destroys the policy. A file with values tuned for Shapes is used
if there is one; other methods are layered on the toy model at its learning rate and batch. It takes
hours on two cores, so no other target collects this file. `LEARN_OUT` names the file of results.

    python -m tests.matrix.learn_methods

then writes them into assets/learn_methods.csv, which keeps the earlier rows of other methods. Every
row has the mean reward of the first and the last eight steps, or the reason why there is none. All
steps have the same prompts: others move the reward by a tenth without any training.
"""

import csv
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from flowalign.runs.combinations import combination
from flowalign.runs.config.loading import compose
from flowalign.runs.run_files import recipes
from flowalign.utils.tracking import read_metrics
from tests.fixtures.commands import exit_code

STEPS, ENDS = 40, 8
FOUND = Path(os.environ.get("LEARN_OUT", "build/learn_methods.jsonl"))
TABLE = Path("assets/learn_methods.csv")
COLUMNS = ("method", "before", "after", "steps", "seed", "reason")
FALL = 0.05
"""Fall of the mean reward that noise explains: each end is the mean of 384 samples or more."""
KNOWN = {one.name: one for one in recipes()}
METHODS = sorted(name.partition("/")[2] for name in KNOWN if name.startswith("methods/"))
TUNED = {
    **{"adjoint_matching": "shapes_adjoint", "crd": "shapes_crd", "draft_lv": "shapes_draft"},
    **{"diffusion_opsd": "shapes_opsd", "leap_align": "shapes_leap_align", "mend": "shapes_mend"},
    **{"nft": "shapes_nft", "parrot": "shapes_parrot"},
    "online_dpo": "preference/shapes/online_dpo",
}
"""Complete run files of methods, with values that were chosen for Shapes."""
GRADIENTS = ("align_prop", "d2_align", "drtune", "flowbp_sparse", "refl", "srpo")
"""Methods that need a differentiable reward: layered on configs/shapes_draft.yaml."""
STILL = {"b2_diffurl": {"recipe.sampling.sde_window.every": STEPS, "optimizer.learning_rate": 1e-3}}
"""Settings that keep the noise of the samples, and a rate below one that destroys the policy."""
NO_REWARD = {
    **dict.fromkeys(
        ("cpo", "cpo_expert", "diffusion_dpo", "flow_dpo", "focus_dpo", "ipo", "soar"),
        "it trains on stored data",
    ),
    **dict.fromkeys(("tdm", "tdm_r1"), "it distils: its samples are not scored in each step"),
}
NO_RUN = "it is no run on Shapes: it needs videos, sources, other data or networks"
_PAIR = 2


@pytest.mark.parametrize("method", METHODS)
def test_forty_toy_steps_do_not_lower_the_reward(method, tmp_path):
    if method in NO_REWARD:
        pytest.skip(NO_REWARD[method])
    files, settings = choose_run(method) or pytest.skip(NO_RUN)
    settings += keep_samples(method, compose(files).values, settings, tmp_path)
    settings += ["--evaluation=null", f"--num_steps={STEPS}", f"--output_dir={tmp_path / 'run'}"]
    assert exit_code("train", *files, *settings) == 0
    rows = [row for row in read_metrics(tmp_path / "run") if "reward_mean" in row]
    rewards = [row["reward_mean"] for row in rows]
    assert len(rewards) == STEPS
    before, after = fmean(rewards[:ENDS]), fmean(rewards[-ENDS:])
    seed = compose(files).values.get("seed", 0)
    told = {"method": method, "before": round(before, 3), "after": round(after, 3)}
    FOUND.parent.mkdir(exist_ok=True)
    with FOUND.open("a") as file:
        file.write(json.dumps(told | {"steps": STEPS, "seed": seed}) + "\n")
    assert after > before - FALL, told


def choose_run(method: str) -> tuple[list[str], list[str]] | None:
    """Return the run files of a method on Shapes, and settings for its size; None if none fits."""
    if method in TUNED:
        return [str(KNOWN[TUNED[method]].files[0])], []
    if method in GRADIENTS:
        files = [str(KNOWN[name].files[0]) for name in ("shapes_draft", f"methods/{method}")]
        return files, shrink(compose(files).values)
    found = combination(KNOWN["models/toy_shapes"], method, KNOWN)
    if found is None:
        return None
    files = [str(file) for file in found.files]
    return files, [] if len(files) == 1 else shrink(compose(files).values)


def keep_samples(
    method: str, values: Mapping[str, Any], settings: Sequence[str], folder: Path
) -> list[str]:
    """Return settings that give all steps the same prompts, and rewards the same noise."""
    inside, args = find_source(values)
    changed = [one.rpartition("=")[2] for one in settings if ".prompts_per_step=" in one]
    count = int(changed[0]) if changed else args["prompts_per_step"]
    lines = Path("assets/shapes/prompts/train.txt").read_text().splitlines()
    (folder / "prompts.txt").write_text("\n".join(lines[:count]))
    still = [f"--{key}={value}" for key, value in STILL.get(method, {}).items()]
    return [f"--{inside}.prompts={folder / 'prompts.txt'}", *still]


def find_source(values: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the key of the settings with the prompts, and these settings."""
    recipe = values["recipe"]["init_args"]
    data = (recipe.get("data") or {}).get("init_args", {})
    return ("recipe.data", data) if "prompts" in data else ("recipe", recipe)


def shrink(values: Mapping[str, Any]) -> list[str]:
    """Return settings that give a layered method the prompts, batch and rate of the toy model."""
    recipe, (inside, args) = values["recipe"]["init_args"], find_source(values)
    sampling = args.get("sampling") or {}
    settings = {f"{inside}.prompts": "assets/shapes/prompts/train.txt"}
    prompts = 8 if sampling.get("samples_per_prompt", 1) > _PAIR else 48
    settings |= {f"{inside}.prompts_per_step": prompts, "ema.decay": 0.9}
    settings |= {"optimizer.learning_rate": 2e-3, "recipe.micro_batch": 96}
    largest = {"samples_per_prompt": 12, "micro_batch": 96, "num_steps": 8}
    for name in largest.keys() & sampling.keys():
        size = 96 if name == "micro_batch" else min(sampling[name], largest[name])
        settings[f"{inside}.sampling.{name}"] = size
    times = recipe.get("times") or {}
    times = times.get("init_args", times)
    if "stop" not in times and times.get("num_steps", 0) == sampling.get("num_steps"):
        settings["recipe.times.num_steps"] = settings[f"{inside}.sampling.num_steps"]
        if recipe.get("times_per_sample", 1) > largest["num_steps"]:
            settings["recipe.times_per_sample"] = largest["num_steps"]
    return [f"--{key}={value}" for key, value in settings.items()]


def read_table() -> dict[str, dict[str, str]]:
    """Return the rows of the table by method."""
    with TABLE.open(newline="") as file:
        return {row["method"]: row for row in csv.DictReader(file)}


def write_table() -> None:
    """Write the results into the table, with a reason for each method without one."""
    known = read_table() if TABLE.exists() else {}
    if FOUND.exists():
        results = map(json.loads, FOUND.read_text().splitlines())
        known |= {one["method"]: one for one in results}
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        table.writeheader()
        for method in METHODS:
            reason = NO_REWARD.get(method) or ("not run yet" if choose_run(method) else NO_RUN)
            table.writerow(known.get(method) or {"method": method, "reason": reason})


if __name__ == "__main__":
    write_table()
