"""Prompt files of benchmarks: tables, JSON and folders."""

import json

import pytest

from flowalign.studies.benchmark.card import Card, Metric, PromptSource, Protocol
from flowalign.studies.benchmark.items import hash_files, read_prompts


def new_card(**prompts):
    return Card(
        title="B",
        source="s",
        prompts=PromptSource(file="official", **prompts),
        protocol=Protocol(),
        metrics=[Metric(name="m", dims=["d"])],
        scorer="x",
    )


def test_tables_json_and_folders_become_requests(tmp_path):
    (tmp_path / "a.tsv").write_text("Prompt\tCategory\na cat\tanimal\n'a dog'\tpet\n")
    (tmp_path / "a.csv").write_text('id,Prompt\n1,"a, b"\n')
    (tmp_path / "a.json").write_text(json.dumps([{"Prompt": "x", "dimension": ["d"]}]))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "2.txt").write_text("second\n")
    (tmp_path / "texts" / "1.txt").write_text("first\n")
    card = new_card(column="Prompt")

    def read(name):
        return [(r.prompt, dict(r.metadata)) for r in read_prompts(card, str(tmp_path / name))]

    assert read("a.tsv") == [("a cat", {"Category": "animal"}), ("'a dog'", {"Category": "pet"})]
    assert read("a.csv") == [("a, b", {"id": "1"})]
    assert read("a.json") == [("x", {"dimension": ["d"]})]
    assert read("texts") == [("first", {"file": "1.txt"}), ("second", {"file": "2.txt"})]
    assert hash_files([tmp_path / "texts"]) == hash_files(
        [tmp_path / "texts" / "1.txt", tmp_path / "texts" / "2.txt"]
    )


def test_a_table_without_the_column_of_the_card_names_those_that_it_has(tmp_path):
    (tmp_path / "a.tsv").write_text("Text\nx\n")
    with pytest.raises(ValueError, match=r"a.tsv has no column 'Prompt'; there are Text"):
        read_prompts(new_card(column="Prompt"), str(tmp_path / "a.tsv"))


def test_metrics_and_cards_that_contradict_themselves():
    with pytest.raises(ValueError, match="needs either dims or combine"):
        Metric(name="m")
    with pytest.raises(ValueError, match="averages over groups; name the column"):
        Metric(name="m", dims=["d"], over="groups")
    card = {"source": "s", "prompts": PromptSource(file="f"), "protocol": Protocol(), "scorer": "x"}
    with pytest.raises(ValueError, match=r"metric total combines \['q'\]"):
        Card(title="B", metrics=[Metric(name="total", combine={"q": 1.0})], **card)
