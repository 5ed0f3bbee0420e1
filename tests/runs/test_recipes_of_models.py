"""Every model has a plan for a kind of method that changes with the code; the matrix trains."""

from itertools import cycle, islice

import pytest

from flowalign.runs.config import load
from flowalign.runs.library.combinations import combination
from flowalign.runs.library.run_files import Combination, recipes
from flowalign.runs.planning.plan import plan
from tests.fixtures.matrix import content_hash, write_workspace
from tests.fixtures.offline import block_sockets
from tests.fixtures.run_files import CONFIGS

KNOWN = {one.name: one for one in recipes()}
KINDS = {
    "policy gradient": ("flow_grpo",),
    "forward process": ("nft", "nft_distilled"),
    "pairs": ("diffusion_dpo", "flow_dpo", "online_dpo_video", "online_dpo"),
    "steps": ("dense_grpo", "step_dpo"),
}
"""Methods of each kind; a model needs one."""
MODELS = sorted(file.stem for file in (CONFIGS / "models").glob("*.yaml"))
KIND_OF = dict(zip(MODELS, islice(cycle(KINDS), content_hash() % len(KINDS), None), strict=False))


def run_of(model: str, kind: str) -> Combination:
    found = [combination(KNOWN[f"models/{model}"], method, KNOWN) for method in KINDS[kind]]
    return next(one for one in found if one is not None)


@pytest.fixture(scope="module")
def imported():
    """Import what plans need, which takes seconds once."""
    plan(load([str(CONFIGS / "models/toy_shapes.yaml")])[0])


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("model", MODELS)
def test_a_model_has_a_plan_for_a_kind_of_method_without_weights_or_network(
    monkeypatch, tmp_path, model
):
    write_workspace(tmp_path)
    pairs = tmp_path / "data/pickapic_v2/train"
    kind = KIND_OF[model]
    one = run_of(model, kind)
    stored = one.name.endswith(("diffusion_dpo", "flow_dpo"))
    changes = [f"recipe.data.path={pairs}"] if stored else []
    block_sockets(monkeypatch)
    run = load([str(part.file) for part in one.parts], changes)[0]
    rows = plan(run)
    assert int(rows["trainable parameters"].split()[0].replace(",", "")) > 0, one.name
    assert " per process" in rows["memory, about"], one.name
    if kind == "forward process":
        assert run.policy.evaluations_per_velocity == 1, "samples are not guided"
