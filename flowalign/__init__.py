"""Align diffusion and flow-matching models with human preferences, one denoising step at a time.

```python
result = flowalign.align(pipe, rewards={"warmth": warmth}, prompts=["a red fox"])
```
"""

import lazy_loader

from flowalign.utils.imports import reserve_own_packages

__version__ = "0.2.0"

reserve_own_packages()
# The command line imports this package, and help needs no torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
