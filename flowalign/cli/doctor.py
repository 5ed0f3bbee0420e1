"""Print versions and devices, or test a pipeline: `flowalign doctor`."""

import argparse
import importlib
import os
import sys
from typing import Any

from flowalign.cli.options import whole
from flowalign.utils.console import table
from flowalign.utils.errors import ConfigError, convert_value_errors

HELP = "Print versions, devices and missing extras, or test a pipeline for training."
_INSPECTION = "pipelines.any_pipeline.inspection"
"""Module that is imported by name, because flowalign imports no pipeline."""
LIBRARIES = (
    "flowalign-diffusion",
    "torch",
    "torchvision",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "open-clip-torch",
    "safetensors",
    "xformers",
    "av",
    "pyarrow",
    "scipy",
    "fastapi",
    "uvicorn",
    "httpx2",
    "rapidocr-onnxruntime",
    "onnx",
    "ddddocr",
    "nudenet",
    "opencv-python-headless",
    "tensorboard",
    "wandb",
    "trackio",
)
"""Distribution names of the libraries that flowalign uses."""
_DEVICES = "/dev/nvidiactl", "/dev/dxg", "/dev/kfd"
"""Devices of NVIDIA's driver, of WSL, and of AMD's driver."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the pipeline to test, and the arguments of its call."""
    add = parser.add_argument
    add("--pipeline", metavar="FOLDER", help="diffusers pipeline to test for training")
    add("--height", type=whole(1), default=512, help="height of its images (default: 512)")
    add("--width", type=whole(1), default=512, help="width of its images (default: 512)")
    add(
        "--argument",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="argument of the pipeline's __call__, such as guidance_scale=3.5; may be repeated",
    )


@convert_value_errors()
def run(args: argparse.Namespace) -> int:
    """Print a table of versions and devices, or of a pipeline, and return 0."""
    from flowalign.runs.run_files import describe_models

    if args.pipeline is None:
        table("doctor", versions() | machine())
        fitting, others = describe_models(gpu_bytes())
        none = {"none": "the bundled toy models train on the CPU: flowalign demo"}
        table("models that this machine can train, without rewards", fitting or none)
        table("memory of a GPU that other models need", others)
        return 0
    inspect = importlib.import_module(_INSPECTION).inspect_pipeline
    rows = inspect(args.pipeline, args.height, args.width, _parse_arguments(args.argument))
    table(f"doctor of {args.pipeline}", rows)
    return 0


def _parse_arguments(words: list[str]) -> dict[str, Any]:
    """Return arguments by name, with values parsed as YAML."""
    import yaml

    pairs = [word.partition("=") for word in words]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise ConfigError(f"--argument {wrong[0]} has no value; give NAME=VALUE")
    return {name: yaml.safe_load(value) for name, _, value in pairs}


def versions() -> dict[str, str]:
    """Return the version of Python and of each library; "not installed" for missing ones."""
    import importlib.metadata  # takes 20 ms

    found = {"python": sys.version.split()[0]}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
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
