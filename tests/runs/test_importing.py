"""Configurations of other toolkits become run files with the same numbers.

The ten configurations of the folder `imported` were written for this test.
"""

from pathlib import Path

import pytest
import yaml
from PIL import Image

from flowalign.cli.commands import import_config as command
from flowalign.cli.main import parse
from flowalign.runs.config import load
from flowalign.runs.importing.import_job import ImportOptions, import_config
from flowalign.runs.importing.python_config import PythonConfig
from flowalign.utils.errors import ConfigError

FOLDER = Path(__file__).parent / "imported"
NOTHING = ImportOptions(None, None, None, None, None)
EXPECTED = {  # batch per update, training steps, rate, clip, KL weight or beta, denoising steps
    ("grpo.py", "text_sd3"): (16 * 6 * 2, 900, 2e-4, 2e-4, 0.03, 10),
    ("grpo.py", "fast_sd3"): (8 * 8 * 2, 400, 3e-4, 3e-5, 0.0, 10),
    ("grpo.py", "pick_flux"): (8 * 3 * 8, 300, 3e-4, 1e-4, 0.002, 6),
    ("nft.py", "sd3_pick"): (32 * 24, 500, 3e-4, None, 2e-4, 10),
    ("nft.py", "sd3_signs"): (32 * 24 // 2, 500, 3e-4, None, 2e-4, 10),
    ("factory_grpo.yaml", None): (40 * 16 // 2, 250, 1.5e-4, 2e-4, 0.01, 12),
    ("factory_guard.yaml", None): (4 * 4 * 6, None, 1e-4, 3e-6, 0.0, 10),
    ("factory_nft.yaml", None): (48 * 16, 120, 1e-4, None, 1e-4, 14),
    ("dpo_sdxl.sh", None): (4 * 2 * 16, 2000, 1e-5, None, 5000.0, None),
    ("dpo_sd15.sh", None): (4 * 4 * 8, 1500, 1e-8 * 128, None, 2000.0, None),
}


def convert(file, config=None, **options):
    draft, text = import_config(FOLDER / file, NOTHING._replace(function=config, **options))
    return draft, yaml.safe_load(text)


def numbers(run):
    """The numbers of a resolved run file that must equal the source."""
    recipe = run["recipe"]["init_args"]
    data = recipe.get("data", {}).get("init_args", recipe)
    loss = recipe.get("algorithm", recipe.get("loss"))["init_args"]
    sampling = data.get("sampling")
    batch = data.get("batch_size") or (
        data["prompts_per_step"] * sampling["samples_per_prompt"] / recipe["updates_per_step"]
    )
    clip = loss["surrogate"]["init_args"]["clip"] if "surrogate" in loss else None
    kl = recipe.get("kl", loss.get("kl_coef", loss.get("beta")))
    steps = sampling["num_steps"] if sampling else None
    return batch, run["num_steps"], run["optimizer"]["learning_rate"], clip, kl, steps


@pytest.mark.parametrize(("source", "expected"), EXPECTED.items(), ids=lambda x: str(x)[:40])
def test_the_numbers_equal_the_source(source, expected):
    draft, run = convert(*source)
    found = numbers(run)
    if expected[1] is None:
        assert any("until it is stopped" in line for line in draft.differences)
        expected = (*expected[:1], found[1], *expected[2:])
    assert found == pytest.approx(expected)
    facts = draft.facts
    assert (facts.effective_batch, facts.learning_rate) == pytest.approx((found[0], found[2]))


def test_other_settings_follow(tmp_path):
    _, run = convert("grpo.py", "fast_sd3")
    sampling = run["recipe"]["init_args"]["sampling"]
    assert sampling["sde_window"] == {
        "class_path": "flowalign.sampling.Random",
        "init_args": {"size": 3, "low": 0, "high": 3},
    }
    assert (sampling["eta"], run["policy"]["init_args"]["guidance"]) == (0.8, 1.0)
    assert sampling["kernel"]["class_path"].endswith("CPS")
    _, run = convert("grpo.py", "pick_flux")
    recipe = run["recipe"]["init_args"]
    assert recipe["sampling"]["sde_window"]["init_args"] == {"start": 0, "stop": 3}
    assert (recipe["sampling"]["seeds_per_prompt"], recipe["updates_per_step"]) == (1, 2)
    assert (recipe["advantages"]["scale"], run["policy"]["init_args"]["precision"]) == (
        "group",
        "bf16",
    )
    _, run = convert("nft.py", "sd3_signs")
    recipe = run["recipe"]["init_args"]
    assert recipe["old"]["decay"] == {"flat": 75, "slope": 0.0075, "highest": 0.999}
    assert (recipe["loss"]["init_args"]["beta"], recipe["times_per_sample"]) == (0.1, 9)
    _, run = convert("factory_grpo.yaml")
    policy = run["policy"]["init_args"]
    assert (policy["height"], policy["width"], policy["lora"]["rank"]) == (512, 768, 48)
    assert run["ema"] == {"decay": 0.95, "every": 4}
    assert (run["optimizer"]["betas"], run["seed"]) == ([0.9, 0.99], 7)
    _, run = convert("dpo_sdxl.sh")
    assert run["policy"]["init_args"]["lora"] == {"rank": 8, "alpha": 8}
    assert run["policy"]["init_args"]["height"] == 1024
    _, run = convert("dpo_sd15.sh")
    assert run["policy"]["init_args"]["lora"] is None
    data = run["recipe"]["init_args"]["data"]["init_args"]
    assert (data["flip"], data["prompt_dropout"], run["optimizer"]["warmup"]) == (0.0, 0.2, 100)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (("grpo.py", "fast_sd3"), "reward my_own_judge (weight 0.3)"),
        (("grpo.py", "fast_sd3"), "train.sft: 0.1"),
        (("factory_grpo.yaml", None), "train.reference_free: True"),
        (("dpo_sdxl.sh", None), "random_crop: True"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_what_is_not_supported_is_listed(source, line):
    draft, _ = convert(*source)
    assert any(one.startswith(line) for one in draft.unsupported), draft.unsupported


def test_other_gpus_keep_the_batch():
    few, fewer = convert("grpo.py", "text_sd3", gpus=2), convert("grpo.py", "text_sd3")
    assert numbers(few[1]) == numbers(fewer[1])
    assert "16 GPUs become 2" in few[0].differences[-1]
    with pytest.raises(ValueError, match="exceeds the 32 prompts"):
        convert("grpo.py", "text_sd3", gpus=33)


def test_python_is_parsed_and_never_run(tmp_path):
    source = "import os\ndef config():\n    config = base.get_config()\n    os.remove('x')\n"
    with pytest.raises(ValueError, match=r"line 4: .os\.remove"):
        PythonConfig(source, {}).evaluate("config")
    endless = "def config():\n    while True:\n        x = 1\n"
    with pytest.raises(ValueError, match="more than 10000 statements"):
        PythonConfig(endless, {}).evaluate("config")
    deep = "def config():\n    return [x for x in 5]\n"
    with pytest.raises(ValueError, match="is not understood"):
        PythonConfig(deep, {}).evaluate("config")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["grpo.py"], "choose a function of .* with --function: text_sd3, fast_sd3, pick_flux"),
        (["grpo.py", "--function", "none"], "--function is 'none'; the file has text_sd3"),
        (["nowhere.yaml"], "is no file"),
    ],
)
def test_unclear_sources_are_refused(tmp_path, words, message):
    file, *rest = words
    args = parse(["import", str(FOLDER / file), *rest, "--out", str(tmp_path / "run.yaml")])
    with pytest.raises(ConfigError, match=message):
        command.run(args)
    assert not (tmp_path / "run.yaml").exists()


@pytest.mark.slow
@pytest.mark.parametrize("source", EXPECTED, ids=str)
def test_the_run_file_passes_the_check(source, tmp_path, monkeypatch, capfd):
    file, config = source
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    Image.new("RGB", (8, 8), "red").save(tmp_path / "b.png")
    row = '{"prompt": "a", "chosen": "%s", "rejected": "%s"}\n'
    (tmp_path / "pairs.jsonl").write_text(row % (tmp_path / "a.png", tmp_path / "b.png"))
    monkeypatch.chdir(tmp_path)
    words = ["import", str(FOLDER / file), "--out", "run.yaml", "--gpus", "2"]
    assert command.run(parse(words + (["--function", config] if config else []))) == 0
    shown = capfd.readouterr().out
    assert "--processes 2" in shown
    assert load(["run.yaml"], [])[0].num_steps >= 100
    with pytest.raises(ConfigError, match="exists and is not overwritten"):
        command.run(parse(words))
