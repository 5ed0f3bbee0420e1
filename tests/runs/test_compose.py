"""Run files that compose. The fixtures hold no value twice, so that a mix-up shows."""

from pathlib import Path

import pytest
import yaml

from flowalign.runs.config.loading import FROM_NAMES, Composition, compose, find_origin
from flowalign.utils.errors import ConfigError
from flowalign.utils.strict_yaml import read_mapping

MODEL = {
    "policy": {"class_path": "pipelines.SD3", "init_args": {"path": "here", "height": 32}},
    "ema": {"decay": 0.7, "every": 2},
    "recipe": {
        "class_path": "flowalign.training.PolicyGradient",
        "init_args": {
            "sampling": {"num_steps": 6, "eta": 0.9, "kernel": {"class_path": "a.SDE"}},
            "algorithm": {"class_path": "a.GRPO", "init_args": {"clip": 0.01, "kl_coef": 0.04}},
        },
    },
    "trackers": ["tensorboard"],
    "seed": 5,
}
METHOD = {
    "ema": {"every": 3},
    "recipe": {
        "credit": {"class_path": "a.Gain"},
        "sampling": {"eta": 0.8, "kernel": {"class_path": "a.CPS"}},
        "algorithm": {"class_path": "a.StepDPO", "init_args": {"beta": 10.0}},
    },
    "trackers": ["wandb"],
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name: str, settings: object) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(settings if isinstance(settings, str) else yaml.safe_dump(settings))
    return name


def recipe_of(composed: Composition) -> dict:
    return composed.values["recipe"]["init_args"]


def composed(*settings: object) -> Composition:
    return compose(
        [write(f"{letter}.yaml", s) for letter, s in zip("abcd", settings, strict=False)]
    )


def complaint(*configs: str) -> str:
    with pytest.raises(ConfigError) as error:
        compose(configs)
    assert len(str(error.value).splitlines()) <= 5
    return str(error.value)


def test_mappings_merge_and_lists_and_components_replace():
    result = composed(MODEL, METHOD)
    assert result.values["ema"] == {"decay": 0.7, "every": 3}
    assert result.values["trackers"] == ["wandb"]
    assert result.values["seed"] == 5
    assert recipe_of(result)["sampling"] == {
        "num_steps": 6,
        "eta": 0.8,
        "kernel": {"class_path": "a.CPS"},
    }
    assert recipe_of(result)["algorithm"] == {
        "class_path": "a.StepDPO",
        "init_args": {"beta": 10.0},
    }


def test_settings_without_a_class_change_the_arguments_of_a_component():
    direct = composed(MODEL, {"recipe": {"algorithm": {"clip": 0.2}}})
    nested = composed(MODEL, {"recipe": {"init_args": {"algorithm": {"init_args": {"clip": 0.2}}}}})
    assert direct.values["recipe"] == nested.values["recipe"]
    assert recipe_of(direct)["algorithm"] == {
        "class_path": "a.GRPO",
        "init_args": {"clip": 0.2, "kl_coef": 0.04},
    }
    assert direct.values["recipe"]["class_path"] == "flowalign.training.PolicyGradient"


def test_arguments_reach_a_component_that_had_none():
    kernel = recipe_of(composed(MODEL, {"recipe": {"sampling": {"kernel": {"scale": 3}}}}))
    assert kernel["sampling"]["kernel"] == {"class_path": "a.SDE", "init_args": {"scale": 3}}


def test_a_component_met_by_nothing_stays_without_arguments():
    result = composed(MODEL, {"recipe": {"sampling": {"kernel": {}}}, "seed": 6})
    assert recipe_of(result)["sampling"]["kernel"] == {"class_path": "a.SDE"}


def test_a_component_given_again_keeps_no_argument_of_the_old_one():
    result = composed(MODEL, {"policy": {"class_path": "pipelines.SD3"}})
    assert result.values["policy"] == {"class_path": "pipelines.SD3"}


def test_null_and_plain_values_replace_whole_mappings():
    assert composed(MODEL, {"ema": None}).values["ema"] is None
    assert composed(MODEL, {"seed": {"a": 1}}).values["seed"] == {"a": 1}


def test_of_three_files_the_last_one_wins():
    result = composed(MODEL, {"seed": 6, "threads": 1}, {"seed": 7})
    assert (result.values["seed"], result.values["threads"]) == (7, 1)
    assert (result.origins["seed"], result.origins["threads"]) == ("c.yaml", "b.yaml")


def test_a_file_that_extends_is_an_overlay_on_what_it_names():
    write("model.yaml", MODEL)
    write("method.yaml", METHOD)
    own = {"recipe": {"sampling": {"num_steps": 9}}, "output_dir": "runs/pair"}
    pair = compose([write("pair.yaml", {"extends": ["model.yaml", "method.yaml"], **own})])
    assert pair.values == compose(["model.yaml", "method.yaml", write("own.yaml", own)]).values
    assert "extends" not in pair.values
    single = compose([write("single.yaml", {"extends": "model.yaml", "seed": 8})])
    assert single.values == {**MODEL, "seed": 8, "output_dir": "runs/single"}


def test_a_file_that_extends_may_follow_another_file():
    write("small.yaml", {"seed": 8, "threads": 2})
    overlay = write("overlay.yaml", {"extends": "small.yaml", "threads": 3})
    assert compose([write("model.yaml", MODEL), overlay]).values == {
        **MODEL,
        "seed": 8,
        "threads": 3,
        "output_dir": "runs/model-overlay",
    }


def test_every_leaf_has_the_file_that_set_it_last():
    result = composed(MODEL, METHOD)
    recipe = "recipe.init_args."
    assert {key: file for key, file in result.origins.items() if file == "b.yaml"} == dict.fromkeys(
        [
            "ema.every",
            recipe + "sampling.eta",
            recipe + "sampling.kernel.class_path",
            recipe + "algorithm.class_path",
            recipe + "algorithm.init_args.beta",
            recipe + "credit.class_path",
            "trackers",
        ],
        "b.yaml",
    )
    assert result.origins[recipe + "sampling.num_steps"] == "a.yaml"
    assert recipe + "algorithm.init_args.clip" not in result.origins


def test_leaves_of_extended_files_are_their_own():
    write("model.yaml", MODEL)
    pair = compose([write("pair.yaml", {"extends": "model.yaml", "threads": 3})])
    assert (pair.origins["seed"], pair.origins["threads"]) == ("model.yaml", "pair.yaml")


def test_values_and_origins_have_the_same_leaves():
    result = composed(MODEL, METHOD, {"ema": {}, "evaluation": None})
    for key in result.origins:
        value = result.values
        for part in key.split("."):
            value = value[part]
        assert not isinstance(value, dict)


def test_a_run_that_names_no_folder_is_named_after_its_files():
    model, method = write("models/sd35.yaml", MODEL), write("methods/dense.yaml", METHOD)
    both = compose([model, method])
    assert both.values["output_dir"] == "runs/sd35-dense"
    assert both.origins["output_dir"] == FROM_NAMES == "names of the files"
    named = compose([model, write("named.yaml", {"output_dir": "runs/mine"})])
    assert named.values["output_dir"] == "runs/mine"
    assert named.origins["output_dir"] == "named.yaml"


def test_a_composed_file_composes_alone_to_itself():
    first = composed(MODEL, METHOD)
    assert compose([write("resolved.yaml", first.values)]).values == first.values


def test_numbers_and_dates_are_read_as_on_the_command_line():
    text = "a: 1e-3\nb: -2E+4\nc: .5\nd: 2024-01-02\ne: '1e-3'\nf: 3\ng: .inf\nh: 1.2.3\n"
    assert list(read_mapping(write("numbers.yaml", text)).values()) == [
        *(0.001, -20000.0, 0.5, "2024-01-02", "1e-3", 3, float("inf"), "1.2.3")
    ]


def test_files_of_the_package_are_found_from_any_folder():
    assert compose(["configs/shapes.yaml"]).values["output_dir"] == "runs/shapes"
    pair = compose(["configs/models/toy_shapes.yaml", "configs/methods/dense_grpo.yaml"])
    assert pair.origins["recipe.init_args.credit.class_path"] == "configs/methods/dense_grpo.yaml"


@pytest.mark.parametrize(
    ("key", "file"),
    [
        ("recipe.init_args.sampling.eta", "b.yaml"),
        ("recipe.sampling.eta", "b.yaml"),
        ("recipe.sampling.num_steps", "a.yaml"),
        ("trackers.0.name", "b.yaml"),
        ("policy.init_args", "a.yaml"),
        ("policy", "a.yaml"),
        ("recipe.credit", "b.yaml"),
        ("recipe.sampling", None),
        ("recipe.samplings", None),
        ("seed", "a.yaml"),
    ],
)
def test_the_origin_of_a_key_is_found_with_and_without_init_args(key, file):
    assert find_origin(composed(MODEL, METHOD).origins, key) == file


def test_no_file_at_all_is_refused():
    assert complaint() == "no run file was given: name one, such as configs/shapes.yaml"


def test_a_missing_file_is_named_with_the_folder():
    assert complaint("no.yaml") == f"run file 'no.yaml' does not exist (looked in {Path.cwd()})"
    Path("folder").mkdir()
    assert complaint("folder") == "folder is a folder, not a YAML file"


def test_a_missing_extended_file_is_named_with_the_one_that_extends():
    message = complaint(write("pair.yaml", {"extends": "no.yaml", "seed": 1}))
    assert message.startswith("pair.yaml extends a file that cannot be used:\nrun file 'no.yaml'")


@pytest.mark.parametrize(
    ("text", "kind"), [("- seed: 1\n", "list"), ("", "NoneType"), ("just words\n", "str")]
)
def test_a_file_that_is_no_mapping_is_refused(text, kind):
    assert complaint(write("a.yaml", text)) == f"a.yaml must hold a mapping of settings, not {kind}"


@pytest.mark.parametrize("extends", [[], None, 3, ["model.yaml", 3], {"model": "model.yaml"}])
def test_extends_must_be_a_path_or_a_list_of_paths(extends):
    message = complaint(write("a.yaml", {"extends": extends, "seed": 1}))
    assert message == f"a.yaml: extends is {extends!r}; it must be a path or a list of paths"


def test_a_file_that_is_extended_may_not_extend():
    write("model.yaml", MODEL)
    write("middle.yaml", {"extends": "model.yaml", "seed": 6})
    message = complaint(write("top.yaml", {"extends": "middle.yaml", "seed": 7}))
    assert message.startswith("top.yaml extends middle.yaml, which extends model.yaml itself.")
    assert "list all base files in top.yaml" in message


def test_a_file_that_changes_nothing_is_refused():
    model = write("model.yaml", MODEL)
    same = write("same.yaml", {"seed": 5, "recipe": {"sampling": {"eta": 0.9}}})
    message = complaint(model, same)
    assert message == "same.yaml changes nothing of model.yaml: leave it out"
    message = complaint(model, write("more.yaml", {"seed": 6}), same.replace("same", "more"))
    assert message == "more.yaml changes nothing of model.yaml, more.yaml: leave it out"
    assert "model.yaml changes nothing" in complaint(model, model)


def test_a_file_that_changes_nothing_of_what_it_extends_is_refused():
    write("model.yaml", MODEL)
    for own in ({}, {"seed": 5}, {"recipe": {}}):
        message = complaint(write("pair.yaml", {"extends": ["model.yaml"], **own}))
        assert message == "pair.yaml changes nothing of what it extends: give model.yaml"


def test_a_method_before_its_model_is_refused_rather_than_dropped():
    message = complaint(write("method.yaml", METHOD), write("model.yaml", MODEL))
    assert message == (
        "model.yaml: recipe has a class_path and would drop earlier settings of recipe.\n"
        "Name model.yaml before that file."
    )


def test_an_argument_given_in_both_ways_is_refused():
    twice = {"recipe": {"sampling": {"eta": 0.1}, "init_args": {"sampling": {"eta": 0.2}}}}
    message = complaint(write("model.yaml", MODEL), write("twice.yaml", twice))
    assert message == "twice.yaml: recipe sets sampling twice, directly and under init_args"


def test_arguments_that_are_no_mapping_are_refused():
    wrong = write("wrong.yaml", {"policy": {"init_args": [32]}})
    message = complaint(write("model.yaml", MODEL), wrong)
    assert message == "wrong.yaml: policy.init_args is [32]; it must be a mapping"
