"""Types of GPUs by name, with the properties that decide the duration of a step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Peak rates of a GPU and its links. Sources: data sheets of NVIDIA."""

    flops: float
    """Peak floating-point operations per second in bf16, without sparsity."""
    memory: float
    """Memory in bytes."""
    link: float
    """Bytes per second in each direction to a GPU of the same machine."""
    network: float
    """Bytes per second in each direction to another machine, per GPU."""
    per_machine: int = 8
    """GPUs of one machine."""


_NVLINK_4, _NVLINK_3, _PCIE_5, _PCIE_4 = 450e9, 300e9, 64e9, 32e9
_GIGABITS_400, _GIGABITS_200, _GIGABITS_100 = 50e9, 25e9, 12.5e9

GPUS = {
    "h100-80gb": Gpu(989.4e12, 80e9, _NVLINK_4, _GIGABITS_400),
    "h100-80gb-pcie": Gpu(756e12, 80e9, _PCIE_5, _GIGABITS_400),
    "h200-141gb": Gpu(989.4e12, 141e9, _NVLINK_4, _GIGABITS_400),
    "h800-80gb": Gpu(989.4e12, 80e9, 200e9, _GIGABITS_400),
    "b200-180gb": Gpu(2250e12, 180e9, 900e9, _GIGABITS_400),
    "a100-80gb": Gpu(312e12, 80e9, _NVLINK_3, _GIGABITS_200),
    "a100-40gb": Gpu(312e12, 40e9, _NVLINK_3, _GIGABITS_200),
    "l40s-48gb": Gpu(362e12, 48e9, _PCIE_4, _GIGABITS_200),
    "rtx4090-24gb": Gpu(165.2e12, 24e9, _PCIE_4, _GIGABITS_100),
}
"""Known types. The network is that of the vendor's machine with 8 such GPUs: 400 Gbit/s per GPU for
Hopper and Blackwell, 200 for Ampere and Ada, 100 for consumer cards."""


def find_gpu(name: str) -> Gpu:
    """Return a type of GPU.

    Raises:
        ValueError: The name is unknown.
    """
    if name not in GPUS:
        raise ValueError(f"--gpu is {name!r}; there are {', '.join(GPUS)}")
    return GPUS[name]
