"""Commands that only validate settings import no model library: it takes seven seconds."""

import subprocess
import sys

import pytest

from flowalign.runs.config import load
from pipelines.parts.recorded_plans import identify, read_records

HEAVY = (
    *("accelerate", "bitsandbytes", "diffusers", "open_clip", "peft", "ray", "scipy", "sympy"),
    *("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("torch.distributed.tensor", "torchao", "torchvision", "transformers", "triton"),
)
CODE = f"""
import sys
from flowalign.cli.main import main
for words in {{commands}}:
    try:
        main(words.split())
    except SystemExit as end:
        assert not end.code, words
    print(words, sorted(set({HEAVY}) & set(sys.modules)))
"""


def imports(*commands: str) -> list[str]:
    """Run commands in one new process, and return what each has imported of the heavy modules."""
    code = CODE.format(commands=commands)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [line for line in run.stdout.splitlines() if line.startswith(commands)]


@pytest.mark.slow
def test_checking_a_run_file_imports_no_model_library(tmp_path):
    if identify(load(["configs/shapes.yaml"])[0].policy) not in read_records():
        pytest.skip("recorded with other code or libraries: run assets/bench/plans.py")
    model = f"configs/models/sd35_medium.yaml --output_dir {tmp_path}"
    commands = ("check configs/shapes.yaml", f"check {model}", f"check {model} --print")
    assert imports(*commands) == [f"{command} []" for command in commands]
