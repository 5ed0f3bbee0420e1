"""`flowalign compare`: its runs, reused runs, errors, and output."""

import base64
import io
import json
import math
import os
import re
import signal
import subprocess
import time
from functools import cache
from pathlib import Path

import pytest
import yaml
from PIL import Image

from flowalign.cli import main as cli
from flowalign.runs import train_session
from flowalign.runs.config import load
from flowalign.studies import compare as comparing
from flowalign.studies import comparison_page
from flowalign.studies.compare import ComparisonRequest, compare, curve, held_out
from flowalign.studies.comparison import AXES, Comparison
from flowalign.studies.comparison_chart import spent_by_all
from flowalign.utils.errors import TrainingFailure
from tests.fixtures.commands import exit_code
from tests.fixtures.pages import addresses, charts
from tests.fixtures.pixel import Redness
from tests.fixtures.run_files import write_pixels
from tests.fixtures.zygote import python

pytestmark = pytest.mark.slow

P, S = 2, 3
"""Prompts and samples a step."""
WEIGHT = {"redness": 1.0}


@pytest.fixture(autouse=True)
def _drawing_only_where_it_matters(request, monkeypatch):
    """Drawing takes a second; tests of the figure request `drawn`."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(comparison_page, "picture", lambda *_: b"png")
        monkeypatch.setattr(train_session, "write_report", lambda *_, **__: None)


@pytest.fixture
def drawn():
    """Draw the figure."""


@pytest.fixture
def write(tmp_path):
    """Writes a run file of two steps on pixels, evaluated after each of them."""
    for name in ("train", "seen", "unseen"):
        (tmp_path / f"{name}.txt").write_text(f"a\nbb{name}\n")

    def write(name: str, rate: float = 1e-2, **changes) -> str:
        held_out = {n: str(tmp_path / f"{n}.txt") for n in ("seen", "unseen")}
        own = {
            "num_steps": 2,
            "optimizer": {"learning_rate": rate},
            "evaluation": {"prompts": held_out, "num_prompts": 8, "num_steps": 2, "every": 1},
            "checkpoints": {"every": 1},
            "threads": 1,
        }
        grpo = {"prompts_per_step": P, "sampling": {"num_steps": 3, "samples_per_prompt": S}}
        file = tmp_path / f"{name}.yaml"
        return str(write_pixels(file, tmp_path / "train.txt", grpo, **own | changes))

    return write


@pytest.fixture
def here(monkeypatch):
    """Runs use this process instead of separate ones; return the commands that were run."""
    commands = []

    def run_all(jobs, at_once, log):
        failed = []
        for job in jobs:
            commands.append(job.command)
            with pytest.raises(SystemExit) as ended:
                cli.main(job.command[3:])
            failed += [job] if ended.value.code else []
        return failed

    monkeypatch.setattr(comparing, "run_all", run_all)
    return commands


@pytest.fixture
def nothing_runs(monkeypatch):
    """A test fails if anything would be run."""

    def run_all(jobs, *_):
        assert [job.name for job in jobs] == []
        return []

    monkeypatch.setattr(comparing, "run_all", run_all)


def request(*configs, out, seeds=(0, 1), **others) -> ComparisonRequest:
    """Each method is one run file, or several that are composed."""
    others = {"metric": "redness"} | others
    files = [[c] if isinstance(c, str) else c for c in configs]
    return ComparisonRequest(files, others.pop("overrides", []), list(seeds), Path(out), **others)


@cache
def resolved(config: str) -> str:
    """With seed 99 in the folder THERE."""
    return load(config, ["--seed", "99", "--output_dir", "THERE"])[1]


def fake_run(config: str, folder: Path, seed: int, values: dict[int, float], status="finished"):
    """A run directory with these values of the two splits' mean, by step."""
    folder.mkdir(parents=True)
    text = resolved(config).replace("seed: 99", f"seed: {seed}").replace("THERE", str(folder))
    (folder / "config.yaml").write_text(text)
    (folder / "summary.json").write_text(json.dumps({"status": status}))
    rows = [
        {
            "step": max(done - 1, 0),
            "seconds": 9.0 * done,
            "evaluated_after": float(done),
            "eval/seen/redness": value + 0.1,
            "eval/unseen/redness": value - 0.1,
            "eval/redness": 0.0,
            "eval/diversity": 1.0 - 0.1 * done,
            "cost/reward_calls": 6.0 * done,
            "cost/decodes": 6.0 * done,
            "cost/network_evaluations": 40.0 * done,
            "cost/seconds": (2.0 + seed) * done,
        }
        for done, value in values.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def finished(write, tmp_path):
    """Two methods of two finished seeds: `plain` reaches .5 and .7, `fast` .7 and .8."""
    configs = [write("plain"), write("fast", 3e-2)]
    ends = {("plain", 0): 0.5, ("plain", 1): 0.7, ("fast", 0): 0.7, ("fast", 1): 0.8}
    for (name, seed), end in ends.items():
        config = configs[name == "fast"]
        values = {0: 0.2, 1: 0.3 if name == "plain" else 0.6, 2: end}
        fake_run(config, tmp_path / "out" / name / f"seed{seed}", seed, values)
    return configs


def quiet(_: str) -> None:
    """Says nothing."""


def test_two_methods_and_two_seeds_are_run_compared_and_resumed(write, tmp_path, here):
    """Real training. One summary is deleted; only this run resumes, with the same result."""
    asked = request(write("plain"), write("fast", 3e-2), out=tmp_path / "out")
    first = compare(asked, quiet)
    folders = sorted(
        str(p.parent.relative_to(tmp_path / "out"))
        for p in (tmp_path / "out").glob("*/*/summary.json")
    )
    assert folders == ["fast/seed0", "fast/seed1", "plain/seed0", "plain/seed1"]
    assert len(here) == 4
    assert first.metric == "redness"
    for row in first.rows:
        assert [p.step for p in row.method.runs[0].points] == [0, 1, 2]
        assert row.costs["trajectories"] == 2 * P * S
        assert row.costs["reward_calls"] == 2 * P * S
        assert [p.costs["reward_calls"] for p in row.method.runs[1].points] == [0, P * S, 2 * P * S]
        begun = dict(row.method.runs[0].points[0].costs)
        assert 0 <= begun.pop("seconds") < 0.5
        assert set(begun.values()) == {0.0}
        assert row.costs["seconds"] > 0
    assert_costs_end_at_the_summary(tmp_path / "out" / "plain" / "seed1")
    (tmp_path / "out" / "fast" / "seed1" / "summary.json").unlink()
    here.clear()
    second = compare(asked, quiet)
    assert [(c[4:5], c[-1]) for c in here] == [(asked.configs[1], "--resume")]
    assert [row.final for row in second.rows] == [row.final for row in first.rows]
    here.clear()
    assert compare(asked, quiet) == second
    assert here == []


def assert_costs_end_at_the_summary(folder: Path) -> None:
    """Every row has the costs of a run up to there."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    for name in ("reward_calls", "decodes", "network_evaluations", "seconds"):
        costs = [row[f"cost/{name}"] for row in rows]
        assert costs == sorted(costs)
        assert costs[0] == pytest.approx(0, abs=0.5 if name == "seconds" else 0)
        assert costs[-1] == pytest.approx(summary[name], abs=5 if name == "seconds" else 0)
    assert rows[-1]["evaluated_after"] == 2


def test_finished_runs_are_only_drawn(finished, tmp_path, nothing_runs):
    said = []
    result = compare(request(*finished, out=tmp_path / "out"), said.append)
    assert [row.final.mean for row in result.rows] == [pytest.approx(0.6), pytest.approx(0.75)]
    assert len([line for line in said if line.startswith("kept")]) == 4
    written = {p.name for p in (tmp_path / "out").iterdir()} - {"plain", "fast"}
    assert written == {"compare.json", "compare.png", "compare.html"}


def test_the_page_needs_nothing_but_itself_and_shows_all_methods(
    finished, tmp_path, nothing_runs, drawn
):
    compare(request(*finished, out=tmp_path / "out"), quiet)
    page = (tmp_path / "out" / "compare.html").read_text()
    titles = ["Equal reward calls", "Equal network evaluations", "Equal seconds"]
    assert list(charts(page)) == titles
    assert addresses(page) == []
    assert re.findall("<script[^>]*>", page) == ["<script>"]
    assert "fast ends highest in held-out redness: 0.750 ± 0.071" in page
    assert "<b>0.750 ± 0.071</b>" in page
    assert "0.500 / 0.700" in page
    assert "supports no claim" not in page
    assert 1500 < Image.open(tmp_path / "out" / "compare.png").width < 3000


def test_the_page_shows_what_steps_earned_where_a_method_credits_steps(
    finished, tmp_path, nothing_runs
):
    """The last record of the lowest seed, of the methods that have one."""
    out = tmp_path / "out"
    compare(request(*finished, out=out), quiet)
    assert "Credit of each step" not in (out / "compare.html").read_text()
    folder = out / "fast" / "seed0" / "credit"
    folder.mkdir()
    for step, colour in ((0, "red"), (9, "blue")):
        content = {"step": step, "prompt": "a", "method": "Gain", "rule": "", "weights": {"x": 1.0}}
        content |= {"sigmas": [1.0, 0.0], "states": [1], "values": [[0.5]], "credit": [[0.5]]}
        content |= {"advantage": [[1.0]], "marked": None, "source_row": None}
        content |= {"image_states": [1], "num_images": 1}
        (folder / f"step-{step:06d}.json").write_text(json.dumps(content))
        Image.new("RGB", (20, 20), colour).save(folder / f"step-{step:06d}.png")
    comparison = compare(request(*finished, out=out), quiet)
    ((name, view),) = comparison_page.credit_views(out, comparison)
    assert name == "fast"
    assert view.record.step == 9
    address = view.tables[0].rows[0][-1].image
    picture = Image.open(io.BytesIO(base64.b64decode(address.split(",")[1])))
    assert picture.getpixel((5, 5)) == (0, 0, 255)
    assert "Credit of each step" in (out / "compare.html").read_text()


def test_the_page_tells_where_a_method_met_the_baseline(finished, tmp_path, nothing_runs):
    """.6 is the mean of `fast` after one step of two: half of every cost."""
    compare(request(*finished, out=tmp_path / "out"), quiet)
    page = (tmp_path / "out" / "compare.html").read_text()
    assert 'data-name="trajectories">6 (50%)<' in page
    compare(request(*finished[::-1], out=tmp_path / "out"), quiet)
    page = (tmp_path / "out" / "compare.html").read_text()
    assert page.count("not reached") == 4


def test_methods_that_end_alike_are_both_named(finished, tmp_path, nothing_runs):
    folder = tmp_path / "out" / "fast"
    for seed in (0, 1):
        source = tmp_path / "out" / "plain" / f"seed{seed}" / "metrics.jsonl"
        (folder / f"seed{seed}" / "metrics.jsonl").write_text(source.read_text())
    compare(request(*finished, out=tmp_path / "out"), quiet)
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "plain and fast end highest in held-out redness: 0.600 ± 0.141. At 12 reward" in page
    assert "plain and fast lead with 0.600" in page


@pytest.fixture
def family(write, tmp_path):
    """A method of each family on the same prompts: policy gradients, matching, and pairs."""

    def matching(name, data, **settings):
        data = {"prompts": str(tmp_path / "train.txt"), "prompts_per_step": P} | data
        kind = f"flowalign.training.matching.{'ScoredGroups' if 'sampling' in data else 'Rollouts'}"
        recipe = {"data": {"class_path": kind, "init_args": data}, "micro_batch": P * S}
        recipe = {"class_path": "flowalign.training.Matching", "init_args": recipe | settings}
        return write(name, recipe=recipe)

    groups = {"sampling": {"num_steps": 3, "samples_per_prompt": S}}
    return [
        write("grpo"),
        matching(
            "nft",
            groups,
            loss={"class_path": "flowalign.losses.NFT"},
            old={"decay": 0.5},
            times={"class_path": "flowalign.training.matching.Uniform"},
            times_per_sample=2,
        ),
        matching("dpo", {"samples_per_prompt": S, "num_steps": 3}),
    ]


def test_families_are_compared_at_what_the_cheapest_run_spent(family, tmp_path, here, capsys):
    """Real training, two steps each, with P S = 6 samples of 3 evaluations per step.

    GRPO evaluates the 2 stochastic transitions of each once more; NFT both networks at 2 levels;
    DPO both networks on both images of P pairs. The report says that pairs are fewer than
    trajectories.
    """
    argv = ["--seeds", "0", "1", "--out", str(tmp_path / "out"), "--metric", "redness"]
    assert exit_code("compare", *family, *argv) == 0
    content = json.loads((tmp_path / "out" / "compare.json").read_text())
    costs = [row["costs"] for row in content["rows"]]
    assert [c["reward_calls"] for c in costs] == [2 * P * S] * 3
    spent = [2 * P * (S * 3 + S * 2), 2 * P * (S * 3 + S * 2 * 2), 2 * P * (S * 3 + 2 * 2)]
    assert [c["network_evaluations"] for c in costs] == spent
    assert [c["trajectories"] for c in costs] == [2 * P * S, 2 * P * S, 2 * P]
    budgets = content["budgets"]
    assert budgets["network_evaluations"] == min(spent)
    assert budgets["reward_calls"] == 2 * P * S
    assert 0 < budgets["seconds"] <= min(c["seconds"] for c in costs)
    printed = capsys.readouterr()
    printed = printed.out + printed.err
    for what in ("after training", "12 reward calls", f"{min(spent)} network", "seconds"):
        assert what in printed
    page = (tmp_path / "out" / "compare.html").read_text()
    for axis in ("reward calls", "network evaluations", "seconds"):
        assert page.count(f'<th class="n">{axis}</th>') == 2, "costs, and to reach the baseline"
    assert "for preference methods they are pairs" in page
    smallest = content["smallest"]
    assert all(smallest[axis] > 0 for axis in ("reward_calls", "network_evaluations", "seconds"))
    assert printed.count("smallest detectable difference") == 4


def test_one_seed_is_allowed_and_said_to_support_no_claim(finished, tmp_path, nothing_runs):
    compare(request(*finished, out=tmp_path / "out", seeds=[1]), quiet)
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "supports no claim about which one is better" in page


def test_the_metric_is_the_mean_over_splits_not_over_pictures():
    row = {"eval/a/x": 0.2, "eval/b/x": 0.6, "eval/x": 0.3, "eval/a/colour": 1.0}
    assert held_out(row, "x") == pytest.approx(0.4)
    assert held_out({"eval/a/x": 0.2, "eval/x": 0.3}, "x") == 0.2
    assert held_out({"eval/diversity": 1.5}, "diversity") == 1.5
    assert math.isnan(held_out({"eval/a/x": None}, "x"))
    assert math.isnan(held_out({}, "x"))


def test_a_repeated_evaluation_counts_once_and_a_null_not_at_all(finished, tmp_path, nothing_runs):
    folder = tmp_path / "out" / "plain" / "seed0"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[2]) | {"eval/seen/redness": 0.9, "eval/unseen/redness": 0.7}
    null = json.loads(lines[1]) | {"eval/seen/redness": None}
    content = [lines[0], json.dumps(null), lines[2], json.dumps(last)]
    (folder / "metrics.jsonl").write_text("\n".join(content) + "\n")
    result = compare(request(*finished, out=tmp_path / "out"), quiet)
    points = result.rows[0].method.runs[0].points
    assert [(p.step, p.value) for p in points] == [(0, 0.2), (2, pytest.approx(0.8))]
    assert [p.costs["trajectories"] for p in points] == [0, 2 * P * S]


@pytest.fixture
def single(finished, tmp_path):
    """Seed 1 of `fast`."""
    _, fast = comparing.read(request(*finished, out=tmp_path / "out"))
    return comparing.Single(fast, 1, tmp_path / "out" / "fast" / "seed1", "keep")


def test_a_curve_holds_the_distance_that_its_evaluations_measured(single):
    folder = single.folder
    assert comparing.distance_of([single.entry]) == "pixel_distance"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for i, line in enumerate(lines):
        line["eval/pixel_distance"] = 0.1 * i
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    far = [p.costs["distance"] for p in curve(single, "redness", "pixel_distance").points]
    assert far == sorted(far)
    assert far[-1] > 0
    assert "distance" not in curve(single, "redness").points[0].costs


def test_a_curve_holds_the_seconds_and_gpu_hours_of_its_own_seed(single):
    """Seconds of seed 1 are 3 a step, of seed 0 they are 2."""
    assert [p.costs["seconds"] for p in curve(single, "redness").points] == [0, 3, 6]
    assert {p.costs["gpu_hours"] for p in curve(single, "redness").points} == {0}
    (single.folder / "summary.json").write_text(json.dumps({"status": "finished", "gpus": 4}))
    assert curve(single, "redness").points[2].costs["gpu_hours"] == 4 * 6 / 3600


def test_other_settings_are_refused_with_the_difference_and_a_way_out(
    finished, tmp_path, nothing_runs
):
    overrides = ["--optimizer.learning_rate", "0.5"]
    with pytest.raises(ValueError, match=r"plain/seed0 holds a run with other settings") as caught:
        compare(request(*finished, out=tmp_path / "out", overrides=overrides), quiet)
    lines = str(caught.value).splitlines()
    assert lines[1:] == [
        "optimizer.learning_rate: 0.01 -> 0.5",
        "choose another --out, or delete that folder",
    ]


def test_a_setting_that_another_version_did_not_know_is_named(finished, tmp_path, nothing_runs):
    config = tmp_path / "out" / "plain" / "seed0" / "config.yaml"
    text = config.read_text()
    assert "      seeds_per_prompt: null\n" in text
    config.write_text(text.replace("      seeds_per_prompt: null\n", ""))
    with pytest.raises(ValueError, match="seeds_per_prompt: unknown -> null"):
        compare(request(*finished, out=tmp_path / "out"), quiet)


def test_a_folder_of_something_else_is_refused(write, tmp_path, nothing_runs):
    folder = tmp_path / "out" / "plain" / "seed0"
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="holds no run"):
        compare(request(write("plain"), out=tmp_path / "out"), quiet)


@pytest.mark.parametrize(("saved", "option"), [(None, "--overwrite"), ("step-000001", "--resume")])
def test_an_interrupted_run_goes_on_from_a_checkpoint_or_starts_anew(
    write, tmp_path, monkeypatch, saved, option
):
    config, asked = write("plain"), []
    folder = tmp_path / "out" / "plain" / "seed4"
    fake_run(config, folder, 4, {0: 0.1}, status="interrupted")
    if saved:
        (folder / "checkpoints" / saved).mkdir(parents=True)
    monkeypatch.setattr(comparing, "run_all", lambda jobs, *_: asked.extend(jobs) or [])
    compare(request(config, out=tmp_path / "out", seeds=[4], overrides=["num_steps=2"]), quiet)
    command = f"-m flowalign train {config} num_steps=2 --seed 4 --output_dir {folder} {option}"
    assert asked[0].command[1:] == command.split()
    assert asked[0].log == tmp_path / "out" / "plain" / "seed4.log"


def test_what_cannot_be_used_is_told_before_anything_starts(write, tmp_path, nothing_runs):
    good = write("good")
    (tmp_path / "other").mkdir()
    twin = Path(good).rename(tmp_path / "other" / "good.yaml")
    good = write("good")
    evaluation = yaml.safe_load(Path(good).read_text())["evaluation"]
    five = write("d", evaluation=evaluation | {"num_steps": 5})
    measured = "all runs measure: redness, green, diversity"
    for message, others, options in (
        ("two run files named good", [str(twin)], {}),
        ("two seeds 1", [], {"seeds": [1, 0, 1]}),
        ("did you mean num_steps", [write("b", nun_steps=3)], {}),
        ("evaluation is null", [write("c", evaluation=None)], {}),
        ("evaluation.num_steps is 5", [five], {}),
        ("seed cannot be set here; use --seeds", [], {"overrides": ["--seed", "3"]}),
        ("output_dir cannot be set here; use --out", [], {"overrides": ["output_dir=x"]}),
        (f"--metric is beauty; {measured}", [], {"metric": "beauty"}),
        (f"no --metric was given; {measured}", [], {"metric": None}),
        ("--jobs is 0", [], {"jobs": 0}),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            compare(request(good, *others, out=tmp_path / "o", **options), quiet)
        assert len(str(caught.value).splitlines()) <= 5
    assert not (tmp_path / "o").exists()


def test_strict_is_compared_unless_told_otherwise(tmp_path):
    (entry,) = comparing.read(request("configs/shapes.yaml", out=tmp_path))
    assert comparing.metric_of(None, [entry]) == "exact_match"
    assert comparing.metric_of("colour", [entry]) == "colour"
    assert comparing.metric_of("diversity", [entry]) == "diversity"


@pytest.mark.parametrize(
    ("cores", "changes", "expected"),
    [
        (8, [{"threads": 2}, {"threads": 3}], 2),
        (2, [{"threads": 4}], 1),
        (8, [{}], 8),
        (8, [{}, {"device": "auto"}], 1),
        (8, [{"threads": None}], 1),
    ],
)
def test_as_many_runs_at_once_as_cores_hold(write, tmp_path, monkeypatch, cores, changes, expected):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    configs = [write(f"run{i}", **change) for i, change in enumerate(changes)]
    assert comparing.at_once(comparing.read(request(*configs, out=tmp_path))) == expected


def test_the_command_line_hands_over_files_seeds_and_overrides(
    finished, tmp_path, nothing_runs, monkeypatch
):
    asked = []
    monkeypatch.setattr(comparing, "compare", lambda r, s: asked.append(r) or compare(r, s))
    samples = "--recipe.sampling.samples_per_prompt 3"
    options = f"--seeds 0 1 --out {tmp_path / 'out'} --metric redness --jobs 1 --num_steps=2"
    words = f"num_steps=2 {samples} {options}".split()
    assert exit_code("compare", *finished, *words) == 0
    overrides = f"num_steps=2 {samples} --num_steps=2".split()
    files = [[config] for config in finished]
    assert asked == [ComparisonRequest(files, overrides, [0, 1], tmp_path / "out", 1, "redness")]


def test_methods_are_composed_of_their_files_and_named_after_the_last(write, tmp_path, monkeypatch):
    """The files of `--base` come first, those that + joins in their order."""
    base, fast, out = write("base"), tmp_path / "fast.yaml", tmp_path / "out"
    fast.write_text("optimizer: {learning_rate: 0.03}")
    (tmp_path / "small.yaml").write_text("recipe: {prompts_per_step: 1}")
    small, asked = f"{tmp_path / 'small.yaml'}+{fast}", []
    monkeypatch.setattr(comparing, "run_all", lambda jobs, *_: asked.extend(jobs) or jobs)
    monkeypatch.setattr(comparing, "compare", lambda r, s: asked.append(r) or compare(r, s))
    argv = ["--base", base, "--seeds", "0", "--out", str(out), "--metric", "redness"]
    assert exit_code("compare", f"{tmp_path / 'small.yaml'}", small, *argv) == 1, "no job was run"
    request, *jobs = asked
    alone, both = [base, str(tmp_path / "small.yaml")], [base, *small.split("+")]
    assert request.configs == [alone, both]
    assert [job.command[4:-4] for job in jobs] == [alone, both]
    assert [job.name for job in jobs] == ["small seed 0", "fast seed 0"]
    first, second = (entry.run for entry in comparing.read(request))
    assert (first.recipe.prompts_per_step, second.recipe.prompts_per_step) == (1, 1)
    assert (first.optimizer.learning_rate, second.optimizer.learning_rate) == (0.01, 0.03)


def test_a_failed_run_leaves_the_others_and_is_named_with_its_log(write, tmp_path, here, capsys):
    """And once nothing is left to compare, that alone is told."""
    bad = write("bad", rewards=[{"class_path": "tests.runs.test_compare.Broken", "weight": WEIGHT}])
    out = tmp_path / "out"
    configs = [write("plain"), bad]
    argv = ["--seeds", "0", "1", "--out", str(out), "--metric", "redness"]
    assert exit_code("compare", *configs, *argv) == 1
    lines = capsys.readouterr().err[-2000:].split("flowalign: 2 of 4")[1].splitlines()
    assert len(lines) <= 5
    assert f"bad seed 1: {out / 'bad' / 'seed1.log'}" in lines
    assert json.loads((out / "compare.json").read_text())["missing"] == ["bad seed 0", "bad seed 1"]
    assert "Missing, because they failed: bad seed 0" in (out / "compare.html").read_text()
    with pytest.raises(TrainingFailure, match="2 of 2 runs failed"):
        compare(request(bad, out=out), quiet)


class Broken(Redness):
    """A reward that cannot be asked."""

    def score(self, batch):
        raise OSError("the reward server is gone")


STOPPED = "TEST_COMPARE_STOPPED"
"""Variable that makes runs wait for a signal in their seventh reward call."""


class Waiting(Redness):
    """A reward that waits for a signal, which so finds every run unfinished."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.signals, told = os.pipe()
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told)  # rewards are made in the main thread, and score in another

    def score(self, batch):
        self.calls += 1
        if self.calls == 7 and STOPPED in os.environ:
            os.read(self.signals, 1)
        return super().score(batch)


def _start(*argv: str) -> subprocess.Popen:
    return subprocess.Popen(
        [python(), "-m", "flowalign", "compare", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_ctrl_c_saves_all_runs_and_the_same_command_finishes_them(write, tmp_path, monkeypatch):
    """Real processes: two in parallel, stopped and resumed, together with a failing run."""
    monkeypatch.setenv(STOPPED, "1")
    bad = write("bad", rewards=[{"class_path": "tests.runs.test_compare.Broken", "weight": WEIGHT}])
    waits = {"rewards": [{"class_path": "tests.runs.test_compare.Waiting", "weight": WEIGHT}]}
    out = tmp_path / "out"
    options = {"--seeds": 0, "--out": out, "--jobs": 2, "--metric": "redness", "--num_steps": 12}
    options |= {"--evaluation.every": 6, "--checkpoints.every": 1000}
    argv = [write("plain", **waits), write("fast", 3e-2, **waits)]
    argv += [str(word) for option in options.items() for word in option]
    process = _start(*argv)
    files = [out / name / "seed0" / "metrics.jsonl" for name in ("plain", "fast")]
    while not all(file.exists() and len(file.read_text().splitlines()) > 2 for file in files):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 130, output
    assert "to continue repeat the command" in output
    for file in files:
        assert json.loads((file.parent / "summary.json").read_text())["status"] == "interrupted"
    monkeypatch.delenv(STOPPED)
    process = _start(*argv[:2], bad, *argv[2:])
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 1, output
    assert "1 of 3 runs failed" in output
    assert "the reward server is gone" in (out / "bad" / "seed0.log").read_text()
    rows = json.loads((out / "compare.json").read_text())["rows"]
    assert [row["method"]["runs"][0]["points"][-1]["step"] for row in rows] == [12, 12]
    assert "resumed" in (out / "plain" / "seed0.log").read_text()


def test_costs_that_a_run_never_had_are_not_compared():
    spent = {"network_evaluations": 128.0, "seconds": 1.5, "trajectories": 64.0}
    budgets = dict.fromkeys(AXES, 0.0) | spent
    comparison = Comparison("exact_match", budgets, (), 0, math.nan, {})
    assert spent_by_all(comparison, AXES) == ["network_evaluations", "seconds", "trajectories"]
    nothing = Comparison("exact_match", dict.fromkeys(budgets, 0.0), (), 0, math.nan, {})
    assert spent_by_all(nothing, AXES) == list(AXES)
