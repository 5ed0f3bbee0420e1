"""Numbers recorded from the reference repositories, see assets/golden/README.md."""

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

GOLDEN = Path(__file__).parents[2] / "assets" / "golden"


def load(item: str, prefix: str = "") -> dict[str, Tensor]:
    """Tensors of a recording; those under the prefix are also there by their bare name."""
    tensors = load_file(GOLDEN / f"{item}.safetensors")
    named = {name for name in tensors if name.startswith(prefix)}
    return tensors | {name.removeprefix(prefix): tensors[name] for name in named}
