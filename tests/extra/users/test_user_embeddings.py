"""Embeddings of users by their choices: `flowalign users`, for personalised policies."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.testing import assert_close

from flowalign.cli.main import main
from flowalign.data.preference.dataset import PreferenceDataset
from flowalign.functional.rating import Features
from flowalign.reward_training.embeddings import UserEmbeddings, choice_tokens
from flowalign.types import Backbone

COLOURS = {
    "red": (250, 20, 10),
    "blue": (30, 40, 240),
    "grey": (90, 95, 100),
    "gold": (230, 190, 5),
}


class MeanColour(Backbone):
    """The mean colour of an image, as three features."""

    reads_prompts, num_frames, fingerprint = False, 1, "mean colour"

    def load(self):
        self.network = torch.nn.Linear(1, 1)

    def embed(self, batch):
        return Features(batch.media.mean((1, 3, 4)), torch.zeros(len(batch), 0))


@pytest.fixture
def choices(tmp_path):
    """Ann prefers red, Bob has made one choice only, and nobody says who made the last."""
    for name, colour in COLOURS.items():
        Image.new("RGB", (4, 4), colour).save(tmp_path / f"{name}.png")
    rows = [("red", "blue", "ann"), ("red", "grey", "ann"), ("gold", "grey", "bob")]
    rows += [("gold", "red", "ann"), ("blue", "gold", None)]
    file = tmp_path / "choices.jsonl"
    names = ("chosen", "rejected")
    lines = []
    for i, (*sides, user) in enumerate(rows):
        row = {"prompt": f"{i}"} | {n: f"{s}.png" for n, s in zip(names, sides, strict=True)}
        lines.append(json.dumps(row | ({"user_id": user} if user else {})))
    file.write_text("\n".join(lines))
    return file


def feature(name):
    colour = torch.tensor(COLOURS[name]) / 255
    return colour / colour.norm()


def direction(chosen, rejected):
    difference = feature(chosen) - feature(rejected)
    return difference / difference.norm()


def test_a_user_is_the_directions_of_the_first_choices(choices, tmp_path):
    cfg = UserEmbeddings(
        backbone=MeanColour(), path=str(choices), shots=2, micro_batch=1, output="u.safetensors"
    )
    found = cfg.embed()
    assert [*found] == ["ann"]
    wanted = torch.stack([direction("red", "blue"), direction("red", "grey")])
    assert_close(found["ann"], wanted)


def test_choices_that_were_embedded_are_not_trained(choices):
    read = PreferenceDataset(path=str(choices), skip_choices=2).read()[0]
    assert [(pair.prompt, pair.user) for pair in read] == [("3", "ann"), ("4", "")]


def test_longer_features_count_no_more():
    chosen, rejected = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])
    assert_close(choice_tokens(chosen, rejected), choice_tokens(chosen / 7, 5 * rejected))


def test_too_few_choices_and_other_files_are_refused(choices):
    given = {"backbone": MeanColour(), "path": str(choices)}
    with pytest.raises(ValueError, match="the maximum is 3"):
        UserEmbeddings(**given, shots=4, output="u.safetensors").select_choices()
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        UserEmbeddings(**given, output="u.pt")


def test_the_command_writes_what_a_personalised_policy_reads(choices, tmp_path, capsys):
    file = tmp_path / "users.yaml"
    backbone = f"{MeanColour.__module__}.MeanColour"
    file.write_text(f"backbone: {{class_path: {backbone}}}\npath: {choices}\noutput: none\n")
    out = tmp_path / "made" / "users.safetensors"
    with pytest.raises(SystemExit) as ended:
        main(["users", str(file), f"output={out}", "shots=3"])
    assert ended.value.code == 0
    assert {u: tuple(e.shape) for u, e in load_file(out).items()} == {"ann": (3, 3)}
    assert "1 users, 3 x 3 each" in capsys.readouterr().err


def test_choices_are_read_from_columns_of_other_names(choices, tmp_path):
    rows = [json.loads(line) for line in choices.read_text().splitlines()]
    names = {"chosen": "winner", "rejected": "loser", "user_id": "annotator"}
    other = tmp_path / "other.jsonl"
    moved = [{names.get(name, name): value for name, value in row.items()} for row in rows]
    other.write_text("\n".join(map(json.dumps, moved)))
    same = {"backbone": MeanColour(), "shots": 2, "output": "u.safetensors"}
    plain = UserEmbeddings(path=str(choices), **same).embed()
    named = UserEmbeddings(path=str(other), columns=names, **same).embed()
    assert_close(named, plain)
