"""Rollouts in lower precision than updates: where they are allowed, and what computes in which."""

import pytest
import torch

from flowalign import runs
from flowalign.runs.config import load
from flowalign.utils.errors import ConfigError
from tests.fixtures.embedded import inputs, move, new_sd3

NFT = "configs/shapes_nft.yaml"


@pytest.mark.parametrize(
    ("files", "key", "why"),
    [
        (["configs/shapes.yaml"], "recipe", "compares log-probabilities of the rollout"),
        (["configs/shapes.yaml", "configs/methods/flow_opd.yaml"], "recipe.data", "is matched"),
    ],
)
def test_losses_that_need_what_the_rollout_computed_refuse_it(files, key, why):
    with pytest.raises(ConfigError, match=rf"{key}\.sampling\.precision is bf16, but .*{why}"):
        load(files, [f"{key}.sampling.precision=bf16"])


@pytest.mark.slow
def test_a_policy_that_is_not_in_fp32_refuses_it():
    with pytest.raises(ConfigError, match=r"precision is bf16, but policy\.precision is bf16"):
        load(NFT, ["recipe.data.sampling.precision=bf16", "policy.precision=bf16"])


@pytest.mark.slow
def test_velocities_are_rounded_inside_the_context_alone():
    policy = new_sd3()
    move(policy)
    given = inputs(policy)
    before = policy.velocity(*given)
    with policy.network.reduce_precision("bf16"):
        rounded = policy.velocity(*given)
    assert torch.equal(policy.velocity(*given), before)
    assert 1e-4 < (rounded - before).norm() / before.norm() < 0.05
    assert rounded.dtype == torch.float32


@pytest.mark.slow
def test_a_run_samples_in_bf16_and_updates_in_fp32(tmp_path):
    small = ["num_steps=1", "evaluation=null", f"output_dir={tmp_path / 'out'}"]
    small += ["recipe.data.prompts_per_step=2", "checkpoints.verify=never"]
    run, text = load(NFT, [*small, "recipe.data.sampling.precision=bf16"])
    session = runs.start(run, text, lambda _: None)
    seen = set()
    run.policy.denoiser.register_forward_pre_hook(
        lambda _, args, inputs: seen.add((inputs["hidden_states"].dtype, torch.is_grad_enabled())),
        with_kwargs=True,
    )
    assert runs.train(session)["status"] == "finished"
    assert (torch.bfloat16, False) in seen
    assert (torch.float32, True) in seen
    assert (torch.bfloat16, True) not in seen
