"""Draws the images, masks and requests of `edits.jsonl` and `fills.jsonl`, next to this file.

python assets/prompts/draw_edits.py
"""

import json
from pathlib import Path

from PIL import Image, ImageDraw

HERE = Path(__file__).parent
SIZE = 256
SKY, GRASS, SEA, SAND = "#9fc5e8", "#6aa84f", "#3d6fa5", "#e6d3a3"
SCENES = {
    "house": (88, 108, 168, 208),
    "boat": (78, 88, 178, 188),
    "tree": (78, 48, 178, 218),
    "ball": (88, 118, 168, 198),
    "balloon": (88, 38, 168, 168),
    "lighthouse": (98, 48, 158, 208),
}
"""Object in the middle of each image, and its bounding box."""
EDITS = (
    "make the {} red",
    "paint blue stripes on the {}",
    "remove the {}",
    "put a white cat beside the {}",
    "make it night, and keep the {} as it is",
    "turn the {} into wood",
    "let it snow around the {}",
    "draw the whole picture, with the {}, in watercolours",
)
FILLS = (
    "a {} of red bricks",
    "an old {} covered with flowers",
    "a small {} made of glass",
    "empty ground without a {}",
)


def scene(name: str, box: tuple[int, int, int, int]) -> Image.Image:
    """Draw an object in front of sky and ground."""
    water = name in ("boat", "lighthouse")
    picture = Image.new("RGB", (SIZE, SIZE), SKY)
    pen = ImageDraw.Draw(picture)
    pen.rectangle((0, 168, SIZE, SIZE), fill=SEA if water else GRASS)
    left, top, right, bottom = box
    middle, waist = (left + right) // 2, (top + bottom) // 2
    if name == "house":
        pen.rectangle((left, waist, right, bottom), fill="#d9b38c")
        pen.polygon([(left, waist), (middle, top), (right, waist)], fill="#8c4a2f")
    elif name == "boat":
        hull = [(left, 168), (right, 168), (right - 20, bottom), (left + 20, bottom)]
        pen.polygon(hull, fill="#7f4f24")
        pen.polygon([(middle, top), (middle, waist + 20), (right, waist + 20)], fill="#f4f1de")
    elif name == "tree":
        pen.rectangle((middle - 10, waist, middle + 10, bottom), fill="#6f4e37")
        pen.ellipse((left, top, right, waist + 20), fill="#38761d")
    elif name == "ball":
        pen.ellipse(box, fill="#f1c232")
    elif name == "balloon":
        pen.line((middle, waist, middle, bottom), fill="#444444", width=2)
        pen.ellipse((left, top, right, waist + 20), fill="#a64d79")
    else:
        pen.ellipse((left - 40, bottom - 20, right + 40, bottom + 30), fill=SAND)
        pen.rectangle((left + 15, top + 20, right - 15, bottom), fill="#eeeeee")
        pen.rectangle((left + 10, top, right - 10, top + 20), fill="#cc3333")
    return picture


def main() -> None:
    """Write all images, masks and requests."""
    folder = HERE / "edits"
    folder.mkdir(exist_ok=True)
    edits, fills = [], []
    for name, box in SCENES.items():
        scene(name, box).save(folder / f"{name}.png", optimize=True)
        hole = Image.new("L", (SIZE, SIZE), 0)
        ImageDraw.Draw(hole).rectangle(box, fill=255)
        hole.convert("1").save(folder / f"{name}_mask.png", optimize=True)
        image, mask = f"edits/{name}.png", f"edits/{name}_mask.png"
        edits += [{"prompt": edit.format(name), "image": image} for edit in EDITS]
        fills += [{"prompt": fill.format(name), "image": image, "mask": mask} for fill in FILLS]
    for file, rows in (("edits", edits), ("fills", fills)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (HERE / f"{file}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
