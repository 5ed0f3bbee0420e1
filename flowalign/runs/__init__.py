"""Run a run file: settings, plan, session, bench and comparison.

```python
from flowalign.runs import load, start, train

run, settings = load("configs/shapes.yaml", ["--num_steps", "10"])
summary = train(start(run, settings, print))
```
"""

from typing import TYPE_CHECKING

from flowalign.utils.imports import export_lazily

if TYPE_CHECKING:
    from flowalign.runs.config import Run, load
    from flowalign.runs.planning.plan import plan
    from flowalign.runs.session.session import Session, start
    from flowalign.runs.session.train_session import train
    from flowalign.training.ema import Ema

__all__ = ["Ema", "Run", "Session", "load", "plan", "start", "train"]
__getattr__ = export_lazily(  # commands that only read files need no torch
    __name__,
    {
        "flowalign.runs.config": ("Run", "load"),
        "flowalign.runs.planning.plan": ("plan",),
        "flowalign.runs.session.session": ("Session", "start"),
        "flowalign.runs.session.train_session": ("train",),
        "flowalign.training.ema": ("Ema",),
    },
)
