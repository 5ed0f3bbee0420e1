"""Images on a terminal are two pixels per character, in their colours."""

import io

import torch
from rich.console import Console

from flowalign.utils.terminal_pictures import show_pictures, sketch

RED, BLUE = (255, 0, 0), (0, 0, 255)


def flag(height: int, width: int) -> torch.Tensor:
    """Red above blue."""
    picture = torch.zeros(3, height, width)
    picture[0, : height // 2], picture[2, height // 2 :] = 1.0, 1.0
    return picture


def colours(text) -> list[tuple]:
    return [(tuple(s.style.color.triplet), tuple(s.style.bgcolor.triplet)) for s in text.spans]


def test_a_character_holds_two_pixels():
    text = sketch(flag(2, 3)[None], 80)
    assert text.plain == "▀▀▀"
    assert colours(text) == [(RED, BLUE)] * 3


def test_images_share_the_width_of_the_terminal_and_keep_their_shape():
    text = sketch(flag(32, 64).expand(4, 3, 32, 64), 83)
    lines = text.plain.split("\n")
    assert {len(line) for line in lines} == {4 * 20 + 3}
    assert len(lines) == 5  # 20 characters wide, half as many pixels high, two per character
    assert colours(text)[0] == (RED, RED)
    assert colours(text)[-1] == (BLUE, BLUE)


def test_only_a_terminal_with_colours_shows_them():
    clips = flag(4, 4).expand(9, 1, 3, 4, 4)
    for options in ({"force_terminal": False}, {"force_terminal": True, "color_system": None}):
        show_pictures(clips, lambda _: 1 / 0, Console(file=io.StringIO(), **options))
    shown = []
    screen = Console(
        file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80, no_color=False
    )
    show_pictures(clips, shown.append, screen)
    assert shown[0].plain.count("▀") == 4 * 4 * 2  # the first four images
