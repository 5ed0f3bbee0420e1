"""Output of a run on a terminal, in a log file, and on silent ranks."""

import io
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from flowalign.utils.console import Progress, describe, duration, table
from flowalign.utils.costs import Costs

METRICS = {
    "reward_mean": 0.41234,
    "ratio_mean": 1.0001,
    "ratio_std": 2.14e-5,
    "clip_frac_high": 0.08,
    "clip_frac_low": 0.05,
    "kl": 0.0123,
    "throughput": 3.26,
}


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def terminal(is_terminal, width=100):
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=width, color_system=None)


def printed(screen):
    return screen.file.getvalue()


def run(screen, seconds_per_step, num_steps, stop=None, **options):
    clock = Clock()
    with Progress(num_steps, console=screen, clock=clock, **options) as progress:
        for step in range(options.get("first_step", 0), stop or num_steps):
            clock.now += seconds_per_step
            progress.update(step, METRICS)


def test_describe_shows_what_was_measured_in_order():
    expected = "reward 0.412  ratio 1 +- 2.1e-05  clipped 13%  kl 1.2e-02  3.3 images/s"
    assert describe(METRICS) == expected


def test_describe_leaves_out_what_was_not_measured():
    assert describe({}) == ""
    assert describe({"ratio_mean": 0.99987, "clip_frac_low": 0.5}) == "ratio 0.99987  clipped 50%"
    assert describe({"reward_mean": float("nan")}) == "reward nan"


def test_duration_leaves_out_leading_zeros():
    got = [duration(s) for s in (-1.0, 0.0, 59.6, 61.0, 3600.0, 90061.0)]
    assert got == ["0:00", "0:00", "1:00", "1:01", "1:00:00", "25:01:01"]


@pytest.mark.parametrize(
    ("seconds", "num_steps", "stop", "steps"),
    [
        (2.0, 10, None, ["1/10", "4/10", "7/10", "10/10"]),  # after 2, 8, 14 and 20 s
        (0.1, 30, None, ["1/30", "30/30"]),
        (0.1, 30, 7, ["1/30", "7/30"]),  # interrupted
    ],
)
def test_a_log_file_gets_a_line_at_most_every_five_seconds_and_the_last_step(
    seconds, num_steps, stop, steps
):
    screen = terminal(False)
    run(screen, seconds, num_steps, stop=stop)
    assert [line.split()[1] for line in printed(screen).splitlines()] == steps


def test_the_last_step_is_printed_before_what_follows_it():
    screen = terminal(False)
    with Progress(2, console=screen, clock=Clock()) as progress:
        for step in range(2):
            progress.update(step, {})
        progress.note("evaluating")
    assert [line.split("  ")[0] for line in printed(screen).splitlines()] == [
        "step 1/2",
        "step 2/2",
        "evaluating",
    ]


def test_a_line_is_never_wrapped_in_a_log_file():
    screen = terminal(False, width=20)
    run(screen, 1.0, 1)
    assert printed(screen) == f"step 1/1  {describe(METRICS)}  0:00 left\n"


def test_time_left_counts_only_the_steps_of_this_start():
    """Resumed at step 6 of 10, 2 steps of 30 s: 2 steps of 30 s are left."""
    screen = terminal(False)
    run(screen, 30.0, 10, stop=8, first_step=6)
    first, second = printed(screen).splitlines()
    assert first.endswith("  1:30 left")
    assert second.startswith("step 8/10 ")
    assert second.endswith("  1:00 left")


def test_a_terminal_of_80_columns_gets_a_bar_and_the_metrics_below_it():
    screen = terminal(True, width=80)
    run(screen, 2.0, 4, stop=3)
    bar, metrics = printed(screen).splitlines()[-3:-1]
    assert "3/4 ━" in bar
    assert bar.rstrip().endswith("0:02 left")
    assert metrics.startswith(describe(METRICS))


def test_a_notebook_gets_one_line_that_is_replaced(monkeypatch):
    shown = []
    handle = SimpleNamespace(update=lambda data, raw: shown.append(data["text/plain"]))
    display = SimpleNamespace(display=lambda data, **_: handle.update(data, True) or handle)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=display))
    screen = Console(force_jupyter=True, file=io.StringIO())
    with Progress(2, console=screen, clock=Clock()) as progress:
        for step in range(2):
            progress.update(step, {"reward_mean": 0.5})
    assert [line[:30].count("█") for line in shown] == [15, 30]
    assert shown[1].endswith("step 2/2  reward 0.500  0:00 left")


def test_a_note_is_printed_as_it_is_with_and_without_a_bar():
    text = "a check found [bold]this[/bold] at /tmp/x.py:3"
    for is_terminal in (True, False):
        screen = terminal(is_terminal)
        with Progress(3, console=screen) as progress:
            progress.note(text)
        assert text in printed(screen)


def test_a_disabled_rank_writes_nothing(capsys):
    with Progress(3, enabled=False) as progress:
        progress.update(0, METRICS)
        progress.note("nothing")
    screen = terminal(True)
    with Progress(3, enabled=False, console=screen) as progress:
        progress.update(0, METRICS)
    assert printed(screen) == ""
    assert capsys.readouterr() == ("", "")


def test_the_default_console_writes_to_stdout(capsys):
    with Progress(1) as progress:
        progress.update(0, {"reward_mean": 0.5})
    assert capsys.readouterr().out == "step 1/1  reward 0.500  0:00 left\n"


def test_a_table_shows_names_and_values_as_they_are():
    screen = terminal(False)
    table("Plan [x]", {"window": "[0, 4)", "prompts": "8 x 16"}, console=screen)
    title, *rows = (line.strip(" │") for line in printed(screen).splitlines())
    assert title == "Plan [x]"
    cells = [[cell.strip() for cell in row.split("│")] for row in rows if "│" in row]
    assert cells == [["window", "[0, 4)"], ["prompts", "8 x 16"]]


# Counting shares of network evaluations -----------------------------------------------------------


@pytest.mark.parametrize(("share", "calls", "total"), [(0.1, 7, 1), (0.6, 3, 2), (0.3, 10, 3)])
def test_shares_of_many_calls_are_rounded_once(share, calls, total):
    costs = Costs()
    for _ in range(calls):
        costs.count_share(share, 1)
    assert costs.sampling_evaluations == costs.network_evaluations == total
