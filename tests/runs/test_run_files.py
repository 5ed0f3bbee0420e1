"""The composed run files equal the first complete ones, or hold published values.

`composed_run_files.json` maps each old file to the files that replace it. If that is a list, the
run is named after these files, so `output_dir` differs. The tables below list all other
differences, with reasons.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flowalign.functional.noise_matching import step_at
from flowalign.runs.config.compose import compose
from flowalign.runs.planning.plan import plan
from flowalign.utils.strict_yaml import read_mapping
from tests.fixtures.run_files import CONFIGS, METHODS, loaded

ROOT = Path(__file__).parents[2]
OLD = json.loads((ROOT / "assets/golden/run_files.json").read_text())
SUCCESSORS = json.loads((ROOT / "tests/runs/composed_run_files.json").read_text())
OLD_LINES = 4932
"""The lines below configs/ when every run file was complete."""

SINCE = (
    *("flux1_kontext", "flux1_fill", "qwen_image", "qwen_image_edit", "qwen_image_2512"),
    *("z_image", "flux2_klein", "flux2_dev", "krea2", "qwen_image21", "sana"),
    *(
        "cogvideox",
        "hunyuan_video15",
        "hunyuan_video15_i2v",
        "ltx2",
        "ltx2_i2v",
        "ltx_video_i2v",
        "wan22_5b_i2v",
        "wan22_14b_i2v",
    ),
)
"""The models that came later."""

NEW = [
    ["configs/any_flow.yaml"],
    ["configs/credit/flux1_dev/cogni_edit.yaml"],
    ["configs/credit/flux1_dev/dance_grpo.yaml"],
    ["configs/credit/flux1_dev/grpo_guard.yaml"],
    ["configs/credit/flux1_dev/mixgrpo_flash.yaml"],
    ["configs/models/flux1_dev.yaml", "configs/methods/nft_distilled.yaml"],
    *(
        [
            f"configs/models/{model}.yaml",
            f"configs/methods/{method}.yaml",
            f"configs/tasks/{own}.yaml",
        ]
        for model, own in (("flux1_kontext", "edits"), ("flux1_fill", "fills"))
        for method in ("nft_distilled", "online_dpo")
    ),
    ["configs/models/krea2.yaml", "configs/methods/flow_dpo.yaml"],
    ["configs/credit/sd15/b2_diffurl.yaml"],
    ["configs/models/sd15.yaml", "configs/methods/diffusion_dpo.yaml"],
    ["configs/credit/sd35_medium/flow_dppo.yaml"],
    ["configs/credit/sd35_medium/flow_grpo_unguided.yaml"],
    ["configs/models/sd35_medium.yaml", "configs/methods/pcpo.yaml"],
    ["configs/models/sd35_medium.yaml", "configs/methods/precise.yaml"],
    ["configs/models/toy_shapes.yaml", "configs/methods/measured_weights.yaml"],
    ["configs/models/toy_shapes.yaml", "configs/methods/control_variate_late.yaml"],
    ["configs/models/toy_shapes.yaml", "configs/methods/critic.yaml"],
    ["configs/models/toy_shapes.yaml", "configs/methods/critic_lambda.yaml"],
    ["configs/models/toy_shapes.yaml", "configs/methods/rloo.yaml"],
    ["configs/models/sd35_medium.yaml", "configs/methods/nft.yaml"],
    ["configs/models/sd35_medium.yaml", "configs/methods/awm.yaml"],
    ["configs/models/sd35_medium.yaml", "configs/methods/dgpo.yaml"],
    ["configs/models/sd35_medium.yaml", "configs/methods/crd.yaml"],
    ["configs/models/wan21_1_3b.yaml", "configs/methods/worldcompass_wan.yaml"],
    ["configs/models/flux1_dev.yaml", "configs/tasks/editing.yaml"],
    ["configs/models/flux1_fill.yaml", "configs/tasks/one_reward.yaml"],
    ["configs/models/wan21_1_3b.yaml", "configs/tasks/mj_video.yaml"],
    ["configs/models/sd35_medium.yaml", "configs/tasks/ixc_reward.yaml"],
    ["configs/models/sd35_medium.yaml", "configs/methods/lsc.yaml"],
    ["configs/preference/shapes/modpo.yaml"],
    ["configs/models/ltx2.yaml", "configs/methods/online_dpo_video.yaml"],
    [
        "configs/models/wan22_5b_i2v.yaml",
        "configs/methods/worldcompass_wan.yaml",
        "configs/tasks/first_frames.yaml",
    ],
    ["configs/shapes_crd.yaml"],
    ["configs/shapes_nft.yaml"],
    ["configs/shapes_opsd.yaml"],
    ["configs/shapes_adjoint.yaml"],
    ["configs/models/ltx2.yaml", "configs/methods/omni_nft.yaml"],
    ["configs/models/ltx2.yaml", "configs/methods/omni_nft.yaml", "configs/tasks/sound.yaml"],
    *(["configs/shapes.yaml", f"configs/tasks/shapes_{name}.yaml"] for name in ("places", "star")),
    *(
        [f"configs/models/{model}.yaml", "configs/methods/diffusion_opsd.yaml"]
        for model in ("sd35_medium", "z_image", "flux2_klein")
    ),
    ["configs/shapes_nft.yaml", "configs/tasks/shapes_step_credit.yaml"],
    ["configs/models/sd35_medium.yaml", "configs/methods/nft_step_credit.yaml"],
    ["configs/models/sd35_medium.yaml", "configs/methods/online_dpo_step_credit.yaml"],
    ["configs/models/hunyuan_video.yaml"],
    ["configs/models/sd35_medium.yaml", "configs/methods/cpo_expert.yaml"],
    ["configs/models/sd35_medium.yaml", "configs/methods/cpo.yaml"],
    ["configs/shapes.yaml", "configs/methods/awm.yaml", "configs/tasks/shapes_groups.yaml"],
    ["configs/shapes.yaml", "configs/methods/dgpo.yaml", "configs/tasks/shapes_groups.yaml"],
    ["configs/shapes.yaml", "configs/methods/crd.yaml", "configs/tasks/shapes_groups.yaml"],
    ["configs/models/sd35_medium.yaml", "configs/methods/flow_opd.yaml"],
    ["configs/models/sd35_medium.yaml", "configs/methods/soar.yaml"],
    *([f"configs/teachers/shapes/{name}.yaml"] for name in ("relations", "counts", "mixed")),
    ["configs/teachers/shapes/opd.yaml", "configs/teachers/shapes/opd_released.yaml"],
    *([f"configs/preference/shapes/{name}.yaml"] for name in ("soar", "sft_pictures")),
    *(
        ["configs/preference/sdxl_dpo.yaml", f"configs/tasks/sdxl_{name}.yaml"]
        for name in ("cpo_expert", "cpo")
    ),
    ["configs/shapes_levels.yaml"],
    ["configs/shapes_parrot.yaml"],
    *(
        [f"configs/words{end}.yaml"]
        for end in ("", "_draft", "_dpo", "_leap_align", "_flow_grpo", "_nft", "_tempflow")
    ),
    ["configs/models/sd15.yaml", "configs/methods/parrot.yaml"],
    ["configs/models/flux1_kontext.yaml", "configs/methods/focus_dpo.yaml"],
    ["configs/models/sd35_medium.yaml", "configs/methods/magic_mirror.yaml"],
    ["configs/shapes.yaml", "configs/tasks/shapes_scorer.yaml"],
    ["configs/shapes_nft.yaml", "configs/tasks/rollout_workers.yaml"],
    ["configs/shapes.yaml", "configs/tasks/shapes_ray.yaml"],
    ["configs/models/sd35_medium.yaml", "configs/tasks/sglang.yaml"],
    ["configs/shapes_edit.yaml"],
    ["configs/shapes_edit_tempflow.yaml"],
    ["configs/credit/toy_shapes/cogni_edit.yaml"],
    ["configs/shapes_edit_cogni.yaml"],
    ["configs/shapes_edit_nft.yaml"],
    ["configs/preference/shapes_edit_dpo.yaml"],
    ["configs/shapes_draft.yaml"],
    ["configs/shapes_leap_align.yaml"],
    ["configs/shapes_tdm.yaml"],
    ["configs/shapes_tdm_r1.yaml"],
    ["configs/models/sd35_medium.yaml", "configs/methods/tdm.yaml"],
    ["configs/models/sd35_medium.yaml", "configs/methods/tdm_r1.yaml"],
    ["configs/shapes_online_reward.yaml"],
    ["configs/shapes_flow_nrg.yaml"],
    ["configs/credit/toy_shapes/latent_gain.yaml"],
    ["configs/credit/toy_shapes/euphonium.yaml"],
    ["configs/shapes_draft.yaml", "configs/tasks/shapes_hyper_align.yaml"],
    *(
        [
            "configs/models/sd35_medium.yaml",
            f"configs/methods/{method}.yaml",
            "configs/tasks/hpsv2.yaml",
            "configs/tasks/flowbp_sd35_medium.yaml",
        ]
        for method in ("refl", "draft_lv", "drtune", "leap_align", "flowbp_sparse")
    ),
    ["configs/reward_gradient/sd35_medium.yaml"],
    ["configs/reward_gradient/flux1_dev.yaml"],
    ["configs/reward_gradient/flux1_dev_srpo.yaml"],
    ["configs/models/flux1_dev.yaml", "configs/methods/srpo.yaml"],
    ["configs/models/flux1_dev.yaml", "configs/methods/d2_align.yaml"],
    [
        "configs/models/flux1_dev.yaml",
        "configs/methods/draft_lv.yaml",
        "configs/tasks/hyper_align_flux1.yaml",
    ],
    ["configs/preference/sdxl_ppd.yaml"],
    *(
        [f"configs/credit/sd35_medium/{name}.yaml"]
        for name in ("euphonium", "latent_gain", "step_grpo")
    ),
    ["configs/credit/toy_shapes/step_grpo.yaml"],
    ["configs/models/sd35_medium.yaml", "configs/tasks/flow_nrg_sd35.yaml"],
    *(
        ["configs/models/wan21_1_3b.yaml", f"configs/tasks/{name}_wan21_1_3b.yaml"]
        for name in ("euphonium", "latent_gain", "flow_nrg")
    ),
    *(
        ["configs/models/sd35_medium.yaml", f"configs/methods/{name}.yaml"]
        for name in (
            *("ram", "flow_awr", "epg", "v_grpo", "kvpo", "norm_guard", "align_prop"),
            *("gardo", "ddrl", "otca", "fdfo", "adjoint_matching"),
        )
    ),
    ["configs/models/krea2.yaml", "configs/methods/ipo.yaml"],
    [
        "configs/models/sd35_medium.yaml",
        "configs/methods/refl.yaml",
        "configs/tasks/refl_pretraining.yaml",
    ],
    *(
        [
            "configs/models/sd35_medium.yaml",
            "configs/methods/draft_lv.yaml",
            f"configs/tasks/{name}.yaml",
        ]
        for name in ("hyper_align_sd35", "visual_questions", "soft_counting")
    ),
    *(
        ["configs/models/sd35_medium.yaml", f"configs/tasks/{name}.yaml"]
        for name in ("region_reward", "unified_reward")
    ),
    [
        "configs/models/flux1_dev.yaml",
        "configs/methods/srpo.yaml",
        "configs/tasks/lora_rate.yaml",
    ],
    ["configs/models/flux1_kontext.yaml", "configs/tasks/context_consistency.yaml"],
    ["configs/models/wan22_5b_i2v.yaml", "configs/tasks/anime_reward.yaml"],
    [
        "configs/models/wan21_1_3b.yaml",
        "configs/methods/vader.yaml",
        "configs/tasks/hpsv2.yaml",
    ],
    [
        "configs/models/wan21_1_3b.yaml",
        "configs/methods/worldcompass_wan.yaml",
        "configs/tasks/clip_rollouts.yaml",
    ],
    *([f"configs/preference/wan_flow_{name}.yaml"] for name in ("dpo", "rwr")),
    *(
        ["configs/preference/sd35_dpo.yaml", f"configs/tasks/{name}.yaml"]
        for name in ("modpo", "curriculum", "auto_beta", "slic")
    ),
    *(
        ["configs/models/sd35_medium.yaml", *(f"configs/{one}.yaml" for one in names)]
        for names in (
            ("tasks/dense_reward",),
            ("methods/online_dpo", "tasks/iterative_dpo"),
            ("methods/align_prop", "tasks/aesthetic_target"),
        )
    ),
    ["configs/models/flux1_dev.yaml", "configs/methods/srpo.yaml", "configs/tasks/photos.yaml"],
    ["configs/words_flow_grpo.yaml", "configs/tasks/words_places.yaml"],
    ["configs/models/qwen_image_edit.yaml", "configs/tasks/edit_levels.yaml"],
    *([f"configs/credit/{model}/flow_grpo.yaml"] for model in ("wan22_14b", "wan21_14b_i2v")),
]
"""Runs that came later."""

TWO = {"updates_per_step": 2}
"""Flow-GRPO's number for methods on its code base: at one update per rollout no clip acts."""
FOUR = {"updates_per_step": 4}
"""Value of DanceGRPO and MixGRPO, and of methods that are compared with them without their own
value."""
FLOW_GRPO = TWO | {"advantages.scale": "batch"}
"""With its deviation over the whole batch."""
SLIDING = {"num_steps": 300, "sampling.sde_window.roll_back": True}
"""MixGRPO's number of steps, during which its window slides, on short schedules several times."""
B2 = {"epochs_per_step": 2, "sampling.untrained_steps": "shared_sde", "credit.history": 8}
"""Two epochs of each stage, noise before the split, and scores of eight stages before."""
PUBLISHED = {
    "branch_grpo": FOUR,
    "gcpo": FOUR,
    "dynamic_treerpo": FOUR | SLIDING,
    "mixgrpo": FOUR | SLIDING | {"advantages.std_correction": 1},
    "b2_diffurl": B2 | {"num_steps": 100},
    "flow_grpo_cps": FLOW_GRPO,
    "flow_grpo_fast": FLOW_GRPO,
    "superflow": FLOW_GRPO,
    "dense_grpo": {},
    "dense_grpo_calibrated": {},
    "g2rpo": {},
}
"""What differs on Stable Diffusion 3.5 and FLUX.1, by method; TWO for all others."""
ELSEWHERE = {
    "configs/preference/sd15_ppd.yaml": {
        "conditioning.class_path": "flowalign.conditioning.Users",
        "data.skip_choices": 4,
    },
    "configs/credit/sd35_medium/dense_grpo.yaml": {"prompts_per_step": 48},
    "configs/credit/sd35_medium/dense_grpo_calibrated.yaml": {"prompts_per_step": 48},
    "configs/credit/sd35_medium/mixgrpo.yaml": {"num_steps": 900},
    # on the embedded model, but for the runs of the study of credit
    "configs/credit/toy_shapes/b2_diffurl.yaml": B2,
    "configs/credit/toy_shapes/dynamic_treerpo.yaml": FOUR,
    "configs/credit/toy_shapes/flow_grpo_cps.yaml": FLOW_GRPO,
    "configs/credit/toy_shapes/gcpo.yaml": FOUR,
    # DanceGRPO trains the best and the worst of 24 videos, and adds noise at all steps
    "configs/hunyuan_video.yaml": {
        "advantages.std_correction": 1,
        "advantages.extremes": 4,
        "sampling.samples_per_prompt": 24,
        "sampling.untrained_steps": "sde",
    },
}
"""What differs in single files. DenseGRPO's 144 samples x accumulation 8 are one update of 1152."""
STUDY = [
    "configs/credit/toy_shapes/" + name
    for name in (
        "flow_grpo.yaml",
        "flow_grpo_all_steps.yaml",
        "flow_grpo_fast.yaml",
        "mixgrpo.yaml",
        "dense_grpo.yaml",
        "dense_grpo_calibrated.yaml",
        "stepwise_flow_grpo.yaml",
        "tempflow_grpo.yaml",
        "tp_grpo.yaml",
        "branch_grpo.yaml",
        "control_variate.yaml",
    )
]
"""The runs of docs/results/credit_study.md, which nothing may change."""
DEFAULTS = {
    "updates_per_step": 1,
    "epochs_per_step": 1,
    "advantages.scale": "group",
    "advantages.std_correction": 0,
    "advantages.extremes": None,
    "sampling.untrained_steps": "ode",
    "sampling.sde_window.roll_back": False,
    "credit.threshold": 0.5,
    "credit.history": 0,
}
"""Meaning of a missing key in a file."""

MODELS = ("toy_shapes", "sd35_medium", "flux1_dev")


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def run_files() -> list[str]:
    """Return the files of training runs and their parts, without files of other commands."""
    names = ("rewards", "reward", "clip_pairs", "search", "benchmarks")
    others = tuple(f"configs/{name}/" for name in names)
    files = [file.relative_to(ROOT).as_posix() for file in (ROOT / "configs").rglob("*.yaml")]
    return sorted(file for file in files if not file.startswith(others))


def extended(file: str) -> list[str]:
    named = read_mapping(file).get("extends", [])
    return [named] if isinstance(named, str) else named


def header(file: str) -> list[str]:
    return [line for line in Path(file).read_text().splitlines() if line.startswith("#")]


def letters(lines: list[str]) -> set[str]:
    """Return the letters that mark a value as borrowed, such as (F)."""
    return set(re.findall(r"\(([A-Z])\)", "\n".join(lines)))


def settings(values: Mapping[str, Any], inside: str = "") -> dict[str, Any]:
    """Return the values by dotted key, without the names of components' parts."""
    flat = dict(DEFAULTS) if not inside else {}
    for name, value in values.items():
        key = inside if name == "init_args" else f"{inside}.{name}".removeprefix("recipe.")
        key = key.removeprefix(".")
        flat |= settings(value, key or "recipe") if isinstance(value, Mapping) else {key: value}
    return flat


def changes(old: str) -> dict[str, Any]:
    """Return the differences between a run and its first file."""
    folder, method = Path(old).parent.name, Path(old).stem
    real = PUBLISHED.get(method, TWO) if folder in ("sd35_medium", "flux1_dev") else {}
    return real | ELSEWHERE.get(old, {})


def test_every_old_run_file_has_a_successor():
    assert SUCCESSORS.keys() == OLD.keys()
    assert len(OLD) == 94
    assert all(isinstance(files, list) and files for files in SUCCESSORS.values())


@pytest.mark.parametrize("old", OLD)
def test_composed_values_equal_those_of_the_old_run_file(old):
    now, before = compose(SUCCESSORS[old]).values, dict(OLD[old])
    if len(SUCCESSORS[old]) > 1:
        names = "-".join(Path(file).stem for file in SUCCESSORS[old])
        assert now.pop("output_dir") == f"runs/{names}"
        del before["output_dir"]
    wanted, got = settings(before) | changes(old), settings(now)
    assert got == wanted
    assert all(settings(before).get(key) != value for key, value in changes(old).items())


@pytest.mark.parametrize("old", STUDY)
def test_runs_of_the_study_are_what_was_measured(old):
    assert not changes(old)
    assert settings(compose(SUCCESSORS[old]).values)["updates_per_step"] == 1


def test_tables_of_changes_name_old_files_and_their_methods():
    """A row of a file that is gone would say nothing."""
    assert ELSEWHERE.keys() <= OLD.keys()
    assert {Path(old).stem for old in OLD} >= PUBLISHED.keys()
    assert set(STUDY) <= OLD.keys()


@pytest.mark.parametrize("model", MODELS)
def test_every_method_composes_with_every_model(model):
    for method in METHODS:
        files = [f"configs/models/{model}.yaml", f"configs/methods/{method}.yaml"]
        pair = compose(files)
        assert pair.values["output_dir"] == f"runs/{model}-{method}"
        assert pair.origins["recipe.init_args.credit.class_path"] == files[1], method
        assert pair.origins["policy.class_path"] == files[0], method


def test_a_method_with_rewards_of_its_own_drops_the_thresholds_of_the_model():
    extended = ROOT / "configs/methods/flow_grpo_wan21.yaml"
    for file in sorted({*(ROOT / "configs/methods").glob("*.yaml")} - {extended}):
        values = compose(["configs/models/wan21_1_3b.yaml", str(file)]).values
        weights = [entry.get("weight") for entry in values["rewards"]]
        named = {dim for one in weights if isinstance(one, dict) for dim in one}
        advantages = values["recipe"]["init_args"].get("advantages") or {}
        bounds = advantages.get("thresholds") or {"at": {}}
        assert bounds["at"].keys() <= named, file


def test_models_that_methods_go_behind_are_complete():
    wanted = {"policy", "rewards", "num_steps", "recipe", "evaluation"}
    for file in sorted((ROOT / "configs/models").glob("*.yaml")):
        values = compose([str(file)]).values
        assert wanted <= values.keys()
        assert "prompts" in values["recipe"]["init_args"]


def test_no_run_file_is_left_over():
    given = {file for files in [*SUCCESSORS.values(), *NEW] for file in files}
    given |= {f"configs/models/{model}.yaml" for model in SINCE}
    used = given | {origin for file in given for origin in compose([file]).origins.values()}
    assert [file for file in run_files() if file not in used] == []


def test_no_pair_file_repeats_what_the_pair_says_anyway():
    for file in run_files():
        if file.startswith("configs/credit/"):
            own = [k for k, origin in compose([file]).origins.items() if origin == file]
            assert len(own) > 1, f"{file} sets {own} only: give its two files instead"


def test_run_files_take_less_than_half_of_the_lines_they_took():
    files = {file for files in SUCCESSORS.values() for file in files}
    files |= {origin for file in files for origin in compose([file]).origins.values()}
    texts = [(ROOT / file).read_text() for file in files if file.endswith(".yaml")]
    lines = sum(len(text.splitlines()) for text in texts)
    assert lines < OLD_LINES / 2


def test_letters_beside_values_are_explained_in_a_file_they_come_from():
    for file in run_files():
        lines = Path(file).read_text().splitlines()
        headers = [line for name in (file, *extended(file)) for line in header(name)]
        unknown = letters(lines) - letters(headers)
        assert not unknown, f"{file}: no header says what {sorted(unknown)} is"


def test_files_of_published_models_have_no_label_of_a_run():
    """The label of the first line is the only note that no GPU ran the file."""
    folders = "credit/sd35_medium", "credit/flux1_dev", "credit/sd15", "reward_gradient"
    files = [file for one in folders for file in (ROOT / "configs" / one).glob("*.yaml")]
    files += [ROOT / f"configs/models/{model}.yaml" for model in SINCE]
    assert len(files) > 40
    for file in files:
        assert file.read_text().startswith(("# [checked only] ", "# [step tested] ")), file


def test_every_method_names_its_source():
    for method in METHODS:
        file = ROOT / f"configs/methods/{method}.yaml"
        assert re.search(
            r"# Source: .*(arXiv:\d{4}\.\d{5}|our design)", "\n".join(header(str(file)))
        )


def test_embedded_runs_of_one_update_per_rollout_say_so():
    """No clip acts there, which nobody should take for the published method."""
    for file in run_files():
        if file.startswith("configs/credit/toy_shapes/"):
            updates = settings(compose([file]).values)
            once = updates["updates_per_step"] * updates["epochs_per_step"] == 1
            assert once == ("one update per rollout" in " ".join(header(file))), file


@pytest.mark.parametrize("file", sorted((ROOT / "configs/models").glob("*.yaml")))
def test_model_files_of_one_update_per_rollout_say_so(file):
    updates = settings(compose([str(file)]).values)
    once = updates["updates_per_step"] * updates["epochs_per_step"] == 1
    assert once == ("one update" in " ".join(header(str(file)))), file


@pytest.mark.slow
def test_step_credit_of_nft_costs_what_its_file_says():
    """Per prompt 1 + 5 + 9 + 3 x 12 distinct states; four levels of each of the three steps."""
    run, _ = loaded(CONFIGS / "shapes_nft.yaml", CONFIGS / "tasks/shapes_step_credit.yaml")
    rows, sigmas = plan(run), run.policy.plan().sigmas
    assert rows["evaluations of samples per step"] == f"{16 * 51} sampling"
    assert rows["reward calls per step"] == "192"
    assert rows["matching evaluations per step"].startswith("at most 2304 training")
    assert rows["noise levels with credit"].endswith("a sample has those of 1 of these steps")
    assert step_at(sigmas(29)[:12], sigmas(8)).bincount().tolist() == [4, 4, 4]
    assert 16 * 51 + 16 * 12 * 4 * 2 == 2352
