"""Show the progress of a run: a bar on a terminal, plain lines in a log file."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_HEALTH = {
    "reward_mean": "reward {:.3f}",
    "ratio_std": "ratio 1 +- {:.1e}",
    "ratio_mean": "ratio {:.5f}",
    "implicit_accuracy": "pairs in order {:.0%}",
    "drift_chosen": "error of chosen {:+.1e}",
    "clipped": "clipped {:.0%}",
    "kl": "kl {:.1e}",
    "throughput": "{:.1f} images/s",
    "pairs_per_second": "{:.1f} pairs/s",
}
"""Metrics that are shown with each step, and their formats."""
_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Progress display of a run; use it as a context manager.

    If the output is neither a terminal nor a notebook, a plain line appears at most every 5
    seconds, and for the last step. With `enabled=False` (all ranks except the main one) nothing is
    written.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int = 0,
        *,
        enabled: bool = True,
        console: "Console | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        # `flowalign --help` imports this module, and rich takes 40 ms.
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.text import Text

        self._console = (console or Console()) if enabled else Console(quiet=True)
        self._total, self._first, self._clock = total_steps, first_step, clock
        self._start = clock()
        self._printed_at = -float("inf")
        self._unprinted = ""
        self._status = Text("waiting for the first step")
        left = TextColumn("{task.fields[left]}")
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(None), left)
        self._bar = Bar(*columns, console=self._console, expand=True)
        self._task = self._bar.add_task("", total=total_steps, completed=first_step, left="")
        self._live: Live | None = None
        self._cell = _CellLine() if enabled and self._console.is_jupyter else None
        if enabled and self._console.is_terminal and not self._cell:
            self._live = Live(Group(self._bar, self._status), console=self._console)

    def __enter__(self) -> "Progress":
        self._start = self._clock()
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *raised: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._live:
            self._live.stop()
        elif self._unprinted:
            self.note(self._unprinted)

    def update(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Show the metrics of a finished step; steps count from 0."""
        now = self._clock()
        done = step + 1
        seconds = (now - self._start) / max(done - self._first, 1) * (self._total - done)
        status, left = describe(metrics), f"{duration(seconds)} left"
        self._bar.update(self._task, completed=done, left=left)
        self._status.plain = status
        if self._live:
            self._live.refresh()
            return
        self._unprinted = "  ".join(filter(None, (f"step {done}/{self._total}", status, left)))
        if self._cell:
            self._cell.show(f"{draw_bar(done / self._total)}  {self._unprinted}")
            self._unprinted = ""
            return
        if now - self._printed_at >= _SECONDS_BETWEEN_LINES or done >= self._total:
            self.note(self._unprinted)
            self._printed_at, self._unprinted = now, ""

    def note(self, text: "str | Text") -> None:
        """Print text above the bar, exactly as given."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class _CellLine:
    """Line below the cell of a notebook, replaced by each update; rich needs ipywidgets for one."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        content = {"text/plain": text}
        if self._handle:
            self._handle.update(content, raw=True)
        else:
            display = sys.modules["IPython"].display.display
            self._handle = display(content, raw=True, display_id=True)


def draw_bar(share: float, width: int = 30) -> str:
    """Return a bar of characters for a share in [0, 1]."""
    full = round(share * width)
    return "\u2588" * full + "\u2591" * (width - full)


class Messages:
    """Immediate display of messages, as plain lines or above a progress bar."""

    def __init__(self, log: Callable[[str], None]):
        self.log = self.show = log

    def __call__(self, text: str) -> None:
        """Show a message."""
        self.show(text)

    @contextmanager
    def above(self, progress: Progress) -> Iterator[None]:
        """Show messages above a progress bar inside the context."""
        self.show = progress.note
        try:
            yield
        finally:
            self.show = self.log


class Patience:
    """Message about a slow operation, after some seconds and again whenever the time has doubled.

    Use it as a context manager around each operation. Later waits are only reported if they are
    longer than the waits reported before.
    """

    def __init__(self, what: str, log: Callable[[str], None], seconds: float = 10.0):
        self.what, self.log, self.seconds = what, log, seconds
        self._over = threading.Event()

    def __enter__(self) -> "Patience":
        self._over = threading.Event()
        threading.Thread(target=self._watch, args=(self._over,), daemon=True).start()
        return self

    def __exit__(self, *raised: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._over.set()

    def _watch(self, over: threading.Event) -> None:
        start = time.monotonic()
        while not over.wait(start + self.seconds - time.monotonic()):
            self.log(f"waiting for {self.what}, {self.seconds:g} seconds so far")
            self.seconds *= 2


def say(text: "str | Text") -> None:
    """Print text on the standard error output, exactly as given."""
    from rich.console import Console

    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def is_main() -> bool:
    """Return whether this process is the first one of its launch, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def get_log() -> Callable[[str], None]:
    """Return a function that prints a line on the main process, and does nothing on other ranks."""
    return say if is_main() else lambda _: None


def table(title: str, rows: Mapping[str, str], *, console: "Console | None" = None) -> None:
    """Print names and values in two columns, such as the plan of a run."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=Text(title, style="bold"), title_justify="left", show_header=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(Text(name), Text(value))
    (console or Console()).print(grid)


def describe(metrics: Mapping[str, float | int]) -> str:
    """Format the few metrics that show whether a run is healthy; unmeasured ones are skipped."""
    clipped = [metrics[name] for name in ("clip_frac_high", "clip_frac_low") if name in metrics]
    known = {**metrics, "clipped": sum(clipped)} if clipped else metrics
    if "ratio_std" in known:
        known = {name: value for name, value in known.items() if name != "ratio_mean"}
    return "  ".join(text.format(known[name]) for name, text in _HEALTH.items() if name in known)


def duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds, without leading zeros."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
