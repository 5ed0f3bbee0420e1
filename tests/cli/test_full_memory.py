"""Errors of the system and their texts are printed as they are, without a traceback."""

import argparse

import pytest
import torch

from flowalign.cli.main import complain, run_verb


def exhaust_allocator(_):
    torch.empty(1 << 60)


def exhaust_python(_):
    bytearray(1 << 60)


def exhaust_loader(_):
    raise ImportError("libtorch_cpu.so: failed to map segment from shared object")


@pytest.mark.parametrize("work", [exhaust_allocator, exhaust_python, exhaust_loader])
def test_a_command_without_memory_ends_with_one_message(work, capsys):
    assert run_verb(argparse.Namespace(run=work, verb="score")) == 1
    said = capsys.readouterr().err
    assert said.startswith("flowalign: out of memory on the CPU")
    assert "--batch_size" in said
    assert len(said.splitlines()) <= 5


def test_other_errors_of_a_program_are_not_hidden():
    def work(_):
        raise RuntimeError("a mistake")

    with pytest.raises(RuntimeError, match="a mistake"):
        run_verb(argparse.Namespace(run=work, verb="score"))


@pytest.mark.parametrize("name", ["x\\[/y]", "a:smile:.yaml", "[bold]b[/bold]", "[/]"])
def test_names_are_printed_without_markup_and_emoji(name, capsys):
    complain(f"no file {name}", 2)
    assert capsys.readouterr().err == f"flowalign: no file {name}\n"
