"""Describe this machine: versions of libraries, processors and accelerators."""

import os
import re
import sys

_OWN = "flowalign-diffusion"
"""Distribution name of flowalign."""
_NAME, _FOR_DEVELOPERS = re.compile(r"[\w-]+"), re.compile(r"extra == '(dev|docs)'")
_DEVICES = "/dev/nvidiactl", "/dev/dxg", "/dev/kfd"
"""Devices of NVIDIA's driver, of WSL, and of AMD's driver."""


def versions() -> dict[str, str]:
    """Return the version of Python and of each library; "not installed" for missing ones."""
    from importlib import metadata  # takes 20 ms

    required = [one for one in metadata.requires(_OWN) or () if not _FOR_DEVELOPERS.search(one)]
    names = {_NAME.findall(one)[0] for one in required}
    found = {"python": sys.version.split()[0]}
    for name in (_OWN, *sorted(names)):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def has_accelerator() -> bool:
    """Return whether the system shows a GPU of NVIDIA, AMD or Apple. It needs no torch."""
    return sys.platform == "darwin" or any(map(os.path.exists, _DEVICES))


def machine() -> dict[str, str]:
    """Return the processors and the accelerators that torch sees."""
    found = {"cpu": f"{os.cpu_count()} cores", "gpu": "none"}
    if not has_accelerator():
        return found
    import torch

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = ", ".join(f"{g.name}, {g.total_memory / 2**30:.0f} GiB" for g in gpus)
    rocm = f" (ROCm {torch.version.hip})" if torch.version.hip else ""
    found["gpu"] = f"{names}{rocm}" if names else f"a device that torch {torch.__version__} ignores"
    if torch.backends.mps.is_available():
        found["mps"] = "Apple GPU found, but not supported: runs use the CPU"
    return found


def gpu_bytes() -> int:
    """Return the memory of the smallest GPU in bytes; 0 without a GPU."""
    if not has_accelerator():
        return 0
    import torch

    count = torch.cuda.device_count()
    return min((torch.cuda.get_device_properties(i).total_memory for i in range(count)), default=0)
