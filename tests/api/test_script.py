"""Scripts run unchanged under a launcher, repeatedly in one process, and beside the commands."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from diffusers import StableDiffusionPipeline

import flowalign
from flowalign.cli.main import main
from flowalign.utils.strict_yaml import read_yaml
from tests.fixtures.doc_pages import ROOT
from tests.fixtures.matrix import golden
from tests.fixtures.scripts import (
    EVALUATED,
    PROMPTS,
    SIZE,
    SMALL,
    adapter,
    new_trainer,
    open_pipe,
    redness,
    tensor_bytes,
)
from tests.fixtures.tiny_unet import build_sd15
from tests.fixtures.zygote import python

pytestmark = pytest.mark.slow

SCRIPT = """
import sys

import flowalign
from tests.fixtures.scripts import PROMPTS, SIZE, SMALL, open_pipe, redness

once = SMALL | SIZE | {"num_steps": 1, "output_dir": sys.argv[1]}
result = flowalign.align(open_pipe("model"), redness, PROMPTS, **once)
result.save(f"{sys.argv[1]}-lora")
"""


def run_script(folder: Path, *words: str) -> None:
    golden(folder / "model")
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [python(), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHON_EXEC": python()},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def run_command(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return int(end.value.code or 0)


LAUNCH = "from accelerate.commands.launch import main; main()"
OPTIONS = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"


def test_a_script_under_a_launcher_trains_like_in_one_process(tmp_path):
    """accelerate starts its processes by torchrun."""
    run_script(tmp_path, "script.py", "one")
    (tmp_path / "model").rename(tmp_path / "before")
    run_script(tmp_path, "-c", LAUNCH, *OPTIONS.split(), "script.py", "two")
    one, two = (
        json.loads((tmp_path / run / "metrics.jsonl").read_text().splitlines()[0])
        for run in ("one", "two")
    )
    assert two["reward_mean"] == pytest.approx(one["reward_mean"], abs=1e-6)
    assert two["optim/grad_norm"] == pytest.approx(one["optim/grad_norm"], rel=1e-3)


def test_the_script_of_a_user_of_ddpo_trainer_trains(tmp_path, monkeypatch):
    """The guide shows it next to the script for TRL; the tiny model replaces the published one."""
    page = (ROOT / "docs/guides/python.md").read_text()
    code = page.rpartition("```python\n")[2].partition("```")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    pipe = open_pipe(build_sd15(tmp_path / "model"))
    monkeypatch.setattr(StableDiffusionPipeline, "from_pretrained", lambda *_, **__: pipe)
    monkeypatch.setattr(StableDiffusionPipeline, "to", lambda self, *_: self)
    monkeypatch.chdir(tmp_path)
    code = code.replace("num_steps=200, num_inference_steps=50", "num_steps=1, **SMALL, **SIZE")
    small = {k: v for k, v in SMALL.items() if k not in ("num_steps", "learning_rate")}
    names = {
        "SMALL": small,
        "SIZE": SIZE,
        "PROMPTS": PROMPTS,
        "my_score": lambda x: x.mean((1, 2, 3)),
    }
    exec(code, names)
    assert adapter(pipe)


def test_each_run_of_a_process_gets_its_own_folder_and_frees_its_memory(tmp_path, monkeypatch):
    folder, names, used = golden(tmp_path / "model"), [], []
    monkeypatch.chdir(tmp_path)
    for _ in range(3):
        once = SMALL | SIZE | {"num_steps": 1}
        names.append(str(flowalign.align(open_pipe(folder), redness, PROMPTS, **once).output_dir))
        used.append(tensor_bytes())
    assert names == ["runs/flow_grpo", "runs/flow_grpo-2", "runs/flow_grpo-3"]
    assert used[1] == used[2]


def test_commands_work_on_a_run_that_a_script_started(tmp_path, monkeypatch, capsys):
    folder = golden(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    pipe = open_pipe(folder)
    pipe.register_to_config(_name_or_path=folder)
    new_trainer(pipe, tmp_path, {"red": redness}, eval_prompts=PROMPTS, **EVALUATED).train()
    entry = read_yaml(Path("run/config.yaml"))["rewards"][0]
    function = "tests.fixtures.scripts.redness"
    assert entry["init_args"] == {"function": function, "name": "red", "images": "pil"}
    weights = ["--weights", "run/checkpoints/step-000002"]
    assert run_command("eval", "run/config.yaml", *weights) == 0
    prompt = ["--prompt", "a fox", "--count", "1", "--num_steps", "2", "--out", "fox.png"]
    assert run_command("sample", "run/config.yaml", *weights, *prompt) == 0
    assert run_command("export", "run", "--to", "peft", "--out", "lora") == 0


def test_a_run_with_objects_of_a_script_says_what_cannot_be_loaded(tmp_path, monkeypatch, capsys):
    pipe = open_pipe(golden(tmp_path / "model"))
    monkeypatch.chdir(tmp_path)
    new_trainer(pipe, tmp_path, {"red": lambda images: [1.0] * len(images)}).train()
    assert "# an object of the script" in Path("run/config.yaml").read_text()
    assert run_command("check", "run/config.yaml") != 0
    assert "was an object of the script that started this run" in capsys.readouterr().err
