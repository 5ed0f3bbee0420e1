"""Runs `flowalign users`: embeds people by their choices, for personalised policies."""

import argparse
from pathlib import Path

from flowalign.cli.messages import add_config_file
from flowalign.utils.errors import ConfigError

HELP = "Embed users by a few of their choices, for policies that are conditioned on them (PPD)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file and its overrides."""
    add_config_file(parser)


def run(args: argparse.Namespace) -> int:
    """Write the embeddings, and return 0.

    Raises:
        ConfigError: The file or the data need a correction by the user.
    """
    from rich.console import Console
    from safetensors.torch import save_file

    from flowalign.reward_training.users import UserEmbeddings
    from flowalign.utils.files import atomic_write
    from flowalign.utils.yaml_files import load_typed

    try:
        cfg, _ = load_typed(UserEmbeddings, "flowalign users", args.config, args.overrides)
        found = cfg.embedded()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    out = Path(cfg.output)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as partial:
        save_file({user: tokens.contiguous() for user, tokens in found.items()}, partial)
    shape = " x ".join(str(size) for size in next(iter(found.values())).shape)
    Console(stderr=True, highlight=False).print(f"{len(found)} users, {shape} each: {out}")
    return 0
