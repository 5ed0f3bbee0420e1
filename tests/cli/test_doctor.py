"""`flowalign doctor` of a pipeline: its report, and one-line errors."""

import re

import pytest

from flowalign.cli.main import main

SD3 = ["doctor", "--pipeline", "assets/shapes/sd3", "--height", "32", "--width", "32"]


def code_of(words: list[str]) -> object:
    with pytest.raises(SystemExit) as stop:
        main(words)
    return stop.value.code


@pytest.mark.slow
def test_the_doctor_says_what_works_of_a_pipeline(capsys):
    words = ["--argument", "guidance_scale=2.5", "--argument", "max_sequence_length=1"]
    assert code_of([*SD3, *words]) == 0
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "encode prompts together, keeps (13, 96), (13, 96), (96,), (96,)" in told
    assert "velocity 2 evaluations per step, state (4, 8, 8)" in told
    off = re.search(r"replay off by (\S+) in 4 steps", told)
    assert off, told
    assert float(off[1]) < 1e-5, "rows of another batch round differently on some machines"
    assert "decode media (1, 3, 32, 32)" in told
    assert "embed state (4, 8, 8)" in told
    assert "to_q, to_k, to_v, to_out.0: 20 of 74 linear layers" in told
    assert "LoRA loader pipe.load_lora_weights" in told
    assert "sharding blocks 5 JointTransformerBlock" in told
    assert "attention backends native" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--argument", "guidance_scale"], "guidance_scale has no value; give NAME=VALUE"),
        (["--argument", "steps=3"], "call.arguments has steps; StableDiffusion3Pipeline accepts"),
        (["--height", "37"], "divisible by"),
    ],
)
def test_the_doctor_refuses_in_a_line_before_weights_are_read(capsys, monkeypatch, words, message):
    monkeypatch.setattr("pipelines.policy.load_pipeline", lambda *_, **__: pytest.fail("weights"))
    assert code_of([*SD3, *words]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told.strip().splitlines()) <= 2
