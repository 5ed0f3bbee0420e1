"""Chat servers of the tests of judges."""

import pytest

from reward_models.chat.chat_client import Server
from tests.fixtures.chat_server import MODEL, ChatServer


@pytest.fixture
def serve():
    """Start servers that are gone after the test; `serve.running` lists them."""
    running = []

    def start(answer, **settings):
        running.append(ChatServer(answer).__enter__())
        return Server(running[-1].url, MODEL, **{"backoff": 0.01, "cache": None} | settings)

    start.running = running
    yield start
    for chat in running:
        chat.die()
