"""The server command of EditScore, an adapter on its base model, with a tiny random Qwen2.5-VL."""

import re
from pathlib import Path

import peft
import pytest
import torch
import yaml
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from flowalign.types import MediaBatch
from reward_models.chat.chat_client import Server
from reward_models.chat.edit_score import EditScore
from reward_models.chat.judge import Sampling
from tests.fixtures.chat_server import ChatServer
from tests.fixtures.tiny_qwen import build_judge

pytestmark = pytest.mark.slow
FILE = Path("configs/tasks/editing.yaml")
ADAPTER = "EditScore/EditScore-7B"


def test_the_command_serves_the_adapter_under_the_name_that_the_run_asks_for():
    text = FILE.read_text()
    base, name, folder = re.search(
        r"vllm serve (\S+) --enable-lora --max-lora-rank \d+ --lora-modules (\S+)=(\S+)", text
    ).groups()
    server = yaml.safe_load(text)["rewards"][0]["init_args"]["server"]
    assert (server["model"], folder) == (name, ADAPTER)
    assert base == "Qwen/Qwen2.5-VL-7B-Instruct"
    assert server["url"].endswith(":8000/v1")
    assert "--port 8000" in text


def build_adapter(base: Path, folder: Path) -> Path:
    """Write a random LoRA of the language model, as a release holds it."""
    model = AutoModelForImageTextToText.from_pretrained(base)
    config = peft.LoraConfig(r=4, target_modules=r".*language_model.*\.(q|v)_proj")
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(folder)
    return folder


def test_an_adapter_on_its_base_model_answers_the_questions_about_an_edit(tmp_path):
    base = build_judge(tmp_path / "base")
    adapter = build_adapter(base, tmp_path / "adapter")
    processor = AutoProcessor.from_pretrained(base)
    model = peft.PeftModel.from_pretrained(
        AutoModelForImageTextToText.from_pretrained(base), adapter
    ).eval()
    said = []

    def complete(inputs):
        tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        return processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :])[0]

    def answer(request):
        assert request.body["model"] == ADAPTER
        parts = [
            {"type": "image"} if part["type"] == "image_url" else part for part in request.parts
        ]
        chat = [{"role": "user", "content": parts}]
        text = processor.apply_chat_template(chat, add_generation_prompt=True)
        images = [Image.fromarray(picture) for picture in request.pictures]
        inputs = processor(text=[text], images=images, return_tensors="pt")
        with model.disable_adapter():
            plain = complete(inputs)
        said.append((len(images), plain, complete(inputs)))
        return said[-1][-1]

    source = torch.rand(3, 56, 56)
    batch = MediaBatch(torch.rand(1, 1, 3, 56, 56), ["make it red"], references=[(source,)])
    with ChatServer(answer, models=(ADAPTER,)) as server:
        reward = EditScore(Server(server.url, ADAPTER, concurrency=1), sampling=Sampling(passes=1))
        reward.load()
        output = reward.score(batch)
    assert {images for images, *_ in said} == {1, 2}  # the edit alone, and with its source
    assert all(plain != adapted for _, plain, adapted in said)
    assert not output.valid.any()  # random words are a failure, never a score
    assert output.reasons[0]
