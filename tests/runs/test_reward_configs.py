"""Every list of rewards under configs/rewards is understood, without weights, hub or server."""

from pathlib import Path

import pytest

from flowalign.rewards.config import load_rewards

LISTS = sorted(Path("configs/rewards").glob("*.yaml"))


@pytest.mark.parametrize("path", LISTS, ids=lambda p: p.stem)
def test_a_list_of_rewards_names_distinct_dimensions_and_licences(path):
    models, resolved = load_rewards(str(path))
    dims = [dim for model in models for dim in model.spec.dims]
    assert len(set(dims)) == len(dims) >= 1
    assert all(model.spec.licence for model in models)
    assert len({model.spec.fingerprint() for model in models}) == len(models)
    again, _ = load_rewards_from(resolved)
    assert [m.spec for m in again] == [m.spec for m in models]


def load_rewards_from(text):
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        return load_rewards(file.name)
