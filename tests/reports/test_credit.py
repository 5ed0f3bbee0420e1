"""What denoising steps have earned: recorded, drawn, and shown in the report."""

import base64
import io
import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from PIL import Image

from flowalign.credit import Branch, Gain, Granular, NextValue, Outcome, TurningPoint
from flowalign.data.requests import Requests
from flowalign.reports.credit_view import Scale, make_tables, read_credit
from flowalign.reports.run_report import write_report
from flowalign.sampling import Chain, Comb, Fixed, Tree
from flowalign.training.policy_gradient.credit_record import (
    CreditRecorder,
    branches,
    differs_from_outcome,
    images_of,
    record,
    weigh_rewards,
)
from flowalign.training.policy_gradient.policy_gradient_loop import PolicyGradientLoop
from flowalign.training.rollouts.collecting import completion_values, rollout
from flowalign.types import plain_requests
from flowalign.utils.tracking import CreditRecord
from tests.fixtures.credit_rollouts import (
    THREE,
    blind_rewards,
    moving_learner,
    setting,
    values_by_hand,
)
from tests.fixtures.credited import credited
from tests.fixtures.fake_run import fake_run
from tests.fixtures.small_run import go, new_run
from tests.fixtures.training import PROMPTS, flat, new_learner, new_recipe, new_rewards

pytestmark = pytest.mark.slow

HEADING = "<h2>Credit of each step</h2>"


def judged(cfg, learner, trajectory, rewards=None):
    seen = []
    values = completion_values(cfg.rollouts, learner, rewards or new_rewards(), trajectory)
    credited(cfg, learner, values, seen.append)
    return seen[0]


def sampled(credit, sampling, **recipe):
    """The values and credit of one rollout with this sampling."""
    cfg, learner = new_recipe(sampling, credit=credit, **recipe), moving_learner()
    return judged(cfg, learner, rollout(cfg.rollouts, learner, plain_requests(THREE), 0, 0))


def numbers(cells):
    return torch.tensor([[math.nan if n is None else n for n in row] for row in cells])


def close(cells, wanted):
    torch.testing.assert_close(numbers(cells), wanted, atol=1e-4, rtol=1e-3, equal_nan=True)


# The record ---------------------------------------------------------------------------------------


def test_the_record_of_gains_by_hand():
    cfg, learner, trajectory = setting(Gain())
    v = values_by_hand(learner.policy, trajectory)[:4]
    seen = judged(cfg, learner, trajectory)
    made = record(7, cfg.credit, seen)
    assert (made.step, made.prompt, made.method) == (7, "a", "Gain")
    assert made.rule.startswith("Each stochastic step earns its gain")
    assert made.weights == {"redness": 1.0}
    assert made.sigmas == [1.0, 0.8, 0.6, 0.4, 0.2, 0.0]
    assert made.states == [0, 1, 2, 3, 5]
    nothing = torch.full((4, 1), math.nan)
    close(made.values, v[:, made.states])
    close(made.credit, torch.cat([v[:, made.states].diff(dim=1), nothing], 1))
    close(made.advantage, torch.cat([seen.batch.advantage[:4, :4], nothing], 1))
    assert made.marked is None
    assert made.source_row is None
    assert made.trained == [0, 1, 2, 3]


def test_several_dimensions_are_weighted():
    cfg, learner, trajectory = setting(Gain())
    seen = judged(cfg, learner, trajectory, new_rewards(redness=2.0, green=-0.5))
    made = record(0, cfg.credit, seen)
    end = learner.policy.decode(trajectory.state(5, slice(4)))[:, 0, :, 0, 0]
    assert made.weights == {"redness": 2.0, "green": -0.5}
    close(
        [[row[-1]] for row in made.values], (2 * (end[:, 0] - end[:, 2]) - end[:, 1] / 2)[:, None]
    )


def test_only_a_dimension_that_counts_can_miss():
    value = torch.tensor([[1.0, math.nan], [math.nan, 2.0]])
    got = weigh_rewards(value, torch.tensor([3.0, 0.0]))
    assert got[0] == 3
    assert got[1].isnan()


def test_what_failed_is_null(tmp_path):
    cfg, learner, trajectory = setting(Gain(), on_failed_reward="drop_sample")
    rewards = blind_rewards(learner, trajectory, "drop_sample", (1, 2))
    seen = judged(cfg, learner, trajectory, rewards)
    pictures = CreditRecorder(tmp_path, cfg.credit, 1, 0)
    pictures(0, seen)
    pictures.draw()
    made = json.loads((tmp_path / "step-000000.json").read_text())
    assert [b for b in range(4) if made["values"][b][2] is None] == [1]
    for cells in (made["credit"], made["advantage"]):
        assert [[n is None for n in row] for row in cells] == [
            [False, b == 1, b == 1, False, True] for b in range(4)
        ]


def test_turning_points_are_marked():
    cfg, learner, trajectory = setting(TurningPoint(balance=False))
    seen = judged(cfg, learner, trajectory)
    made = record(0, cfg.credit, seen)
    assert made.marked == seen.credit.marked[:4].tolist()
    assert any(any(row) for row in made.marked)


def test_a_state_that_is_finished_in_several_ways_is_shown_once():
    made = record(0, Granular(), sampled(Granular(), {}, advantages={"scale": "given"}))
    assert made.states == [1, 2, 3, 4]


# Branches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "branching"),
    [
        ({"branching": Comb(children=2), "samples_per_prompt": 6}, True),
        ({"branching": Tree(children=2), "samples_per_prompt": 8}, True),
        ({"seeds_per_prompt": 1}, False),
        ({}, False),
    ],
)
def test_samples_branch_where_they_share_noise_or_add_it_at_other_steps(sampling, branching):
    cfg, learner = new_recipe(sampling), moving_learner()
    assert branches(rollout(cfg.rollouts, learner, plain_requests(THREE), 0, 0)) is branching


def test_a_comb_shows_every_outcome_and_who_shares_what():
    seen = sampled(Branch(), {"branching": Comb(children=2), "samples_per_prompt": 6})
    made, trajectory = record(0, Branch(), seen), seen.batch.trajectory
    assert made.source_row == trajectory.rows.source_row[:6].tolist()
    assert made.source_row[0] == [5, 0, 0, 0, 0]
    assert made.states == [4]
    trained = [[n is not None for n in row] for row in made.advantage]
    assert trained == [[k == b // 2 for k in range(4)] for b in range(6)]
    images = images_of(seen)
    assert list(images) == [4]
    end = seen.values.policy.decode(trajectory.state(4, slice(6)))[:, 0, :, 0, 0]
    assert torch.equal(images[4][:, :, 0, 0], end)


# The picture --------------------------------------------------------------------------------------


def test_pictures_are_of_the_first_samples_and_of_the_middle_frame():
    cfg, learner = new_recipe({"samples_per_prompt": 8}, credit=Gain()), moving_learner()
    still = learner.policy.decode
    learner.policy.decode = lambda x: torch.cat([0 * still(x), still(x), 0 * still(x)], 1)
    seen = judged(cfg, learner, rollout(cfg.rollouts, learner, plain_requests(THREE), 0, 0))
    images = images_of(seen)
    assert list(images) == [0, 1, 2, 4]
    assert [len(of_state) for of_state in images.values()] == [6] * 4
    colour = still(seen.batch.trajectory.state(4, slice(5, 6)))[0, 0, :, 0, 0]
    assert images[4][5].shape == (3, 1, 1)
    assert torch.equal(images[4][5][:, 0, 0], colour)


def test_large_pictures_are_reduced_and_keep_their_proportions():
    cfg, learner = new_recipe(credit=Gain()), moving_learner()
    still = learner.policy.decode
    learner.policy.decode = lambda x: still(x).expand(-1, -1, -1, 320, 640)
    seen = judged(cfg, learner, rollout(cfg.rollouts, learner, plain_requests(THREE), 0, 0))
    assert images_of(seen)[0][0].shape == (3, 80, 160)


@pytest.mark.parametrize(
    ("credit", "sampling", "recipe"),
    [
        (TurningPoint(), {}, {}),
        (NextValue(), {"samples_per_prompt": 1}, {"advantages": {"scale": "pooled"}}),
        (Branch(), {"branching": Tree(), "samples_per_prompt": 16, "seeds_per_prompt": 2}, {}),
    ],
    ids=["turning point", "one sample", "tree"],
)
def test_the_files_of_a_step_make_its_tables(tmp_path, credit, sampling, recipe):
    recorder = CreditRecorder(tmp_path / "credit", credit, 1, 0)
    seen = sampled(credit, sampling, **recipe)
    recorder(0, seen)
    assert recorder.draw() > 0
    assert sorted(file.name for file in (tmp_path / "credit").iterdir()) == [
        "step-000000.json",
        "step-000000.png",
    ]
    (view,) = read_credit(tmp_path / "credit")
    images = images_of(seen)
    shown = [cell for table in view.tables for row in table.rows for cell in row]
    assert sum(bool(cell.image) for cell in shown) == sum(map(len, images.values()))
    assert view.record.image_states == list(images)
    end = view.record.image_states[-1]
    last = next(cell for cell in view.tables[0].rows[0][::-1] if cell.image)
    pixel = Image.open(io.BytesIO(base64.b64decode(last.image.split(",")[1]))).getpixel((0, 0))
    assert pixel == tuple((images[end][0][:, 0, 0] * 255).round().byte().tolist())


def test_maps_of_positions_have_a_column_per_trained_step(tmp_path):
    """Blue is above 0 and orange below, strongest at the largest advantage."""
    seen = sampled(Outcome(), {"sde_window": Fixed(0, 2)})
    places = torch.zeros(12, 4, 1, 2, 2)
    places[0, 0, 0, 0, 1], places[0, 1, 0, 1, 0] = 2.0, -1.0
    seen = replace(seen, batch=seen.batch.with_samples(places=places))
    recorder = CreditRecorder(tmp_path, Outcome(), 1, 0)
    recorder(0, seen)
    recorder.draw()
    (view,) = read_credit(tmp_path)
    assert (view.record.place_steps, view.record.place_scale) == ([0, 1], 2.0)
    table = view.tables[-1]
    assert table.title == f"Advantage of latent positions: {len(table.rows)} samples"
    assert [name for name, _ in table.heads] == ["step 0", "step 1", "image and reward"]
    first, second, image = table.rows[0]
    assert pixels(first) == [WHITE, (0, 114, 178), WHITE, WHITE]
    assert pixels(second)[2] == (234, 174, 128)  # half of the strongest orange, over white
    assert image.text
    assert image.image


WHITE = (255, 255, 255)


def pixels(cell):
    """The colours of the four quarters of a map."""
    picture = Image.open(io.BytesIO(base64.b64decode(cell.image.split(",")[1]))).convert("RGB")
    far = picture.width - 1
    return [picture.getpixel(place) for place in ((0, 0), (far, 0), (0, far), (far, far))]


def some_record(**changes):
    content = {
        "step": 0,
        "prompt": "<b>a</b>",
        "method": "Gain",
        "rule": "",
        "weights": {"x": 2.0, "y": -1.0},
        "sigmas": [1.0, 0.75, 0.5, 0.0],
        "states": [0, 1, 3],
        "values": [[0.1, 0.2, 0.4], [0.1, None, 0.0]],
        "credit": [[0.1, 0.2, None], [None, None, None]],
        "advantage": [[1.0, -0.5, None], [-1.0, 0.0, None]],
        "marked": None,
        "source_row": None,
        "image_states": [0, 1, 3],
        "num_images": 2,
    }
    return CreditRecord(**content | changes)


def test_states_and_steps_stand_in_the_order_of_time():
    paths, advantages = make_tables(some_record(marked=[[False, True, False]] * 2), list("abcdef"))
    assert [name for name, _ in paths.heads] == [
        "state 0",
        "step 0",
        "state 1",
        "step 1",
        "finished",
    ]
    assert paths.heads[2][1] == "noise 75%"
    first, second = ([(c.text, c.image, c.is_marked) for c in row] for row in paths.rows)
    assert first == [
        ("0.100", "a", False),
        ("+0.10", "", False),
        ("0.200", "b", False),
        ("+0.20", "", True),
        ("0.400", "c", False),
    ]
    assert [text for text, _, _ in second] == ["0.100", "", "failed", "", "0.000"]
    texts = [[cell.text for cell in row] for row in advantages.rows]
    assert texts == [["+1.00", "-0.50", "0.400"], ["-1.00", "0.00", "0.000"]]


def test_samples_that_share_a_state_share_its_bar():
    source = [[0, 0, 0, 0], [0, 0, 0, 1], [2, 2, 2, 2]]
    record = some_record(
        source_row=source,
        values=[[0.5]] * 3,
        advantage=[[1.0, None, 0.5], [1.0, None, -0.5], [-1.0, None, None]],
        credit=[[None] * 3] * 3,
        states=[3],
        image_states=[3],
        num_images=3,
    )
    (table,) = make_tables(record, list("abc"))
    cells = [[(cell.text, cell.rows, cell.image) for cell in row] for row in table.rows]
    assert cells == [
        [("+1.00", 2, ""), ("+0.50", 1, ""), ("0.500", 1, "a")],
        [("-0.50", 1, ""), ("0.500", 1, "b")],
        [("-1.00", 1, ""), ("", 1, ""), ("0.500", 1, "c")],
    ]
    assert table.separated == [2]


def test_many_steps_and_samples_and_no_number_at_all_are_tables():
    many = some_record(
        sigmas=[1.0] * 19,
        states=list(range(19)),
        values=[[0.0] * 19] * 50,
        credit=[[None] * 18] * 50,
        advantage=[[0.0] * 18] * 50,
    )
    paths, advantages = make_tables(many)
    assert len(paths.rows) == 2
    assert sum(name.startswith("state") or name == "finished" for name, _ in paths.heads) == 10
    assert len(advantages.rows) == 48
    assert "the first 48 of 50 samples" in advantages.title
    assert {cell.text for row in advantages.rows for cell in row} == {"", "0.000"}
    nothing = replace(many, advantage=[[None] * 18] * 50)
    assert [len(table.heads) for table in make_tables(nothing)] == [10, 1]


def test_the_reward_is_a_formula():
    assert some_record().reward == "2 x - 1 y"


def test_colours_are_symmetric_around_zero_and_numbers_readable():
    scale = Scale([[0.5, None, -2.0]])
    assert scale.colour(2.0) == "#0072b2c8"
    assert scale.colour(-2.0) == "#d55e00c8"
    assert scale.colour(0.0)[-2:] == "00"
    assert scale.colour(0.5)[-2:] == scale.colour(-0.5)[-2:] == "32"
    assert [scale.label(n) for n in (None, 0.0, -0.001, 0.5)] == ["", "0.00", "0.00", "+0.50"]
    assert Scale([[0.0042]]).label(-0.0042) == "-0.0042"
    assert Scale([]).most == 1


# The run and its report ---------------------------------------------------------------------------


def test_due_are_the_first_step_the_last_and_those_before_an_evaluation(tmp_path):
    seen = sampled(Gain(), {})
    for every, wanted in ((0, [0, 4]), (2, [0, 1, 3, 4])):
        pictures, due = CreditRecorder(tmp_path, Gain(), 5, every), []
        for step in range(5):
            pictures.kept = None
            pictures(step, seen)
            due += [step] if pictures.kept else []
        assert due == wanted


def test_nothing_is_written_twice(tmp_path):
    pictures = CreditRecorder(tmp_path / "credit", Gain(), 3, 0)
    pictures(1, sampled(Gain(), {}))
    assert pictures.draw() == 0
    assert not (tmp_path / "credit").exists()


def test_credit_by_outcome_has_no_picture_unless_samples_branch():
    assert differs_from_outcome(Gain(), Chain())
    assert differs_from_outcome(Outcome(), Comb())
    assert not differs_from_outcome(Outcome(), Chain())


@pytest.mark.parametrize("credit", [Gain(), Outcome()], ids=lambda c: type(c).__name__)
def test_a_run_writes_its_pictures_and_the_report_shows_them(tmp_path, credit):
    go(new_run(tmp_path / "run", recipe=new_recipe(credit=credit), num_steps=2))
    page = (tmp_path / "run" / "report.html").read_text()
    if isinstance(credit, Outcome):
        assert not (tmp_path / "run" / "credit").exists()
        assert HEADING not in page
        return
    assert len(list((tmp_path / "run" / "credit").iterdir())) == 4
    assert HEADING in page
    assert "small image is the completion of a state" in page
    for step in (1, 2):
        assert f"Training step {step}, for the prompt: " in page


def test_who_watches_changes_nothing(tmp_path):
    weights = []
    for observer in (None, CreditRecorder(tmp_path, Gain(), 2, 0)):
        cfg, learner = new_recipe(credit=Gain()), new_learner()
        prompts = Requests(plain_requests(PROMPTS), 3)
        loop = PolicyGradientLoop(cfg, learner, new_rewards(), prompts, 0, observer)
        list(loop.run(range(2)))
        weights.append(flat(learner.policy.denoiser))
    assert torch.equal(*weights)


def write_json(file, record):
    file.write_text(json.dumps(asdict(record)))


@pytest.fixture
def folder(tmp_path):
    """A run with images of steps 0, 3 and 9."""
    made = fake_run(tmp_path / "run")
    (made / "credit").mkdir()
    for step in (0, 3, 9):
        write_json(made / "credit" / f"step-{step:06}.json", some_record(step=step))
        Image.new("RGB", (3 * 18 + 2, 2 * 18 + 2), "white").save(
            made / "credit" / f"step-{step:06}.png"
        )
    return made


def test_the_report_shows_the_first_and_the_last_credit(folder):
    page = write_report(folder).read_text()
    assert page.index("<h2>Samples") < page.index(HEADING) < page.index("<h2>Checks")
    assert "Training step 1, for the prompt: <b>&lt;b&gt;a" in page
    assert "Training step 10," in page
    assert "Training step 4," not in page
    assert page.count('<div class="wide credit">') == 4


def test_the_report_explains_branches_in_other_words(folder):
    record = some_record(source_row=[[0, 0, 0, 0]] * 2)
    write_json(folder / "credit" / "step-000000.json", record)
    assert "Samples that share a bar" in write_report(folder).read_text()


@pytest.mark.parametrize("broken", ["json", "png"])
def test_a_picture_cut_short_counts_as_missing(folder, broken):
    file = folder / "credit" / f"step-000009.{broken}"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    page = write_report(folder).read_text()
    assert "Training step 1," in page
    assert "Training step 10," not in page


def test_a_calibration_is_shown(folder):
    heading = "<h2>Calibrated noise levels</h2>"
    assert heading not in write_report(folder).read_text()
    file = folder / "calibration.json"
    file.write_text("{")
    assert heading not in write_report(folder).read_text()
    row = {"iteration": 0, "psi": [0.5, 0.3], "positive": [3, 1], "negative": [1, 3]}
    row |= {"ties": [0, 0], "valid": [4, 4]}
    content = {"settings": {"rule": "paper"}, "identity": {}, "sigmas": [1.0, 0.5, 0.0]}
    file.write_text(json.dumps(content | {"psi": [0.6, 0.2], "iterations": [row]}))
    assert heading in write_report(folder).read_text()
