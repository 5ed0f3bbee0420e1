"""Messages if the hub has no file, and that the hub is not contacted without need."""

import os
import subprocess
import sys

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from PIL import Image

from flowalign.utils import hub
from tests.fixtures.commands import refusal
from tests.fixtures.zygote import ROOT

MODEL = "stabilityai/stable-diffusion-3.5-medium"


def complaint(monkeypatch, error: Exception) -> str:
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    monkeypatch.setattr(hub, "contact", lambda: True)
    with pytest.raises(ValueError, match=MODEL) as raised:
        hub.file_of(MODEL, "config.json", "vae")
    assert len(str(raised.value).splitlines()) <= 5
    return str(raised.value)


@pytest.fixture(autouse=True)
def _not_contacted():
    """Forget what earlier tests of this process found out about the network."""
    hub.contact.cache_clear()


@pytest.mark.parametrize("kind", [LocalEntryNotFoundError, OfflineModeIsEnabled])
def test_a_hub_that_is_out_of_reach_is_told_with_what_to_do(monkeypatch, kind):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    told = complaint(monkeypatch, kind("no way"))
    assert "could not be reached.\n" in told
    assert f"hf download {MODEL}\nor set the path" in told
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "could not be reached: HF_HUB_OFFLINE is set.\n" in complaint(monkeypatch, kind("no"))


@pytest.mark.parametrize("kind", [RepositoryNotFoundError, GatedRepoError])
def test_a_model_that_is_not_given_is_no_missing_network(monkeypatch, kind):
    told = complaint(monkeypatch, kind.__new__(kind))
    assert "Check the name; a gated model needs its licence accepted" in told
    assert "reached" not in told


def test_a_model_without_the_file_is_told_with_the_file(monkeypatch):
    told = complaint(monkeypatch, RemoteEntryNotFoundError.__new__(RemoteEntryNotFoundError))
    assert told.endswith("on the Hugging Face Hub it has no vae/config.json")


def test_any_other_trouble_is_told_in_its_own_words(monkeypatch):
    told = complaint(monkeypatch, OSError("disk\nis full"))
    assert told.endswith(
        "vae/config.json could not be downloaded from the Hugging Face Hub: disk is full"
    )


def test_a_silent_hub_is_contacted_once_and_named(monkeypatch):
    """Then the libraries use downloaded files only, without attempts of their own."""
    attempts = []

    class Session:
        def head(self, address, timeout):
            attempts.append(timeout)
            raise OSError("no route")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"could not be reached\.\n"):
            hub.file_of("owner/model", "config.json")
    assert attempts == [3.0]
    assert constants.HF_HUB_OFFLINE


SCORE = ["-m", "flowalign", "score", ".", "--rewards", "reward_models.PickScore", "--out", "out"]
CHECK = ["-m", "flowalign", "check", "configs/shapes.yaml", "--policy.path", "no/where"]
CALL = ["-c", "from flowalign.utils.hub import file_of; file_of('no/where', 'x')"]


@pytest.mark.parametrize(
    "command",
    [
        CALL,
        pytest.param(SCORE, marks=pytest.mark.slow),
        pytest.param(CHECK, marks=pytest.mark.slow),
    ],
)
def test_a_new_process_explains_a_failed_download(tmp_path, command):
    """Libraries that this process has imported also import modules of huggingface_hub."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a square")
    settings = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": "home", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, **settings, "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
    )
    assert "the Hugging Face Hub could not be reached.\n" in ended.stderr
    assert "AttributeError" not in ended.stderr


@pytest.mark.slow
def test_doctor_without_weights_and_network_ends_with_a_remedy(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert f"hf download {MODEL}" in refusal(capsys, "doctor", "--pipeline", MODEL)


@pytest.mark.slow
def test_check_of_a_hub_model_says_that_it_is_offline(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    told = refusal(capsys, "check", "configs/sd35_medium.yaml", "--policy.path", "owner/model")
    assert "owner/model is not a local folder" in told
    assert "HF_HUB_OFFLINE is set" in told


def test_a_name_that_no_model_can_have_is_not_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: pytest.fail("asked"))
    told = refusal(capsys, "check", "configs/shapes.yaml", "--policy.path", "/no/such/folder")
    assert "'/no/such/folder' is neither a folder nor the id of a model" in told
