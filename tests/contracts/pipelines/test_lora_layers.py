"""LoRA layers compute the bits of peft with fewer operations."""

from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from flowalign.training.reference import EMA, TrainedWeights
from flowalign.utils.adapters import adapters_off
from pipelines.network.lora_layers import restore_adapters, skip_input_casts
from pipelines.network.weights import Lora
from tests.fixtures.embedded import inputs, move, new_sd3

VIEWS = "view", "t", "transpose", "permute", "expand", "unsqueeze", "slice", "split", "chunk"
VIEWS += "select", "alias", "detach", "_unsafe_view", "empty", "empty_strided", "unbind"


class Operations(TorchDispatchMode):
    """Counter of the operations that start a kernel."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] += name not in VIEWS
        return func(*args, **(kwargs or {}))


def count(policy, given) -> int:
    with Operations() as seen:
        policy.velocity(*given)
    return seen.counts.total()


def new(precision="bf16", alpha=8, **changes):
    policy = new_sd3(precision=precision, lora=Lora(rank=4, alpha=alpha), **changes)
    move(policy)
    return policy


def outcome(policy):
    """Velocity without gradient, velocity with gradient, and all gradients."""
    given = inputs(policy)
    with torch.no_grad():
        plain = policy.velocity(*given)
    v = policy.velocity(*given)
    v.square().mean().backward()
    grads = {n: p.grad for n, p in policy.denoiser.named_parameters() if p.requires_grad}
    policy.denoiser.zero_grad(set_to_none=True)
    return {"plain": plain, "v": v.detach(), **grads}


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("alpha", [2, 4, 6, 8])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_outputs_and_gradients_have_the_bits_of_peft(precision, alpha, recomputes):
    policy = new(precision, alpha, gradient_checkpointing=recomputes)
    found = outcome(policy)
    restore_adapters(policy.denoiser)
    expected = outcome(policy)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    unused = {name for name, value in expected.items() if not value.any()}
    assert all("add_q_proj" in name for name in unused), "text queries of the last block"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_layers_without_input_casts_have_the_bits_of_peft(precision):
    """For blocks that are compiled."""
    policy = new(precision)
    restore_adapters(policy.denoiser)
    expected = outcome(policy)
    skip_input_casts(policy.denoiser)
    found = outcome(policy)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_layer_with_an_adapter_costs_three_more_operations_instead_of_eight():
    policy = new()
    given = inputs(policy)
    layers = sum(".lora_A." in name for name, _ in policy.denoiser.named_parameters())
    with torch.no_grad():
        policy.velocity(*given)  # makes the copies
        with adapters_off(policy.denoiser):
            bare = count(policy, given)
        assert count(policy, given) - bare == 3 * layers
        restore_adapters(policy.denoiser)
        assert count(policy, given) - bare == 8 * layers


def test_copies_follow_every_way_to_change_the_weights(tmp_path):
    """The forward pass with gradient uses the weights themselves."""
    policy = new()
    given = inputs(policy)
    trained = [p for p in policy.denoiser.parameters() if p.requires_grad]
    seen = []

    def check() -> None:
        with torch.no_grad():
            found = policy.velocity(*given)
        assert torch.equal(found, policy.velocity(*given).detach())
        assert all(not torch.equal(found, other) for other in seen)
        seen.append(found)

    check()
    policy.save_weights(str(tmp_path))
    average = EMA(trained, 0.5)
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for _ in range(3):
        policy.velocity(*given).square().mean().backward()
        optimizer.step()
        check()
    copies = [copy.value for copy in policy.denoiser.transformer_blocks[0].attn.to_q.copies]
    average.update(1)
    with average.applied():
        check()
    other = TrainedWeights(policy)
    with torch.no_grad():
        for p in other.named.values():
            p.mul_(1.5)
    with other.active():
        check()
    again = [copy.value for copy in policy.denoiser.transformer_blocks[0].attn.to_q.copies]
    assert all(one is two for one, two in zip(copies, again, strict=True)), "refreshed in place"
    first = seen.pop(0)
    policy.load_weights(str(tmp_path))
    check()
    assert torch.equal(seen[-1], first)


def test_a_write_that_torch_does_not_count_fails_the_check_of_saved_weights(tmp_path):
    policy = new()
    policy.save_weights(str(tmp_path))
    assert policy.verify_weights(str(tmp_path)) == 0
    given = inputs(policy)
    with torch.no_grad():
        before = policy.velocity(*given)
        for name, p in policy.denoiser.named_parameters():
            if p.requires_grad and "lora_B" in name:
                p.data.mul_(2)
        assert torch.equal(policy.velocity(*given), before), "the copies are old"
    with pytest.raises(RuntimeError, match="increment_version"):
        policy.verify_weights(str(tmp_path))
    torch.autograd.graph.increment_version(policy.denoiser.parameters())
    policy.save_weights(str(tmp_path))
    assert policy.verify_weights(str(tmp_path)) == 0


def test_weights_that_are_merged_in_float32_keep_small_updates(tmp_path):
    policy = new()
    layer = policy.denoiser.transformer_blocks[0].attn.to_q
    with torch.no_grad():
        layer.lora_B["default"].weight.mul_(1e-3)
    expected = layer.base_layer.weight.float() + layer.get_delta_weight("default")
    assert not torch.equal(expected, layer.base_layer.weight.float())
    policy.network.export(policy, str(tmp_path), "merged", "fp32")
    file = tmp_path / "transformer/diffusion_pytorch_model.safetensors"
    merged = load_file(file)["transformer_blocks.0.attn.to_q.weight"]
    torch.testing.assert_close(merged, expected.detach(), atol=1e-9, rtol=1e-6)
