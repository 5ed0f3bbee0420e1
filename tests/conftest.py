"""One thread: the suite must give the same numbers on every machine, and its tensors are tiny."""

import atexit
import gc
import os
import random
import re
import signal
import sys
from pathlib import Path
from typing import NoReturn

import pytest

_workers: list[pytest.Config] = []


@atexit.register  # before torch is imported, so after its clean-up
def _leave():
    """End a worker at once: freeing a million objects one by one takes seconds."""
    if _workers:
        os._exit(0)


import torch  # noqa: E402

pytest.register_assert_rewrite("tests.fixtures")

from tests.fixtures import annotations, draw, loaded_encoders, parsed_components, zygote  # noqa: E402

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # `&` in a shell ignores Ctrl-C
annotations.install("flowalign", "reward_models", "pipelines")
parsed_components.install()
zygote.open_session()
os.fsync = lambda _: None  # no test cuts the power, and each sync waits for the disk
gc.disable()


def _refuse_to_fork() -> NoReturn:
    raise RuntimeError("a forked process with threads may deadlock: use tests.fixtures.ranks")


os.fork = _refuse_to_fork
_FILE = pytest.StashKey[Path]()
_MARKED = re.compile(r"^pytestmark = (?:\[\s*)?pytest\.mark\.(slow|gpu)\b", re.MULTILINE)


def pytest_addoption(parser):
    parser.addoption(
        "--slow-one-of", type=int, default=1, metavar="N", help="run every Nth slow test"
    )


def pytest_ignore_collect(collection_path, config):
    """Import no file of slow or GPU tests for a run without them: a worker imports all others."""
    if collection_path.suffix == ".py":
        found = _MARKED.search(collection_path.read_text(encoding="utf-8"))
        return (found and f"not {found[1]}" in config.option.markexpr) or None
    return None


@pytest.hookimpl(trylast=True)  # after tests with other marks have been left out
def pytest_collection_modifyitems(config, items):
    left_out = draw.left_out(items, config.getoption("--slow-one-of"))
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [test for test in items if test not in gone]


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        _workers.append(config)


def pytest_collection_finish(session):
    """Imported objects are not garbage; collecting them repeatedly takes a tenth of the time."""
    gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)


def pytest_runtest_setup(item):
    random.seed(item.nodeid)  # beartype compares random items of sequences
    if item.path != item.config.stash.get(_FILE, None):
        item.config.stash[_FILE] = item.path
        annotations.begin_file()
        loaded_encoders.begin_file()
        parsed_components.forget()


def pytest_runtest_teardown(item):
    """Forget modules of folders that only this test has: another may give one the same name."""
    local = sys.modules.get("flowalign.utils.local_modules")
    if local is None or not local._files:
        return
    for name, file in local._files.items():
        sys.modules.pop(name, None)
        sys.path[:] = [path for path in sys.path if path != str(file.parent)]
    local._files.clear()
    parsed_components.forget()
