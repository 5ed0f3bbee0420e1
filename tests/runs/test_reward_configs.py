"""Every list of rewards under configs/rewards is understood, without weights, hub or server."""

import re
from pathlib import Path

import pytest
import yaml

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


@pytest.mark.parametrize("name", ["sd35_latent", "wan21_1_3b_latent"])
def test_the_pairs_of_a_latent_reward_have_scores_in_all_its_dimensions(name):
    """`flowalign pairs` writes only the scores of dimensions with a weight."""
    text = Path(f"configs/reward/{name}.yaml").read_text()
    command = re.search(r"flowalign pairs .* --weights ((?:\S+=\S+ )+)", text)
    assert command is not None
    weighted = {weight.partition("=")[0] for weight in command[1].split()}
    assert weighted == yaml.safe_load(text)["dimensions"].keys()


def load_rewards_from(text):
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        return load_rewards(file.name)
