"""Every number of a complete run file, at and beyond the ends of its range: a run, or a message."""

import time

import pytest
import yaml

from flowalign.runs.config import load
from flowalign.utils.errors import ConfigError

POLICY_GRADIENT = "configs/shapes.yaml"
FILES = {
    POLICY_GRADIENT: "",
    "configs/shapes_video_tempflow.yaml": ("policy.", "recipe."),
    "configs/preference/shapes/online_dpo.yaml": "recipe.",
}
"""Files of every kind, and how the keys begin that no file before them has."""
VALUES = ["0", "-1", "2147483648", "1e38", "1e39", ".nan", "[]", "five"]
NEVER = {"1e39", ".nan", "[]"}
"""Values that no number may have."""


def numbers_of(settings: object, key: str = "") -> list[str]:
    """Return the keys of all numbers, as overrides name them."""
    if isinstance(settings, dict):
        within = settings.get("init_args") or {} if "class_path" in settings else settings
        found = [numbers_of(v, f"{key}.{n}" if key else n) for n, v in within.items()]
        return [name for names in found for name in names]
    is_number = isinstance(settings, int | float) and not isinstance(settings, bool)
    return [key] if is_number else []


def outcome(file: str, key: str, value: str) -> str:
    """Load the file with one number changed; errors have only a few lines."""
    said = ""
    try:
        load(file, [f"--{key}", value])
    except ConfigError as error:
        said = str(error)
    assert len(said.splitlines()) <= 5, said
    assert len(said) < 1500, said
    return said


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.warmup", "-5"),
        ("recipe.advantages.clip", "-1"),
        ("recipe.advantages.clip", ".nan"),
        ("recipe.advantages.std_floor", ".inf"),
        ("recipe.algorithm.surrogate.clip", ".nan"),
        ("recipe.sampling.eta", ".nan"),
        ("optimizer.eps", "-1e-8"),
        ("optimizer.weight_decay", ".inf"),
        ("policy.guidance", ".inf"),
        ("policy.height", "0"),
        ("seed", "9" * 30),
        ("evaluation.every", "-1"),
        ("recipe.updates_per_step", "100000"),
    ],
)
def test_a_number_that_cannot_train_is_refused_with_its_key(key, value):
    said = outcome(POLICY_GRADIENT, key, value)
    assert key.partition(".")[2] or key in said
    assert key.rpartition(".")[2] in said
    assert said.startswith("command line") or "updates_per_step" in key


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("file", "begin"), FILES.items(), ids=FILES)
def test_every_number_is_refused_in_a_few_lines_or_gives_a_run_at_once(file, begin):
    """Nothing but a message comes of a wrong one: no traceback, no endless loop, no run."""
    _, text = load(file)
    keys = [key for key in numbers_of(yaml.safe_load(text)) if key.startswith(begin)]
    assert len(keys) > 8
    for key in keys:
        for value in VALUES:
            started = time.monotonic()
            said = outcome(file, key, value)
            assert time.monotonic() - started < 30, (key, value)
            if value in NEVER:
                assert said, (key, value)
                assert any(name in said for name in key.split(".")[-2:]), (key, value, said)
