"""Training of reward models: it recovers planted labels, and resumes exactly."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from flowalign.data.media_record import Record
from flowalign.functional.rating import Features, ridge
from flowalign.reward_training.embeddings import RewardSample
from flowalign.reward_training.labels import (
    PARTS,
    Preferences,
    gather_preferences,
    measure_agreement,
)
from flowalign.reward_training.losses import (
    BradleyTerry,
    BradleyTerryTies,
    Ordinal,
    PlackettLuce,
    Regression,
    Thurstone,
    Uncertainty,
    VoteFraction,
    label_pairs,
)
from flowalign.reward_training.model_folder import restore_state, save_state
from flowalign.reward_training.training import RewardTrainer, weigh_losses
from flowalign.reward_training.training_parts import Dimension, Ridge, Schedule
from flowalign.training.learner import Optimizer
from flowalign.types import Backbone
from flowalign.utils.errors import TrainingFailure
from flowalign.utils.media.media import Media
from reward_models.backbones.heads import MLP, Linear, PromptGated
from tests.fixtures.training import checked

pytestmark = pytest.mark.slow

NAN = math.nan
SIZE, RECORDS = 6, 2400
WEIGHT = torch.tensor([1.5, -1.0, 0.6, 0.0, 0.3, -0.2])


class NoBackbone(Backbone):
    """The features are there already."""

    reads_prompts = False
    num_frames = None

    def __init__(self):
        self.network, self.fingerprint = nn.Linear(1, 1).requires_grad_(False), "none"

    def load(self):
        pass

    def embed(self, batch):
        raise AssertionError("frozen features are not computed again")


BACKBONE = NoBackbone()


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def world(candidates=2, records=RECORDS, seed=0):
    """Features [M, SIZE] and true scores [B, m]; the features' scale differs by column."""
    x = torch.randn(records * candidates, SIZE, generator=generator(seed))
    true = (x @ WEIGHT).view(records, candidates)
    return x * torch.tensor([1.0, 10.0, 0.1, 1.0, 5.0, 1.0]) + 3, true


def preferences(labels, seed=0):
    """One prompt per record; every fifth record is held out, every fifth tested."""
    records, m = labels.shape[:2]
    part = torch.tensor([0, 1, 0, 2, 0])[torch.arange(records) % 5]
    samples = [RewardSample(Media(data=b"x"), f"prompt {i // m}") for i in range(records * m)]
    table = labels if labels.ndim == 3 else labels[..., None]
    return Preferences(samples, torch.arange(records * m).view(records, m), table, part)


def trainer(features, labels, dimensions, head=None, prompt=None, rate=0.1, seed=0, **schedule):
    prompt = torch.zeros(len(features), 0) if prompt is None else prompt
    schedule = {"epochs": 12, "batch_size": 240, "patience": 50} | schedule
    return RewardTrainer(
        BACKBONE,
        head or Linear(),
        dimensions,
        preferences(labels),
        Features(features, prompt),
        Optimizer(learning_rate=rate, decay="linear"),
        Schedule(**schedule),
        seed,
    )


def learn(features, labels, dimension, head=None, **settings):
    some = trainer(features, labels, {"quality": dimension}, head, **settings)
    list(checked(1, some.epochs()))
    some.use_best()
    return some


def accuracy(some, labels, kind, score=None, part="test"):
    rows = some.preferences.rows(part)
    score = some.scores(rows).score[..., 0] if score is None else score[rows]
    return measure_agreement(score, labels[rows], kind)


def drawn(probability, seed=1):
    return torch.rand(probability.shape, generator=generator(seed)) < probability


def pair_ranks(a_wins, tie=None):
    ranks = torch.where(a_wins[:, None], torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0]))
    return ranks if tie is None else torch.where(tie[:, None], 1.0, ranks)


# Every loss finds what was planted ----------------------------------------------------------------


def test_bradley_terry_reaches_the_ceiling_of_noisy_pairs_and_its_scale():
    x, true = world()
    labels = pair_ranks(drawn((true[:, 0] - true[:, 1]).sigmoid()))
    some = learn(x, labels, Dimension(loss=BradleyTerry()))
    ceiling = accuracy(some, labels, "ranks", true)["accuracy"]
    assert 0.7 < ceiling < 0.9
    assert accuracy(some, labels, "ranks")["accuracy"] > ceiling - 0.02
    score = some.scores(some.preferences.rows("test")).score[..., 0]
    lead = score[:, 0] - score[:, 1]
    planted = (true[:, 0] - true[:, 1])[some.preferences.rows("test")]
    assert float((lead @ planted) / (planted @ planted)) == pytest.approx(1.0, abs=0.15)


def test_ties_teach_how_readily_people_see_one():
    x, true = world()
    k, lead = 3.0, true[:, 0] - true[:, 1]
    wins, loses = (lead - math.log(k)).sigmoid(), (-lead - math.log(k)).sigmoid()
    u = torch.rand(len(lead), generator=generator(2))
    labels = pair_ranks(u < wins, tie=(u >= wins) & (u < 1 - loses))
    share = float((labels[:, 0] == labels[:, 1]).float().mean())
    assert 0.15 < share < 0.5
    some = learn(x, labels, Dimension(loss=BradleyTerryTies(tie_share=0.9)), epochs=12, rate=0.2)
    assert some.dimensions["quality"].loss.learned_values()["k"] == pytest.approx(k, rel=0.12)
    found, best = accuracy(some, labels, "ranks"), accuracy(some, labels, "ranks", true)
    assert found["accuracy"] > best["accuracy"] - 0.02
    assert found["accuracy_with_ties"] > best["accuracy_with_ties"] - 0.03
    fixed = BradleyTerryTies(learn_k=False)
    learn(x, labels, Dimension(loss=fixed), epochs=1)
    assert fixed.learned_values()["k"] == pytest.approx(5.0, rel=1e-3)


def disputed():
    """Pairs that annotators disagree about; a column without effect on scores marks the samples."""
    x, true = world(records=4000)
    sigma = torch.where(x.view(-1, 2, SIZE)[..., 3] > 3.4, 2.5, 0.3)
    seen = true + sigma * torch.randn(true.shape, generator=generator(3))
    return x, true, sigma, pair_ranks(seen[:, 0] > seen[:, 1])


def test_samples_that_people_disagree_about_are_found_to_be_uncertain():
    x, true, sigma, labels = disputed()
    some = learn(x, labels, Dimension(loss=Thurstone()), Linear(uncertainty=True), epochs=8)
    ceiling = accuracy(some, labels, "ranks", true)["accuracy"]
    assert accuracy(some, labels, "ranks")["accuracy"] > ceiling - 0.02
    rows = some.preferences.rows("test")
    spread, high = some.scores(rows).log_variance[..., 0], sigma[rows] > 1
    assert float(spread[high].mean() - spread[~high].mean()) > 1.5


def test_the_uncertainty_loss_orders_but_its_variances_only_shrink():
    x, true, _, labels = disputed()
    some = learn(x, labels, Dimension(loss=Uncertainty()), Linear(uncertainty=True), epochs=8)
    ceiling = accuracy(some, labels, "ranks", true)["accuracy"]
    assert accuracy(some, labels, "ranks")["accuracy"] > ceiling - 0.02
    spread = some.scores(some.preferences.rows("test")).log_variance
    assert float(spread.max()) < 0.0  # where all began


def test_levels_are_learned_with_their_cuts():
    x, true = world(candidates=1)
    logistic = torch.rand(true.shape, generator=generator(4)).logit()
    cuts = torch.tensor([-2.0, 0.5, 2.5])
    labels = torch.tensor([1.0, 2.0, 3.0, 5.0])[torch.bucketize(true + logistic, cuts)]
    loss = Ordinal([1, 2, 3, 5])
    some = learn(x, labels, Dimension(loss=loss, labels="ratings"), epochs=12, rate=0.3)
    found, best = accuracy(some, labels, "ratings"), accuracy(some, labels, "ratings", true)
    assert found["spearman"] > best["spearman"] - 0.02
    gaps = torch.tensor(loss.learned_values()["cuts"]).diff()
    torch.testing.assert_close(gaps, cuts.diff(), atol=0.35, rtol=0)
    labels[0] = 4.0
    with pytest.raises(ValueError, match="a rating is 4; allowed levels are"):
        learn(x, labels, Dimension(loss=Ordinal([1, 2, 3, 5]), labels="ratings"), epochs=1)


def test_ratings_in_odd_units_are_regressed_and_come_back_in_them():
    x, true = world(candidates=1)
    noise = torch.randn(true.shape, generator=generator(5))
    labels = 500 + 40 * true + 10 * noise
    for loss in (Regression(), Regression(delta=0.5)):
        some = learn(x, labels, Dimension(loss=loss, labels="ratings"))
        rows = some.preferences.rows("test")
        values, _ = some.rater.in_units(some.scores(rows), z_score=False)
        assert float((values[..., 0] - labels[rows]).std()) < 10.6  # the noise is 10
        assert abs(float((values[..., 0] - labels[rows]).mean())) < 2.0


@pytest.mark.parametrize("loss", [PlackettLuce, BradleyTerry])
def test_rankings_of_unequal_lengths_are_learned(loss):
    x, true = world(candidates=4, records=1000)
    gumbel = -torch.log(-torch.log(torch.rand(true.shape, generator=generator(6))))
    labels = (true + gumbel).argsort(1, descending=True).argsort(1).float() + 1
    labels[::2, 3] = NAN  # every other list has three
    some = learn(x, labels, Dimension(loss=loss()))
    found, best = accuracy(some, labels, "ranks"), accuracy(some, labels, "ranks", true)
    assert found["pairs"] == 100 * 6 + 100 * 3
    assert found["accuracy"] > best["accuracy"] - 0.02


@pytest.mark.parametrize("loss", [VoteFraction, BradleyTerry])
def test_shares_of_votes_are_soft_targets(loss):
    x, true = world()
    share = (true[:, 0] - true[:, 1]).sigmoid()
    votes = torch.binomial(torch.full_like(share, 9.0), share, generator=generator(7)) / 9
    labels = torch.stack([votes, 1 - votes], 1)
    some = learn(x, labels, Dimension(loss=loss(), labels="votes"))
    found, best = accuracy(some, labels, "votes"), accuracy(some, labels, "votes", true)
    assert found["accuracy"] > best["accuracy"] - 0.02
    assert found["calibration_error"] < 0.05


# Labels -------------------------------------------------------------------------------------------


def test_pairs_of_ranks_votes_and_ratings_by_hand():
    ranks = label_pairs(torch.tensor([[1.0, 3.0, 3.0], [2.0, NAN, 1.0], [NAN, 1.0, NAN]]), "ranks")
    assert ranks.record.tolist() == [0, 0, 0, 1]
    assert list(zip(ranks.a.tolist(), ranks.b.tolist(), strict=True)) == [
        (0, 1),
        (0, 2),
        (1, 2),
        (0, 2),
    ]
    assert ranks.target.tolist() == [1.0, 1.0, 0.5, 0.0]
    ratings = label_pairs(torch.tensor([[1.0, 3.0], [2.0, 2.0]]), "ratings")
    assert ratings.target.tolist() == [0.0, 0.5]
    votes = label_pairs(torch.tensor([[0.2, 0.6, 0.2], [0.0, 0.0, 1.0]]), "votes")
    torch.testing.assert_close(votes.target, torch.tensor([0.25, 0.5, 0.75, 0.0, 0.0]))
    assert votes.record.tolist() == [0, 0, 0, 1, 1]  # two without votes were not compared


def test_a_missing_label_neither_counts_nor_dilutes():
    x, true = world(records=50)
    full = pair_ranks(true[:, 0] > true[:, 1])
    labels = torch.stack([full, full], 2)
    labels[10:, :, 1] = NAN
    both = {"many": Dimension(loss=BradleyTerry()), "few": Dimension(loss=BradleyTerry())}
    some = trainer(x, labels, both)
    rows = torch.arange(50)
    losses = some._losses(some._rate(rows), rows)
    first = some._losses(some._rate(rows[:10]), rows[:10])
    torch.testing.assert_close(losses["few"], first["few"])
    assert set(some._losses(some._rate(rows[10:]), rows[10:])) == {"many"}


def record(i, prompt, **labels):
    media = [Media(path=f"{i}-{n}.png") for n in range(3)]
    return Record(f"#{i}", prompt, media, **labels)


def test_records_become_a_table_divided_by_prompt():
    records = [
        record(
            i,
            f"prompt {i // 2}",
            ranks={"a": [1.0, 2.0, 2.0]} if i % 3 else {},
            ratings={"b": [float(i)] * 3},
        )
        for i in range(40)
    ]
    records[5] = replace(records[5], prompt="PROMPT  2", problem="")  # of records 4 and 5
    records.append(replace(records[0], problem="duplicate id: x"))
    records.append(replace(records[1], id="e", prompt=" "))
    records.append(Record("#u", "prompt 1", [Media(path="u.png")], ranks={"a": [1.0]}))
    table = gather_preferences(records, {"a": "ranks", "b": "ratings"}, 0, (0.2, 0.1))
    assert table.labels.shape == (40, 3, 2)
    assert table.labels[0, :, 0].isnan().all()
    assert table.labels[1, :, 0].tolist() == [1, 2, 2]
    assert table.problems == ["duplicate id: x", "no prompt: e"]
    assert table.num_unlabelled == 1  # one candidate is no comparison
    prompts = [" ".join(r.prompt.casefold().split()) for r in records[:40]]
    parts = [
        {p for p, k in zip(prompts, table.part, strict=True) if PARTS[k] == name} for name in PARTS
    ]
    assert [len(p) for p in parts] == [14, 4, 2]
    assert not parts[0] & parts[1]
    assert not parts[0] & parts[2]
    assert not parts[1] & parts[2]
    assert table.samples[int(table.candidate[7, 2])].media.path == "7-2.png"
    other = gather_preferences(records, {"a": "ranks", "b": "ratings"}, 1, (0.2, 0.1))
    assert other.part.tolist() != table.part.tolist()
    assert other.fingerprint() != table.fingerprint()


def test_a_candidate_that_failed_loses_its_labels_only():
    table = gather_preferences(
        [record(i, f"p{i}", ranks={"a": [1.0, 2.0, 3.0]}) for i in range(9)],
        {"a": "ranks"},
        0,
        (0.2, 0.0),
    )
    less = table.exclude([4])
    assert less.labels[1, :, 0].isnan().tolist() == [False, True, False]
    assert int(less.labels.isnan().sum()) == 1


def test_data_that_say_nothing_of_a_dimension_are_refused_by_name():
    records = [record(i, f"p{i}", ranks={"a": [1.0, 2.0, 3.0]}) for i in range(9)]
    with pytest.raises(
        ValueError, match=r"no record has ranks of 'b'; the data have ranks of \['a'\]"
    ):
        gather_preferences(records, {"a": "ranks", "b": "ranks"}, 0, (0.2, 0.1))
    with pytest.raises(ValueError, match="no record of the data has ratings of a"):
        gather_preferences(records, {"a": "ratings"}, 0, (0.2, 0.1))
    with pytest.raises(ValueError, match="1 prompts are too few for shares"):
        gather_preferences([replace(r, prompt="p") for r in records], {"a": "ranks"}, 0, (0.2, 0.1))


# The loop -----------------------------------------------------------------------------------------


def noisy(records=400):
    x, true = world(records=records)
    return x, pair_ranks(drawn((true[:, 0] - true[:, 1]).sigmoid()))


def weights(some):
    return {n: p.detach().clone() for n, p in some.trained().items()}


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    x, labels = noisy()
    head = MLP([8], dropout=0.2)
    runs = []
    for seed in (0, 0, 1):
        torch.rand(3)  # what others drew before does not matter
        before = torch.random.get_rng_state()
        dimension = {"quality": Dimension(loss=BradleyTerryTies())}
        some = trainer(x, labels, dimension, head, epochs=2, seed=seed)
        list(some.epochs())
        assert torch.equal(before, torch.random.get_rng_state())
        runs.append(weights(some))
    assert all(torch.equal(runs[0][n], runs[1][n]) for n in runs[0])
    assert not torch.equal(
        runs[0]["rater.head.out.score.weight"], runs[2]["rater.head.out.score.weight"]
    )


@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_training_ends_bit_for_bit_as_an_uninterrupted_one(tmp_path, stop):
    x, labels = noisy()

    def fresh():
        dimension = {"quality": Dimension(loss=BradleyTerryTies())}
        return trainer(x, labels, dimension, MLP([8], dropout=0.2), epochs=5)

    whole = fresh()
    metrics = list(whole.epochs())
    first = fresh()
    epochs = first.epochs()
    for _ in range(stop):
        next(epochs)
    save_state(tmp_path / "state.safetensors", first, "data")
    second = fresh()
    restore_state(tmp_path / "state.safetensors", second, "data")
    assert list(second.epochs()) == metrics[stop:]
    assert all(
        torch.equal(a, b)
        for a, b in zip(weights(whole).values(), weights(second).values(), strict=True)
    )
    assert whole.best.keys() == second.best.keys()
    assert all(torch.equal(whole.best[n], second.best[n]) for n in whole.best)


def test_a_state_of_other_data_or_another_head_is_refused(tmp_path):
    x, labels = noisy()
    dimension = {"quality": Dimension(loss=BradleyTerry())}
    some = trainer(x, labels, dimension, epochs=1)
    list(some.epochs())
    path = tmp_path / "state.safetensors"
    save_state(path, some, "data")
    with pytest.raises(ValueError, match="trained on other data"):
        restore_state(path, trainer(x, labels, dimension), "more data")
    with pytest.raises(ValueError, match="another head"):
        restore_state(path, trainer(x, labels, dimension, MLP([4])), "data")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read"):
        restore_state(path, trainer(x, labels, dimension), "data")


def test_training_stops_when_the_held_out_loss_no_longer_falls_and_keeps_the_best():
    x, true = world(records=60)
    labels = pair_ranks(drawn((true[:, 0] - true[:, 1]).sigmoid()))
    dimension = {"quality": Dimension(loss=BradleyTerry())}
    some = trainer(x, labels, dimension, MLP([64]), epochs=60, batch_size=8, patience=3)
    held = [m["held_out/loss"] for m in some.epochs()]
    best = min(range(len(held)), key=held.__getitem__)
    assert len(held) == best + 1 + 3 < 60
    some.use_best()
    rows = some.preferences.rows("held_out")
    loss = weigh_losses(some.dimensions, some._losses(some.scores(rows), rows))
    assert float(loss) == pytest.approx(held[best])


def test_gradients_that_are_not_finite_end_the_training_with_advice():
    x, labels = noisy(100)
    some = trainer(x, labels, {"quality": Dimension(loss=BradleyTerry())}, batch_size=4)
    with torch.no_grad():
        some.rater.head.out.score.weight.fill_(torch.inf)
    with pytest.raises(TrainingFailure, match=r"not finite in 11 updates in a row"):
        list(some.epochs())


def test_uncertainty_is_wanted_by_the_loss_exactly_if_the_head_gives_it():
    x, labels = noisy(50)
    with pytest.raises(ValueError, match="the loss of quality needs a head that predicts a var"):
        trainer(x, labels, {"quality": Dimension(loss=Thurstone())})
    with pytest.raises(ValueError, match="no loss trains the head's uncertainty"):
        trainer(x, labels, {"quality": Dimension(loss=BradleyTerry())}, Linear(uncertainty=True))


def test_nonsense_is_refused_where_it_is_said():
    ties = BradleyTerryTies()
    for what, settings, message in (
        (Dimension, {"loss": Regression()}, "Regression reads ratings, not ranks"),
        (Dimension, {"loss": ties, "labels": "votes"}, "Ties reads ranks or ratings, not votes"),
        (Dimension, {"loss": ties, "weight": 0.0}, r"dimension\.weight is 0"),
        (Schedule, {"epochs": 0}, r"schedule\.epochs is 0"),
        (Ordinal, {"levels": [2, 1]}, "at least two, in increasing order"),
        (Ridge, {"penalties": [0.0]}, "numbers above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            what(**settings)


# Heads --------------------------------------------------------------------------------------------


def test_ridge_equals_the_normal_equations_in_both_shapes():
    x = torch.randn(30, 5, generator=generator(1)) + 2
    y = x @ torch.arange(5.0) + 7 + torch.randn(30, generator=generator(2))
    for rows in (30, 4):  # more, and fewer, rows than features
        a, b = x[:rows].double(), y[:rows].double()
        ones = torch.cat([a, torch.ones(rows, 1, dtype=a.dtype)], 1)
        penalty = torch.diag(torch.tensor([3.0] * 5 + [0.0], dtype=a.dtype))
        exact = torch.linalg.solve(ones.T @ ones + penalty, ones.T @ b)
        weight, bias = ridge(a.float(), b.float(), 3.0)
        torch.testing.assert_close(
            torch.cat([weight, bias[None]]).double(), exact, rtol=1e-4, atol=1e-4
        )


def gated_world(records=2000):
    """Two rated aspects; which of them decides a comparison depends on the prompt alone."""
    x = torch.randn(records * 2, SIZE, generator=generator(0))
    aspects = torch.stack([x[:, 0] + 0.3 * x[:, 1], x[:, 2] - 0.3 * x[:, 4]], 1)
    prompt = torch.randn(records, 3, generator=generator(1)).repeat_interleave(2, 0)
    gate = (prompt[:, :1] > 0).float()
    total = (gate * aspects[:, :1] + (1 - gate) * aspects[:, 1:])[:, 0].view(records, 2)
    ranks = pair_ranks(total[:, 0] > total[:, 1])
    labels = torch.cat([aspects.view(records, 2, 2), ranks[..., None]], 2)
    dimensions = {
        "first": Dimension(loss=Regression(), labels="ratings"),
        "second": Dimension(loss=Regression(), labels="ratings"),
        "overall": Dimension(loss=BradleyTerry()),
    }
    return x, prompt, labels, dimensions


@pytest.mark.parametrize("first_stage", [None, Ridge()])
def test_gates_learn_which_aspect_decides_for_which_prompt(first_stage):
    x, prompt, labels, dimensions = gated_world()
    head = PromptGated({"overall": ["first", "second"]}, hidden=[16])
    some = trainer(x, labels, dimensions, head, prompt, ridge=first_stage, epochs=15)
    before = some.rater.head.score.weight.detach().clone()
    list(checked(1, some.epochs()))
    some.use_best()
    rows = some.preferences.rows("test")
    score = some.scores(rows).score[..., 2]
    found = measure_agreement(score, labels[rows][..., 2], "ranks")["accuracy"]
    plain = trainer(x, labels, dimensions, Linear(), prompt, epochs=15)
    list(checked(1, plain.epochs()))
    score = plain.scores(rows).score[..., 2]
    without = measure_agreement(score, labels[rows][..., 2], "ranks")["accuracy"]
    assert found > 0.93 > 0.85 > without
    first = some.preferences.candidate[rows][:, 0]
    (gate,) = some.rater.head.weights(some.rater.prompt(prompt[first]))
    torch.testing.assert_close(gate.sum(1), torch.ones(len(rows)))
    decides = prompt[first, 0] > 0
    gate = gate.detach()
    assert float(gate[decides, 0].mean()) > 0.8 > 0.2 > float(gate[~decides, 0].mean())
    if first_stage:
        assert torch.equal(some.rater.head.score.weight, before)


def test_ridge_alone_solves_what_is_linear():
    x, true = world()
    labels = pair_ranks(drawn((true[:, 0] - true[:, 1]).sigmoid()))
    some = trainer(
        x, labels, {"quality": Dimension(loss=BradleyTerry())}, ridge=Ridge(freeze=False)
    )
    found, best = accuracy(some, labels, "ranks"), accuracy(some, labels, "ranks", true)
    assert found["accuracy"] > best["accuracy"] - 0.02
    with pytest.raises(ValueError, match="leaves no trainable weights in this head"):
        trainer(x, labels, {"quality": Dimension(loss=BradleyTerry())}, ridge=Ridge())
    with pytest.raises(ValueError, match="linear in the features"):
        trainer(x, labels, {"quality": Dimension(loss=BradleyTerry())}, MLP([4]), ridge=Ridge())


def test_heads_refuse_what_they_cannot_be_built_for():
    head = PromptGated({"overall": ["a", "b"]})
    with pytest.raises(ValueError, match="a backbone that reads prompts"):
        head.build(4, 0, ["a", "b", "overall"])
    with pytest.raises(ValueError, match=r"groups name the unknown dimension 'b'"):
        head.build(4, 2, ["a", "overall"])
    late = PromptGated({"overall": ["a", "part"], "part": ["a", "b"]})
    with pytest.raises(ValueError, match="which come after it"):
        late.build(4, 2, ["a", "b", "part", "overall"])
    for wrong, given, settings, why in (
        (PromptGated, {"overall": ["a"]}, {}, "at least two dimensions"),
        (PromptGated, {"o": ["a", "b"]}, {"temperature": 0.0}, "temperature of PromptGated is 0"),
        (MLP, [], {}, "hidden"),
        (MLP, [4], {"dropout": 1.0}, "dropout"),
    ):
        with pytest.raises(ValueError, match=why):
            wrong(given, **settings)
