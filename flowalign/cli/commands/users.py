"""Embed users from a few of their choices."""

import argparse
from pathlib import Path

from safetensors.torch import save_file

from flowalign.extra.users.user_embeddings import UserEmbeddings
from flowalign.utils.console import say
from flowalign.utils.errors import convert_value_errors
from flowalign.utils.files import atomic_write
from flowalign.utils.typed_settings import load_typed


@convert_value_errors()
def run(args: argparse.Namespace) -> int:
    """Write the embeddings, and return 0."""
    cfg, _ = load_typed(UserEmbeddings, args.config, args.overrides)
    embeddings = cfg.embed()
    out = Path(cfg.output)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as partial:
        save_file({user: tokens.contiguous() for user, tokens in embeddings.items()}, partial)
    shape = " x ".join(str(size) for size in next(iter(embeddings.values())).shape)
    say(f"{len(embeddings)} users, {shape} each: {out}")
    return 0
