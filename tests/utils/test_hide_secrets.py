"""Commands of `notify` and credentials in URLs do not reach exports and reports."""

import pytest
import yaml

from flowalign.cli.main import parse
from flowalign.utils.hide_secrets import hide_in_settings
from flowalign.utils.journal import COMMANDS, Journal

SETTINGS = {
    "trackers": [],
    "notify": ["curl", "--data", "a long\n\nmessage: of " + "several words " * 20, "x://y/TOKEN"],
    "rewards": [{"init_args": {"url": "http://ann:pass@word@host:80/a?b=c@d"}}],
    "seed": 0,
}


@pytest.mark.parametrize("style", [None, "'", '"', "|"])
@pytest.mark.parametrize("place", [0, 3])
def test_settings_are_shown_without_notify_and_credentials(style, place):
    given = [item for item in SETTINGS.items() if item[0] != "notify"]
    given.insert(place, ("notify", SETTINGS["notify"]))
    text = yaml.safe_dump(dict(given), sort_keys=False, default_style=style)
    text = text.replace('"notify"', "notify").replace("'notify'", "notify")
    shown = hide_in_settings(text)
    assert yaml.safe_load(shown) == {
        "trackers": [],
        "rewards": [{"init_args": {"url": "http://***@host:80/a?b=c@d"}}],
        "seed": 0,
    }
    assert hide_in_settings("notify: []  # default\nseed: 0  # run.yaml\n") == (
        "seed: 0  # run.yaml\n"
    )


@pytest.mark.parametrize(
    "words",
    [["--notify", "[curl, x://TOKEN]"], ["--notify=[curl, TOKEN]"], ["notify=[curl,\nTOKEN]"]],
)
def test_a_recorded_command_has_no_secrets(tmp_path, words):
    command = parse(["train", "run.yaml", *words, "--policy.path", "http://ann:TOKEN@host/m"])
    with Journal(tmp_path, command.command):
        pass
    told = (tmp_path / COMMANDS).read_text()
    assert "TOKEN" not in told
    assert "http://***@host/m" in told
    assert told.startswith("flowalign train run.yaml ")
    assert command.words[2:][: len(words)] == words
