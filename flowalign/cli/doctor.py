"""Runs `flowalign doctor`: prints versions, devices and missing packages."""

import argparse
import importlib.metadata
import os
import sys

HELP = "Print versions, devices and what is missing."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options: the verb has none."""


def run(_args: argparse.Namespace) -> int:
    """Print a table of versions and devices; returns 0."""
    import torch

    from flowalign.utils.console import table

    names = [
        "flowalign",
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
        "httpx",
        "rapidocr-onnxruntime",
        "nudenet",
        "opencv-python-headless",
        "tensorboard",
        "wandb",
    ]
    rows = {"python": sys.version.split()[0]}
    for name in names:
        try:
            rows[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            rows[name] = "not installed"
    rows["cpu"] = f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    rows["gpu"] = (
        ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        if torch.cuda.is_available()
        else "none"
    )
    table("doctor", rows)
    return 0
