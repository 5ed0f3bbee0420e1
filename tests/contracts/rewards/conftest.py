"""Chat servers and tiny local models of the tests of judges."""

import pytest

from reward_models.backbones.yes_no_judges import QwenYesNo
from reward_models.chat.chat_client import Server
from tests.fixtures.chat_server import MODEL, ChatServer
from tests.fixtures.tiny_qwen import build_judge


@pytest.fixture
def start_server():
    """Start servers that are gone after the test."""
    running = []

    def start(answer, **settings):
        running.append(ChatServer(answer, **settings).__enter__())
        return running[-1]

    yield start
    for chat in running:
        chat.die()


@pytest.fixture
def serve(start_server):
    """Return the settings of clients of new servers; `serve.running` lists the servers."""

    def serve(answer, **settings):
        serve.running.append(start_server(answer))
        url = serve.running[-1].url
        return Server(url, MODEL, **{"backoff": 0.01, "cache": None} | settings)

    serve.running = []
    return serve


@pytest.fixture(scope="session")
def local_judges(tmp_path_factory):
    """A tiny judge of every architecture."""
    root = tmp_path_factory.mktemp("judges")
    return {
        kind: QwenYesNo(
            str(build_judge(root / kind, kind)), "cpu", "float32", batch_size=2, fps=3.0
        )
        for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    }
