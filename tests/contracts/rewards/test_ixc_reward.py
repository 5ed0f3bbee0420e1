"""IXC-2.5-Reward behind its published interface, played by a stand-in."""

from typing import ClassVar

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from reward_models.preference.ixc_reward import IXCReward
from tests.fixtures.reward_contract import check_contract, check_fingerprints, example_batch


class StandIn:
    """Scores like the interface says: a chat, paths of images, a number of tiles."""

    calls: ClassVar[list] = []

    def to(self, device):
        self.device = device
        return self

    def eval(self):
        return self

    def get_score(self, chat, images, hd_num):
        assert self.tokenizer == "tokenizer"
        pixels = np.asarray(Image.open(images[0]).convert("RGB")).astype(float)
        StandIn.calls.append((chat, pixels.shape, hd_num))
        return torch.tensor(pixels.mean() / 32 + len(chat[1]["content"]), dtype=torch.float16)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    StandIn.calls = []
    asked = []

    def build(path, **settings):
        asked.append((path, settings))
        return StandIn()

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", build)
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda path, **settings: "tokenizer"
    )
    return asked


def tiny(**settings):
    return IXCReward(**{"trust_remote_code": True, "device": "cpu"} | settings)


def test_the_prompt_is_the_answer_that_is_scored(stand_in):
    batch = example_batch(2, height=8, width=12)
    output = tiny(hd_num=4).score(batch)
    expected = [
        float(m.mean() * 255 / 32 + len(p)) for m, p in zip(batch.media, batch.prompts, strict=True)
    ]
    assert output.values.flatten().tolist() == pytest.approx(expected, abs=0.05)
    chat, shape, tiles = StandIn.calls[1]
    assert [turn["role"] for turn in chat] == ["user", "assistant"]
    assert chat[1]["content"] == batch.prompts[1]
    assert (shape, tiles) == ((8, 12, 3), 4)
    path, settings = stand_in[0]
    assert path == "internlm/internlm-xcomposer2d5-7b-reward"
    assert settings == {"trust_remote_code": True, "torch_dtype": torch.float16}


def test_what_every_reward_promises():
    check_contract(tiny(), example_batch(3, height=8, width=12))


def test_its_code_runs_only_where_that_was_asked_for(stand_in):
    with pytest.raises(ValueError, match="set trust_remote_code: true"):
        IXCReward()
    assert stand_in == []
    check_fingerprints([tiny(), tiny(hd_num=4), tiny(question="What is it?"), tiny(path="a/b")])
