"""Run a run file: settings, plan, session, bench and comparison.

```python
from flowalign.runs import load, start, train

run, settings = load("configs/shapes.yaml", ["--num_steps", "10"])
summary = train(start(run, settings, print))
```
"""

import lazy_loader

# Commands that only read files need no torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
