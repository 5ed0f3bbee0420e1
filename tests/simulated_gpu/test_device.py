"""The simulated GPU raises the errors of a GPU, counts operations, and computes as the CPU."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from flowalign.distributed.processes import join
from tests.fixtures.simulated_gpu import on_simulated_gpu, on_simulated_gpus
from tests.fixtures.simulated_gpu.usage import USAGE

pytestmark = pytest.mark.slow


def refused():
    """Messages of the device's errors."""
    on_device, on_cpu = torch.ones(2, device="cuda"), torch.ones(2)
    half = torch.ones(1, 1, 2, 4, device="cuda", dtype=torch.float16)
    attempts = {
        "two devices": lambda: on_device + on_cpu,
        "in place": lambda: on_cpu.add_(on_device),
        "numpy": lambda: on_device.numpy(),
        "attention": lambda: scaled_dot_product_attention(half.float(), half.float(), half),
    }
    messages = {}
    with torch.autocast("cuda", torch.float16):
        for name, attempt in attempts.items():
            try:
                attempt()
            except (RuntimeError, TypeError) as error:
                messages[name] = str(error)
    return messages


def test_what_a_gpu_refuses_is_refused():
    messages, _ = on_simulated_gpu(refused)
    assert messages.keys() == {"two devices", "in place", "numpy", "attention"}
    assert "at least two devices, cuda:0 and cpu" in messages["two devices"]
    assert "float32/float32/float16" in messages["attention"]


def counted():
    x = torch.arange(4.0).to("cuda")
    x.sum().item()
    x.double().cpu()
    (x + 1.5).tolist()
    assert torch.ones(3, device="cuda").device.type == "cuda"


def test_reads_uploads_and_float64_are_counted():
    _, usage = on_simulated_gpu(counted)
    assert sum(usage.host_reads.values()) == 3
    assert sum(usage.uploads.values()) == 1
    assert sum(usage.float64.values()) == 0  # the conversions alone compute nothing in it
    assert usage.peak_bytes >= 4 * 4


def gradients():
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.RMSNorm(8), torch.nn.Linear(8, 2))
    x = torch.randn(3, 4)
    network(x).square().sum().backward()
    expected = [p.grad.clone() for p in network.parameters()]
    network.zero_grad()
    network.to("cuda")
    network(x.to("cuda")).square().sum().backward()
    found = [p.grad.cpu() for p in network.parameters()]
    with torch.autocast("cuda", torch.bfloat16):
        hidden = network[0](x.to("cuda"))
        normed = network[1](hidden)
    same = all(map(torch.allclose, found, expected))
    return same, str(hidden.dtype), str(normed.dtype)


def test_values_are_those_of_the_cpu_and_autocast_that_of_cuda():
    (same, hidden, normed), _ = on_simulated_gpu(gradients)
    assert same
    assert hidden == "torch.bfloat16"
    assert normed == "torch.float32"  # CUDA autocast since torch 2.12; not so on the CPU


def failing():
    raise ValueError("a reason to fail")


def test_a_failure_is_told():
    with pytest.raises(AssertionError, match="a reason to fail"):
        on_simulated_gpu(failing)


def test_networks_without_values_are_counted_by_bytes():
    _, usage = on_simulated_gpu(large, payload="meta")
    assert usage.peak_bytes == pytest.approx(4 * (20_000**2 + 2 * 20_000), rel=1e-3)


def large():
    weight = torch.empty(20_000, 20_000, device="cuda")
    y = torch.ones(1, 20_000, device="cuda") @ weight
    assert y.mean().item() == 0.5


def chosen():
    mask = torch.tensor([[True, False, True], [False, False, True]]).to("cuda")
    rows = torch.empty(2, 3, 4, device="cuda")
    lengths = mask.to(torch.bfloat16).long().sum(1)
    parts = rows[mask].split(lengths.tolist())
    last = mask[1]
    last[:2] = True  # a view: the mask changes as well
    unknown = (rows > 0).sum(2)  # from values that do not exist
    lengths.copy_(unknown[:, 0])
    return [len(one) for one in parts], mask.tolist(), unknown.tolist(), lengths.tolist()


def test_masks_and_lengths_have_values_on_a_device_without_values():
    (parts, mask, unknown, lengths), _ = on_simulated_gpu(chosen, payload="meta")
    assert parts == [2, 1]
    assert mask == [[True, False, True], [True, True, True]]
    assert unknown == [[1, 1, 1], [1, 1, 1]]
    assert lengths == [1, 1]


def masked():
    q = torch.zeros(2, 3, 60, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(2, 1, 60, 60, device="cuda", dtype=torch.bool)
    USAGE.clear()
    before = USAGE.bytes
    out = scaled_dot_product_attention(q, q, q, mask)
    return USAGE.peak_bytes - before, USAGE.bytes - before - out.nbytes


def test_a_boolean_mask_becomes_additive_and_its_rows_are_aligned():
    (peak, kept), _ = on_simulated_gpu(masked, payload="meta")
    assert peak == pytest.approx(2 * 60 * (60 + 64) * 2, rel=0.01)  # 60 is no multiple of 8
    assert 2 * 60 * 64 * 2 <= kept < peak  # and the sums of exponentials


def exchange():
    processes = join("cuda")
    numbers = torch.ones(2, device="cuda") * (processes.rank + 1)
    dist.all_reduce(numbers)
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(2))
    gathered = processes.gather(torch.tensor([processes.rank]))
    parameter = torch.nn.Parameter(numbers.clone())
    parameter.grad = torch.ones(2, device="cuda")
    processes.sum_gradients([parameter])
    difference = processes.max_rank_difference([parameter])
    return numbers.tolist(), gathered.tolist(), parameter.grad.tolist(), difference


def test_collectives_between_processes_take_tensors_of_the_device():
    """NCCL refuses others; gloo carries the values here."""
    for (numbers, gathered, gradient, difference), _ in on_simulated_gpus(2, exchange):
        assert numbers == [3.0, 3.0]
        assert gathered == [0, 1]
        assert gradient == [2.0, 2.0]
        assert difference == 0.0
