"""The server command of EditScore, an adapter on its base model."""

import re
from pathlib import Path

import yaml

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
