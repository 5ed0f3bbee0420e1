"""Embed users from their choices, for personalised policies: `flowalign users`."""

import argparse
from pathlib import Path

from flowalign.cli.options import add_config_file
from flowalign.utils.console import say
from flowalign.utils.files import atomic_write

HELP = "Embed users from a few of their choices, for user-conditioned policies (PPD)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run file and its overrides."""
    add_config_file(parser)


def run(args: argparse.Namespace) -> int:
    """Write the embeddings, and return 0."""
    from safetensors.torch import save_file

    from flowalign.reward_training.embeddings import UserEmbeddings
    from flowalign.utils.typed_settings import load_typed

    cfg, _ = load_typed(UserEmbeddings, args.config, args.overrides)
    embeddings = cfg.embed()
    out = Path(cfg.output)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as partial:
        save_file({user: tokens.contiguous() for user, tokens in embeddings.items()}, partial)
    shape = " x ".join(str(size) for size in next(iter(embeddings.values())).shape)
    say(f"{len(embeddings)} users, {shape} each: {out}")
    return 0
