"""Choose the device of a reward model's network."""

import re

import torch


def choose_device(device: str) -> torch.device:
    """Return a torch device; `auto` is the GPU if there is one, else the CPU.

    Raises:
        ValueError: The text names no device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"(cpu|cuda|mps|xpu)(:\d+)?", device):
        raise ValueError(f"device is {device!r}; it must be auto, cpu, cuda or cuda:N")
    return torch.device(device)


def require_device(device: torch.device) -> None:
    """Raise ValueError if a network cannot be moved to the device; call it before weights load."""
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device of a reward is {device}, but this machine has {torch.cuda.device_count()} "
            "CUDA GPUs: set it to auto or cpu"
        )
