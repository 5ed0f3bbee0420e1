"""Libraries that take seconds to import, and that settings and help do not need.

Use `diffusers.X` inside functions instead of `from diffusers import X`: the first attribute imports
the library. Annotations and base classes would import it at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flowalign.utils.imports import LazyModule

if TYPE_CHECKING:
    import diffusers
    import peft
    import transformers
    from diffusers.models import attention_dispatch
    from torch.distributed import fsdp
    from torch.distributed.checkpoint import state_dict
    from torch.utils import flop_counter
else:
    diffusers, peft, transformers = map(LazyModule, ("diffusers", "peft", "transformers"))
    attention_dispatch = LazyModule("diffusers.models.attention_dispatch")
    flop_counter = LazyModule("torch.utils.flop_counter")
    fsdp = LazyModule("torch.distributed.fsdp")
    state_dict = LazyModule("torch.distributed.checkpoint.state_dict")

__all__ = [
    "attention_dispatch",
    "diffusers",
    "find_class",
    "flop_counter",
    "fsdp",
    "peft",
    "state_dict",
    "transformers",
]


def find_class(name: str) -> Any:
    """Return a class of diffusers, or of another package with a dotted name such as `mine.Net`."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module or "diffusers"), attribute)
