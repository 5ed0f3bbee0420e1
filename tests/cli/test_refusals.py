"""Wrong commands are refused in a few lines with the value, exit code 2, before anything loads."""

import pytest

from pipelines.policy import DiffusersPolicy
from tests.fixtures.commands import refusal

pytestmark = pytest.mark.slow

SHAPES = "configs/shapes.yaml"
KERNEL = ("--recipe.sampling.kernel", "flowalign.functional.CPS")
COMMANDS = {
    "train --optimizer.warmup -5": "optimizer.warmup is -5; it must be at least 0",
    "train --recipe.advantages.clip -1": "recipe.advantages.clip is -1.0; it must be above 0",
    "train --recipe.advantages.clip .nan": "recipe.advantages.clip is nan; it must be above 0",
    "train --optimizer.betas [.inf,0.9]": "optimizer.betas.0 is inf",
    "train --optimizer.eps -1e-8": "optimizer.eps is -1e-08; it must be above 0",
    "train --recipe.advantages.std_floor .nan": "advantages.std_floor is nan; it must be at",
    "train --recipe.algorithm.surrogate.clip .inf": "recipe.algorithm.surrogate.clip is inf",
    "train --policy.height 0": "policy.height is 0; it must be at least 1",
    "train --policy.max_sequence_length 0": "policy.max_sequence_length is 0",
    "train --policy.path assets/shapes_video/wan": "belongs to another family than",
    "train --seed 1000000000000000000000000000000": "seed is a number of 31 digits",
    "train --evaluation.every -1": "evaluation.every is -1; it must be at least 0",
    "train --recipe.updates_per_step 9999": "more than the 192 samples of a step",
    "train --recipe.sampling 3": "recipe.sampling is 3; it must be a mapping of settings",
    "train --recipe.sampling.num_steps": "argument --recipe.sampling.num_steps: expected one",
    "train --processes 1000": "--processes is 1000, but this machine has",
    "train --processes 2 --optimizer.warmup -5": "optimizer.warmup is -5; it must be at least 0",
    "eval --weights nowhere": "--weights 'nowhere' is not a folder",
    "sample --prompt x --out x.bmp": "--out x.bmp: images can be written to",
}
"""Commands on the toy model, and parts of their error messages."""


@pytest.fixture(autouse=True)
def _loads_nothing(monkeypatch):
    def refuse(*arguments, **named):
        raise AssertionError("weights were read, or processes started")

    monkeypatch.setattr(DiffusersPolicy, "load", refuse)
    for verb in ("train", "evaluate", "probe"):
        monkeypatch.setattr(f"flowalign.cli.{verb}.relaunch", refuse)


@pytest.mark.parametrize(("command", "words"), COMMANDS.items(), ids=COMMANDS)
def test_a_wrong_command_is_told_with_its_value(capsys, command, words):
    verb, *options = command.split()
    assert words in refusal(capsys, verb, SHAPES, *options)


@pytest.mark.parametrize("eta", ["1.01", "2.5"])
def test_a_kernel_does_not_take_more_noise_than_the_next_state_has(capsys, eta):
    said = refusal(capsys, "train", SHAPES, *KERNEL, "--recipe.sampling.eta", eta)
    assert f"sampling.eta is {eta}, " in said
    assert "CPS takes at most 1" in said
