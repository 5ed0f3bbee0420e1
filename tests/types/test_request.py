"""Test equality of requests."""

from dataclasses import replace

import torch

from flowalign.types import Reference, Request


def reference(name: str, digest: str) -> Reference:
    return Reference(name, digest, lambda: torch.zeros(1, 3, 4, 4))


FULL = Request(
    "make it red",
    (reference("a.png", "1"), reference("b.png", "2")),
    reference("m.png", "3"),
    {"n": 1},
)


def test_the_names_of_files_do_not_matter():
    renamed = replace(FULL, references=(reference("x.png", "1"), reference("y.png", "2")))
    assert renamed == FULL
    assert len({renamed, FULL}) == 1


def test_prompt_references_their_order_mask_and_metadata_matter():
    others = [
        replace(FULL, prompt="make it blue"),
        replace(FULL, references=FULL.references[::-1]),
        replace(FULL, references=FULL.references[:1]),
        replace(FULL, mask=None),
        replace(FULL, mask=reference("m.png", "4")),
        replace(FULL, metadata={"n": 2}),
    ]
    assert len({FULL, *others}) == 1 + len(others)


def test_the_order_of_metadata_does_not_matter():
    one, other = Request("a", metadata={"x": 1, "y": 2}), Request("a", metadata={"y": 2, "x": 1})
    assert one.key == other.key
    assert one != "a"
