"""The page about a run: its content, and that missing data only removes its own part."""

import base64
import io
import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from flowalign.reports import run_report as report
from flowalign.reports.panels import describe_run, explain_loading
from flowalign.reports.run_report import write_report
from flowalign.reports.samples import cut_grid, find_strips
from flowalign.training.held_out_evaluation import EvaluationResult, save_grid
from flowalign.training.policy_gradient.credit_record import _small
from flowalign.types import plain_requests
from tests.fixtures.fake_run import PROMPTS, SUMMARY, fake_run, grid, rows, write_rows
from tests.fixtures.pages import addresses, captions

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path):
    return fake_run(tmp_path / "shapes-grpo")


def page_of(folder):
    return write_report(folder).read_text()


def headings(page):
    return re.findall(r"<h2>(.*?)</h2>|<summary>(.*?)</summary>", page)


def test_the_parts_come_in_order_and_the_charts_too(folder):
    page = page_of(folder)
    parts = ["".join(pair) for pair in headings(page)]
    assert parts == [
        "Curves",
        "Samples",
        "Samples over training",
        "Checks at the start",
        "Held-out values",
        "Configuration",
    ]
    assert captions(page) == [
        "Training reward",
        "Held-out exact_match",
        "Held-out colour",
        "Held-out diversity",
        "Ratio of new to old policy",
        "Clipped transitions",
        "KL to the reference",
        "Gradient norm",
        "Zero-variance groups",
        "Time of a step",
    ]
    assert (
        page.index("Held-out exact_match went") < page.index('class="tiles"') < page.index("Curves")
    )


def test_the_page_shows_no_secrets(folder):
    with (folder / "config.yaml").open("a") as config:
        config.write("notify:\n- curl\n- https://hooks.example/SECRET\nnote: x://me:SECRET@host\n")
    page = page_of(folder)
    assert "SECRET" not in page
    assert "note: x://***@host" in page


def test_the_page_needs_nothing_but_itself(folder):
    page = page_of(folder)
    assert page.count('src="data:image/png') == 2 * len(PROMPTS) + 4 * 3  # and four strips
    assert re.findall("<script[^>]*>", page) == ["<script>"]
    assert addresses(page) == []


def test_the_verdict_names_the_stricter_quantity_before_and_after(folder):
    page = page_of(folder)
    expected = "Held-out exact_match went from 0.312 to 0.688 (+0.375) over 40 steps."
    assert expected in page


def test_the_tiles_show_the_figures_of_the_summary(folder):
    tiles = re.findall(r'<div class="tile"><b>(.*?)</b><span>(.*?)</span>', page_of(folder))
    assert tiles == [
        ("0.312", "exact_match before"),
        ("0.688", "exact_match after"),
        ("+0.375", "change"),
        ("12:34", "time (min:s)"),
        ("40", "steps"),
        ("1.23 M", "network evaluations"),
        ("5,120", "reward calls"),
        ("7", "seed"),
    ]


def test_a_grid_is_cut_into_exactly_its_pictures():
    """Five images of 3 x 4 pixels in rows of three, each of one colour."""
    sheet = Image.new("RGB", (3 * 5 + 2, 2 * 6 + 2), "white")
    for i in range(5):
        sheet.paste((50 * i, 7, 9), (2 + i % 3 * 5, 2 + i // 3 * 6, 5 + i % 3 * 5, 6 + i // 3 * 6))
    pictures = cut_grid(sheet, 5, 3)
    assert [picture.size for picture in pictures] == [(3, 4)] * 5
    assert [picture.getcolors() for picture in pictures] == [
        [(12, (50 * i, 7, 9))] for i in range(5)
    ]


def test_fewer_pictures_than_columns_make_one_row():
    sheet = Image.new("RGB", (2 * 6 + 2, 6 + 2))
    assert [picture.size for picture in cut_grid(sheet, 2, 8)] == [(4, 4)] * 2


def test_a_card_shows_its_prompt_with_the_first_and_the_last_picture(folder):
    page = page_of(folder)
    cards = re.findall(r'<div class="card">(.*?)<p>(.*?)</p>', page, re.DOTALL)
    assert [prompt for _, prompt in cards] == PROMPTS
    for i, seed in enumerate((0, 40)):
        shown = re.findall(r"base64,([^\"]*)", cards[5][0])[i]
        picture = Image.open(io.BytesIO(base64.b64decode(shown)))
        expected = cut_grid(grid(seed), len(PROMPTS), 4)[5]
        assert np.array_equal(np.asarray(picture), np.asarray(expected))
    assert re.findall(r">step (\d+)</div>", cards[5][0]) == ["0", "40"]
    assert 'class="cards pixelated"' in page


def test_the_first_prompts_are_shown_over_training(folder):
    strips = find_strips(folder / "samples")
    assert [strip.prompt for strip in strips] == PROMPTS[:4]
    assert [step for step, _ in strips[3].pictures] == [0, 20, 40]
    expected = cut_grid(grid(20), len(PROMPTS), 4)[3]
    picture = opened(strips[3].pictures[1][1])
    assert np.array_equal(np.asarray(picture), np.asarray(expected))
    moving = opened(strips[3].animation)
    assert (moving.n_frames, moving.info["loop"]) == (3, 0)
    moving.seek(1)
    assert np.array_equal(np.asarray(moving.convert("RGB")), np.asarray(expected))


def opened(address):
    """The image of a data URL."""
    return Image.open(io.BytesIO(base64.b64decode(address.partition("base64,")[2])))


def test_large_pictures_are_reduced_and_drawn_smoothly(folder):
    for step in (0, 20, 40):
        grid(step, side=512).save(folder / "samples" / f"step-{step:06}.png")
    page = page_of(folder)
    shown = re.findall(r"image/jpeg;base64,([^\"]*)", page)
    assert Image.open(io.BytesIO(base64.b64decode(shown[0]))).size == (320, 320)
    assert 'class="cards"' in page


def clips(seed):
    """Nine frames of 32 x 32 of each prompt, in which its image moves to the right."""
    pictures = cut_grid(grid(seed), len(PROMPTS), 4)
    frames = torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures]))
    still = frames.permute(0, 3, 1, 2) / 255
    return torch.stack([still.roll(2 * i, -1) for i in range(9)], 1)


@pytest.fixture
def moving(tmp_path):
    """The run of a video model."""
    folder = fake_run(tmp_path / "video")
    shutil.rmtree(folder / "samples")
    for step in (0, 40):
        save_grid(folder, step, EvaluationResult({}, clips(step), plain_requests(PROMPTS), 8.0))
    return folder


def decoded(address):
    return Image.open(io.BytesIO(base64.b64decode(address)))


def test_a_card_of_a_video_model_moves_and_shows_a_strip_of_both_steps(moving):
    page = page_of(moving)
    cards = re.findall(r'<div class="card">(.*?)<p>(.*?)</p>', page, re.DOTALL)
    assert [prompt for _, prompt in cards] == PROMPTS
    assert re.findall(r">step (\d+)<", cards[3][0]) == ["0", "40"] * 2
    for i, step in enumerate((0, 40)):
        clip = (clips(step)[3] * 255).round().byte().permute(0, 2, 3, 1).numpy()
        loop = decoded(re.findall(r"image/webp;base64,([^\"]*)", cards[3][0])[i])
        frames = [np.asarray(f.convert("RGB")) for f in ImageSequence.all_frames(loop)]
        assert np.array_equal(np.stack(frames), clip)
        assert sum(f.info["duration"] for f in ImageSequence.all_frames(loop)) == 1125
        strip = decoded(re.findall(r"image/png;base64,([^\"]*)", cards[3][0])[i])
        assert strip.size == (6 * 34 - 2, 32)
        assert np.array_equal(np.asarray(strip)[:, -32:], clip[-1])
    assert 'class="cards clips pixelated"' in page
    assert "at 8 frames per second" in page


def test_a_loop_that_is_missing_costs_only_itself(moving):
    (moving / "samples" / "step-000000" / "003.webp").unlink()
    cards = re.findall(r'<div class="card">(.*?)<p>', page_of(moving), re.DOTALL)
    assert re.findall(r">step (\d+)<", cards[3]) == ["40", "0", "40"]


def test_a_clip_among_credit_is_four_of_its_frames_and_a_picture_is_itself():
    clip = torch.arange(9.0).view(9, 1, 1, 1).expand(9, 3, 4, 6) / 10
    picture = _small(clip)
    assert picture.shape == (3, 2 * (4 + 2) + 2, 2 * (6 + 2) + 2)
    corners = [picture[0, y, x] for y in (4, 10) for x in (4, 12)]
    assert corners == [clip[k, 0, 0, 0] for k in (0, 3, 5, 8)]
    assert (_small(clip[3:4]) == clip[3, 0, 0, 0]).all()
    assert _small(torch.zeros(1, 3, 200, 320)).shape == (3, 100, 160)


def test_checks_are_sorted_by_denoising_step_and_show_the_last_value(folder):
    cells = re.findall(r"<tr><td>(.*?)</td><td class=\"n\">(.*?)</td><td>", page_of(folder))
    assert [value for _, value in cells] == ["1", "0", "3e-07", "4e-07", "1.1e-06"]
    assert cells[2][0].endswith("denoising step 2")
    assert cells[4][0].endswith("denoising step 10")


def test_the_table_holds_every_dimension_even_if_measured_once(folder):
    (folder / "summary.json").write_text(
        json.dumps({"before": {"x": 0.25, "y": 0.5}, "after": {"x": 0.125, "y": None}})
    )
    write_rows(folder, rows(1))
    cells = re.findall(r"<tr>" + 4 * r"<td[^>]*>(.*?)</td>" + "</tr>\n", page_of(folder))
    assert ("x", "0.250", "0.125", "-0.125") in cells
    assert ("y", "0.500", "-", "-") in cells
    assert ("seen/exact_match", "0.300", "-", "-") in cells


def test_prompts_and_configuration_are_escaped(folder):
    index = {"prompts": ["<script>alert(1)</script>", *PROMPTS[1:]], "steps": [0, 40], "columns": 4}
    (folder / "samples" / "index.json").write_text(json.dumps(index))
    page = page_of(folder)
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "a &lt; b &amp; c" in page


def test_an_empty_folder_gives_a_page_that_says_so(tmp_path):
    page = page_of(tmp_path)
    assert "Too few steps" in page
    assert headings(page) == []


@pytest.mark.parametrize(
    ("missing", "heading"),
    [
        ("config.yaml", "Configuration"),
        ("samples/index.json", "Samples"),
        ("metrics.jsonl", "Curves"),
    ],
)
def test_a_missing_file_leaves_out_only_its_part(folder, missing, heading):
    complete = {"".join(pair) for pair in headings(page_of(folder))}
    (folder / missing).unlink()
    others = {"metrics.jsonl": "Checks at the start", "samples/index.json": "Samples over training"}
    gone = {heading, others.get(missing, heading)}
    assert {"".join(pair) for pair in headings(page_of(folder))} == complete - gone


def test_without_a_summary_the_evaluations_tell_before_and_after(folder):
    (folder / "summary.json").unlink()
    page = page_of(folder)
    assert (
        "Held-out exact_match went from 0.285 to 0.603 (+0.318) over 40 steps; the run is in"
        in page
    )
    assert "seed" not in re.sub(r'src="data:[^"]*"', "", page)


def test_an_interrupted_run_says_so(folder):
    (folder / "summary.json").write_text(
        json.dumps(SUMMARY | {"status": "interrupted", "steps": 17})
    )
    page = page_of(folder)
    assert "over 17 steps; the run was interrupted." in page
    assert '<span class="status">interrupted</span>' in page


def test_without_an_evaluation_the_verdict_is_about_training(folder):
    """The tenth of 20 steps is 2: rewards 0, 1, ... 19 start at 0.5 and stop at 18.5."""
    (folder / "summary.json").unlink()
    write_rows(folder, [{"step": k, "seconds": 0.0, "reward_mean": float(k)} for k in range(20)])
    page = page_of(folder)
    assert "Training reward went from 0.500 to 18.500 (means of the first and last 2 steps)" in page
    assert captions(page) == ["Training reward"]
    assert "<h2>Held-out values" not in page


def test_what_was_measured_at_most_twice_is_told_in_words(folder):
    """Two steps, both evaluated: nothing is a curve."""
    made = [
        {"step": 0, "seconds": 0.0, "reward_mean": 0.25, "kl": 0.0, "eval/exact_match": 0.5},
        {"step": 1, "seconds": 1.0, "reward_mean": 0.75, "kl": 0.0, "eval/exact_match": 0.625},
    ]
    write_rows(folder, made)
    page = page_of(folder)
    assert captions(page) == []
    told = re.findall("<li><b>(.*?)</b> .*?: (.*?)</li>", page)
    assert told == [
        ("Training reward", "0.25 → 0.75 (steps 1 and 2)"),
        ("Held-out exact_match", "0.5 → 0.625 (steps 1 and 2)"),
        ("KL to the reference", "0 (steps 1 and 2)"),
    ]


def test_what_never_changes_is_told_in_words_and_what_does_is_drawn(folder):
    made = [{"step": k, "seconds": 0.0, "reward_mean": float(k), "kl": 0.5} for k in range(20)]
    write_rows(folder, made)
    page = page_of(folder)
    assert captions(page) == ["Training reward"]
    assert "<b>KL to the reference</b> (KL): 0.5 (all 20 steps)" in page


def test_an_evaluation_stands_at_the_steps_that_it_came_after():
    made = [{"step": 0, "eval/x": 0.25, "evaluated_after": 0}, {"step": 39, "eval/x": 0.5}]
    made[1] |= {"evaluated_after": 40.0, "kl": 1.0}
    assert report.collect(made) == {"eval/x": {0: 0.25, 40: 0.5}, "kl": {40: 1.0}}


def test_nulls_are_gaps_and_a_metric_without_any_number_has_no_chart(folder):
    made = rows()
    for row in made:
        row["kl"] = None
        row["optim/grad_norm"] = None if row["step"] % 3 else 0.5 + row["step"]
        row["reward/colour"] = row["timing/sample"] = None if row["step"] < 30 else 0.5
    made[7] = dict.fromkeys(made[7]) | {"step": 7, "seconds": 0.0}
    write_rows(folder, made)
    shown = captions(page_of(folder))
    assert "KL to the reference" not in shown
    assert {"Gradient norm", "Training reward", "Time of a step"} <= set(shown)
    finite = report.collect(made)["optim/grad_norm"]
    assert [step for step, value in finite.items() if not math.isnan(value)] == list(
        range(1, 41, 3)
    )


@pytest.mark.parametrize(
    "broken", ["summary.json", "samples/index.json", "samples/step-000040.png"]
)
def test_a_file_cut_short_counts_as_missing(folder, broken):
    file = folder / broken
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    page = page_of(folder)
    assert "Held-out exact_match went" in page
    if broken.endswith("png"):
        assert set(re.findall(r">step (\d+)</div>", page)) == {"0", "20"}


def test_one_grid_is_shown_alone(folder):
    for step in (20, 40):
        (folder / "samples" / f"step-{step:06}.png").unlink()
    page = page_of(folder)
    assert "Images of step 0." in page
    assert page.count("data:image/png") == len(PROMPTS)


def test_a_second_report_replaces_the_first_and_leaves_nothing_else(folder):
    write_rows(folder, [{"step": k, "seconds": 0.0, "reward_mean": float(k)} for k in range(20)])
    before = {path.name for path in folder.iterdir()}
    first = page_of(folder)
    assert page_of(folder) == first
    assert {path.name for path in folder.iterdir()} == before | {"report.html"}


def test_the_page_of_a_running_run_reloads_itself(folder):
    refresh = '<meta http-equiv="refresh"'
    assert refresh in write_report(folder, running=True).read_text()
    assert refresh not in page_of(folder)


def test_the_headline_names_model_method_and_rewards_and_how_to_load(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "policy: {class_path: pipelines.SD3, init_args: {path: owner/model}}\n"
        "recipe:\n"
        "  class_path: flowalign.training.PolicyGradient\n"
        "  init_args: {credit: {class_path: flowalign.credit.Gain}}\n"
        "rewards: [{class_path: x.Y, weight: {ocr: 1.0, seen: 0.0}}]\n"
    )
    assert describe_run(tmp_path / "config.yaml") == (
        "model: SD3 (owner/model) · method: PolicyGradient + Gain · rewards: ocr"
    )
    assert explain_loading(tmp_path) == ""
    weights = tmp_path / "checkpoints/step-000010/ema"
    weights.mkdir(parents=True)
    assert explain_loading(tmp_path) == f"flowalign export {tmp_path}"
    (weights / "pytorch_lora_weights.safetensors").touch()
    assert explain_loading(tmp_path) == f'pipe.load_lora_weights("{weights}")'
    page = write_report(tmp_path).read_text()
    assert "model: SD3 (owner/model)" in page
    assert "pipe.load_lora_weights(" in page
