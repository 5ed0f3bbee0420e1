"""Ctrl-C and SIGTERM, at once and between two steps."""

import os
import signal
import threading

import pytest

from flowalign.utils.interrupts import Terminated, exit_code, sigterm_stops, stop_between_steps


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def test_sigterm_raises_once_what_handlers_of_ctrl_c_catch():
    before = signal.getsignal(signal.SIGTERM)
    caught = []
    with sigterm_stops():
        try:
            send(signal.SIGTERM)
        except KeyboardInterrupt as stop:
            send(signal.SIGTERM)  # of a scheduler beside a launcher, while we already clean up
            caught.append(exit_code(stop))
    assert caught == [143]
    assert exit_code(KeyboardInterrupt()) == 130
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("numbers", "asked"),
    [
        ([], 0),
        ([signal.SIGINT], signal.SIGINT),
        ([signal.SIGTERM], signal.SIGTERM),
        ([signal.SIGTERM] * 3, signal.SIGTERM),
        ([signal.SIGHUP], signal.SIGHUP),
        ([signal.SIGUSR1], signal.SIGUSR1),
        ([signal.SIGTERM, signal.SIGINT], signal.SIGTERM),
        ([signal.SIGINT, signal.SIGTERM], signal.SIGTERM),
    ],
)
def test_between_steps_signals_only_ask(numbers, asked):
    with stop_between_steps() as stop:
        send(*numbers)
        assert stop() == asked


def test_a_second_ctrl_c_does_not_wait():
    with stop_between_steps() as stop:
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert stop() == signal.SIGINT


def test_under_a_launcher_the_copy_of_a_ctrl_c_waits_and_the_next_one_does_not(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "flowalign")
    with stop_between_steps() as stop:
        send(signal.SIGINT, signal.SIGINT)
        assert stop() == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_between_steps_goes_before_at_once_and_gives_way_to_it_again():
    with sigterm_stops():
        with stop_between_steps():
            send(signal.SIGTERM)
        with pytest.raises(Terminated):
            send(signal.SIGTERM)


def test_another_thread_leaves_signals_to_whoever_runs_it():
    before, found = signal.getsignal(signal.SIGINT), []

    def work():
        with sigterm_stops(), stop_between_steps() as stop:
            found.append((stop(), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(0, before)]


def test_a_closed_terminal_stops_but_not_what_nohup_started():
    for handler, stops in ((signal.SIG_DFL, True), (signal.SIG_IGN, False)):
        before = signal.signal(signal.SIGHUP, handler)
        try:
            with stop_between_steps() as stop:
                send(signal.SIGHUP)
                assert bool(stop()) == stops
        finally:
            signal.signal(signal.SIGHUP, before)


def test_another_error_of_what_a_signal_interrupted_is_a_stop():
    """An import that is interrupted may fail with an error of its own."""

    def fail(numbers: list[int]) -> None:
        with sigterm_stops():
            try:
                send(*numbers)
            finally:
                raise RecursionError("maximum recursion depth exceeded")

    with pytest.raises(Terminated) as stop:
        fail([signal.SIGTERM])
    assert exit_code(stop.value) == 143
    with pytest.raises(RecursionError):
        fail([])
