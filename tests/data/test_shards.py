"""Shards in tar files, saved datasets, patterns of files and links, as one dataset each."""

import io
import json
import tarfile
from pathlib import Path

import pyarrow
import pytest

from flowalign.data.readers import open_dataset
from flowalign.utils.media.decode import decode
from flowalign.utils.media.media import Media, MediaProblem
from tests.fixtures.scoring_rewards import picture


def shard(path: Path, members: dict[str, bytes], mode: str = "w") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return str(path)


def sample(key: str, prompt: str = "a cat") -> dict[str, bytes]:
    return {f"{key}.png": key.encode(), f"{key}.txt": f"{prompt}\n".encode()}


def saved(folder: Path, *files: list[dict]) -> str:
    """A folder as `datasets.save_to_disk` leaves it."""
    folder.mkdir(parents=True)
    names = [f"data-{k:05d}-of-{len(files):05d}.arrow" for k in range(len(files))]
    for name, rows in zip(names, files, strict=True):
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "f"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return str(folder)


# ---------------------------------------------------------------- tar files


@pytest.mark.parametrize(
    ("name", "mode"), [("a.tar", "w"), ("a.tar.gz", "w:gz"), ("a.tgz", "w:gz")]
)
def test_members_of_one_name_are_a_row(tmp_path, name, mode):
    members = sample("x/000") | {"x/000.json": b'{"seed": 3}'} | sample("x/001", "two dogs")
    first, second = open_dataset(shard(tmp_path / name, members, mode))
    assert (first.id, first.prompt) == (f"{Path(name).stem}/x/000", "a cat")
    assert first.media == [Media(data=b"x/000")]
    assert first.metadata == {"seed": 3}
    assert second.prompt == "two dogs"


def test_a_sample_of_two_pictures_names_its_columns(tmp_path):
    pair = {"0.chosen.jpg": b"c", "0.rejected.jpg": b"r", "0.txt": b"p"}
    dataset = open_dataset(shard(tmp_path / "a.tar", pair))
    assert dataset.schema.name == "chosen_rejected"
    (record,) = dataset
    assert [medium.data for medium in record.media] == [b"c", b"r"]


def test_entries_of_json_are_columns_where_no_member_is_one(tmp_path):
    entries = {"image": "elsewhere.png", "label": True, "prompt": "of the entries"}
    members = {"0.png": b"x", "0.json": json.dumps(entries).encode()}
    dataset = open_dataset(shard(tmp_path / "a.tar", members))
    assert dataset.schema.name == "kto"
    (record,) = dataset
    assert (record.prompt, record.media) == ("of the entries", [Media(data=b"x")])
    assert record.metadata["desirable"] is True


def test_members_that_nobody_reads_and_hidden_files_are_left_out(tmp_path):
    members = {"._0.png": b"h", "readme": b"?", **sample("0"), "0.npy": b"a", "0.pth": b"b"}
    (record,) = open_dataset(shard(tmp_path / "a.tar", members))
    assert (record.media, record.metadata, record.problem) == ([Media(data=b"0")], {}, "")


def test_a_bad_sample_is_a_record_that_says_why_and_the_next_ones_are_read(tmp_path):
    members = sample("0") | {"1.png": b"x", "1.jpg": b"y"} | {"2.png": b"x", "2.json": b"{"}
    members |= {"3.png": b"x", "3.json": b"[1]"} | {"4.png": b"x", "4.txt": b"\xff"} | sample("5")
    first, *middle, last = open_dataset(shard(tmp_path / "a.tar", members))
    assert (first.problem, last.problem) == ("", "")
    assert [record.problem.removeprefix("invalid row: a.tar ")[:52] for record in middle] == [
        "row 2: (1) has two files for the column image",
        "row 3: (2) has a .json file that cannot be read: Exp",
        "row 4: (3) has a .json file that is not a JSON objec",
        "row 5: (4) has a .txt file that cannot be read: 'utf",
    ]


def test_a_link_in_a_shard_is_a_bad_row(tmp_path):
    path = shard(tmp_path / "a.tar", sample("0"))
    with tarfile.open(path, "a") as archive:
        link = tarfile.TarInfo("1.png")
        link.type, link.linkname = tarfile.SYMTYPE, "0.png"
        archive.addfile(link)
    problems = [record.problem for record in open_dataset(path)]
    assert problems == ["", "invalid row: a.tar row 2: (1) has a link instead of its .png file"]


@pytest.mark.parametrize(
    ("end", "rows"), [(512 + 7, 0), (4 * 512 - 3, 1), (4 * 512 + 100, 2)], ids=str
)
def test_a_shard_that_breaks_off_is_refused(tmp_path, end, rows):
    """Cut within a member's content, within its padding, and within the header of the next."""
    members = {f"{k}.png": b"ten bytes!" for k in range(3)}
    path = Path(shard(tmp_path / "a.tar", members))
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(ValueError, match=r"a\.tar is truncated or not a tar file"):
        list(open_dataset(str(path)))
    path.write_bytes(b"not a tar file" * 100)
    with pytest.raises(ValueError, match=r"a\.tar is truncated or not a tar file"):
        open_dataset(str(path))


def test_a_shard_is_read_sample_by_sample(tmp_path, monkeypatch):
    read = []
    extract = tarfile.TarFile.extractfile
    monkeypatch.setattr(
        tarfile.TarFile, "extractfile", lambda self, m: read.append(m.name) or extract(self, m)
    )
    members = {k: v for i in range(40) for k, v in sample(f"{i:03}").items()}
    dataset = open_dataset(shard(tmp_path / "a.tar", members))
    read.clear()
    next(iter(dataset))
    assert len(read) < 6


# ---------------------------------------------------------------- patterns


def test_braces_name_shards_in_their_order_and_all_must_exist(tmp_path):
    for k in (8, 9, 10):
        shard(tmp_path / f"{k:03}.tar", sample(f"{k}"))
    dataset = open_dataset(f"{tmp_path}/{{008..010}}.tar")
    assert [record.id for record in dataset] == ["008/8", "009/9", "010/10"]
    chosen = open_dataset(f"{tmp_path}/{{010,008}}.tar")
    assert [record.id for record in chosen] == ["010/10", "008/8"]
    with pytest.raises(ValueError, match=r"011\.tar' does not exist"):
        open_dataset(f"{tmp_path}/{{008..011}}.tar")


def test_a_glob_names_those_that_there_are(tmp_path):
    for k in (1, 0):
        shard(tmp_path / "deep" / f"{k}.tar", sample(f"{k}"))
    for pattern in ("deep/*.tar", "**/[01].tar", "d*p/{0,1}.t?r"):
        found = [record.id for record in open_dataset(f"{tmp_path}/{pattern}")]
        assert found == ["0/0", "1/1"], pattern
    with pytest.raises(ValueError, match="matches no file"):
        open_dataset(f"{tmp_path}/*.tgz")


def test_files_of_two_formats_are_not_one_dataset(tmp_path):
    shard(tmp_path / "a.tar", sample("0"))
    (tmp_path / "b.jsonl").write_text('{"prompt": "p", "image": "x.png"}\n')
    with pytest.raises(ValueError, match=r"holds \.jsonl and \.tar files; choose by a pattern"):
        open_dataset(f"{tmp_path}/*")


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path):
    (record,) = open_dataset(shard(tmp_path / "a[1]{2}.tar", sample("0")))
    assert record.prompt == "a cat"


def test_a_folder_of_shards_is_one_dataset_and_one_with_media_beside_them_is_refused(tmp_path):
    shard(tmp_path / "b" / "0.tar", sample("0"))
    shard(tmp_path / "a" / "1.tar", sample("1"))
    assert [record.id for record in open_dataset(str(tmp_path))] == ["1/1", "0/0"]
    (tmp_path / "c.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"holds media and 1\.tar"):
        open_dataset(str(tmp_path))


# ---------------------------------------------------------------- saved datasets


def test_a_saved_dataset_is_read_in_the_order_of_its_files(tmp_path):
    rows = [{"prompt": f"p{k}", "image": {"bytes": b"x", "path": None}} for k in range(5)]
    dataset = open_dataset(saved(tmp_path / "d", rows[:3], rows[3:]))
    assert dataset.schema.name == "generic"
    records = list(dataset)
    assert [record.prompt for record in records] == [f"p{k}" for k in range(5)]
    assert records[4].media == [Media(data=b"x")]


def test_of_a_saved_dataset_in_splits_one_must_be_named(tmp_path):
    for split in ("train", "test"):
        saved(tmp_path / split, [{"prompt": split, "image": b"x"}])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"the splits train, test; name one, such as .*/train"):
        open_dataset(str(tmp_path))
    (record,) = open_dataset(str(tmp_path / "test"))
    assert record.prompt == "test"


def test_a_saved_dataset_that_breaks_off_or_lacks_a_file_is_refused(tmp_path):
    folder = Path(saved(tmp_path / "d", [{"prompt": "p", "image": b"x" * 999}]))
    file = next(folder.glob("*.arrow"))
    file.write_bytes(file.read_bytes()[:-700])
    with pytest.raises(ValueError, match="is truncated or not an Arrow stream"):
        list(open_dataset(str(folder)))
    file.unlink()
    with pytest.raises(ValueError, match=r"\.arrow' does not exist"):
        open_dataset(str(folder))


# ---------------------------------------------------------------- links


def test_a_broken_link_is_a_row_that_fails_with_its_reason(tmp_path):
    picture(tmp_path / "a.png", 1)
    (tmp_path / "b.png").symlink_to("gone.png")
    before = open_dataset(str(tmp_path))
    first, second = before
    assert decode(first.media[0]).pixels.shape[1] == 3
    with pytest.raises(MediaProblem, match=r"broken link: .*b\.png points to gone\.png"):
        decode(second.media[0])
    identity = before.identity()
    (tmp_path / "c.png").symlink_to("gone.png")
    assert open_dataset(str(tmp_path)).identity() != identity


def test_a_broken_link_to_a_prompt_fails_its_row(tmp_path):
    picture(tmp_path / "a.png", 1)
    (tmp_path / "a.txt").symlink_to("gone.txt")
    (record,) = open_dataset(str(tmp_path))
    assert record.problem.endswith("(a.png) has a broken link as its prompt")


def test_links_to_folders_are_followed_but_never_in_a_circle(tmp_path):
    (tmp_path / "real").mkdir()
    picture(tmp_path / "real" / "a.png", 1)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "back").symlink_to(tmp_path / "data")
    assert [record.id for record in open_dataset(str(tmp_path / "data"))] == ["linked/a.png"]


@pytest.mark.parametrize("name", ["data.jsonl", "metadata.jsonl", "shard.tar"])
def test_a_table_that_is_a_broken_link_is_refused(tmp_path, name):
    picture(tmp_path / "a.png", 1)
    (tmp_path / name).symlink_to("gone")
    source = tmp_path if name == "metadata.jsonl" else tmp_path / name
    with pytest.raises(ValueError, match="is a broken link to gone"):
        open_dataset(str(source))
