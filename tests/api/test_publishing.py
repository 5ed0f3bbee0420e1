"""A script publishes what it trained, by the code of `flowalign export --push-to-hub`."""

import json

import pytest
import yaml

from flowalign.api.result import Result
from flowalign.runs.model_card import Subject
from tests.fixtures.matrix import golden
from tests.fixtures.scripts import new_trainer, open_pipe, open_sd3

pytestmark = pytest.mark.slow
ASKED = {"push_to_hub": True, "hub_model_id": "ann/red", "license": "mit"}


class Api:
    """Stand-in of `HfApi`, which keeps what it is told."""

    def __init__(self, fails=False):
        self.repositories, self.folders, self.fails = [], [], fails

    def whoami(self):
        if self.fails:
            raise OSError("no network")

    def create_repo(self, name, private, exist_ok):
        self.repositories.append((name, private))
        return f"https://hub/{name}"

    def upload_folder(self, repo_id, folder_path, commit_message):
        self.folders.append({file.name: file for file in folder_path.iterdir()})


@pytest.fixture
def api(monkeypatch):
    stand_in = Api()
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "a token")
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: stand_in)
    return stand_in


def named_pipe(folder):
    pipe = open_pipe(golden(folder / "model"))
    pipe.register_to_config(_name_or_path=str(folder / "model"))
    return pipe


def test_weights_are_published_with_a_card_after_training(tmp_path, api):
    result = new_trainer(named_pipe(tmp_path), tmp_path, **ASKED, hub_private_repo=True).train()
    assert api.repositories == [("ann/red", True)]
    (files,) = api.folders
    assert {"pytorch_lora_weights.safetensors", "README.md", "flowalign.yaml", "curves.png"} <= set(
        files
    )
    _, front, text = files["README.md"].read_text().split("---\n", 2)
    assert yaml.safe_load(front)["license"] == "mit"
    assert "load_lora_weights" in text
    config = json.loads(files["adapter_config.json"].read_text())
    assert config["base_model_name_or_path"] == "model"  # no local path is published
    address = result.push_to_hub("ann/again", license="apache-2.0")
    assert address == "https://hub/ann/again"
    assert "license: apache-2.0" in (result.output_dir / "hub/README.md").read_text()


WRONG = {
    "licence": ({"push_to_hub": True, "hub_model_id": "ann/red"}, "push_to_hub needs license"),
    "name": ({"push_to_hub": True, "license": "mit"}, "push_to_hub needs hub_model_id"),
    "form": (ASKED | {"hub_model_id": "red"}, "'red' is not a model name such as owner/name"),
    "switch": ({"hub_model_id": "ann/red"}, "hub_model_id is given without push_to_hub"),
    "base": (ASKED, "cannot name its base model"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_published_is_refused_before_training(name, tmp_path, api):
    changes, message = WRONG[name]
    with pytest.raises(ValueError, match=message) as error:
        new_trainer(open_sd3(tmp_path), tmp_path, **changes)
    assert len(str(error.value).splitlines()) <= 5


def test_a_hub_that_does_not_answer_is_named_before_training(tmp_path, api):
    api.fails = True
    with pytest.raises(ValueError, match="Hub could not be reached"):
        new_trainer(named_pipe(tmp_path), tmp_path, **ASKED)


def test_only_the_first_process_writes_and_publishes(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    result = Result(None, {}, {}, tmp_path, Subject("text-to-image", ""))
    result.save(tmp_path / "lora")
    assert result.push_to_hub("ann/red", license="mit") is None
    assert not any(tmp_path.iterdir())
