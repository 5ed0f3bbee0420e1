"""`flowalign doctor` of a pipeline: its report, and one-line errors."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from flowalign.utils import machine
from tests.fixtures.commands import exit_code

SD3 = ["doctor", "--pipeline", "assets/shapes/sd3", "--height", "32", "--width", "32"]


@pytest.mark.slow
def test_the_doctor_says_what_works_of_a_pipeline(capsys):
    words = ["--argument", "guidance_scale=2.5", "--argument", "max_sequence_length=1"]
    assert exit_code(*SD3, *words) == 0
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
    assert exit_code(*SD3, *words) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told.strip().splitlines()) <= 2


OFFLINE = """
import socket, sys, time
def refuse(*_, **__): raise AssertionError("the network was used")
socket.create_connection = socket.getaddrinfo = socket.socket.connect = refuse
from flowalign.cli.main import main
for words in (["doctor"], ["recipes", "models"]):
    try:
        main(words)
    except SystemExit as ended:
        assert ended.code == 0
assert "torch" not in sys.modules
print("CPU seconds", time.process_time())
"""


def test_doctor_and_recipes_answer_at_once_without_network_and_torch(tmp_path):
    """A machine without a GPU needs no torch, whose import alone takes seconds."""
    if machine.has_accelerator():
        pytest.skip("torch is asked about the GPU of this machine")
    command = [sys.executable, "-c", OFFLINE]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "models that this machine can train" in told
    assert "models/wan21_1_3b" in told
    assert torch.__version__.split("+")[0] in told
    assert float(told.rpartition("CPU seconds")[2]) < 4  # of two commands


def test_gpus_of_amd_and_apple_are_named(monkeypatch):
    monkeypatch.setattr(machine, "has_accelerator", lambda: True)
    card = SimpleNamespace(name="MI300X", total_memory=192 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    found = machine.machine()
    assert found["gpu"] == "MI300X, 192 GiB (ROCm 6.4)"
    assert "not supported: runs use the CPU" in found["mps"]
    assert machine.gpu_bytes() == 192 * 2**30


def test_a_device_that_torch_cannot_use_is_told(monkeypatch):
    monkeypatch.setattr(machine, "has_accelerator", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert machine.machine()["gpu"] == f"a device that torch {torch.__version__} ignores"
