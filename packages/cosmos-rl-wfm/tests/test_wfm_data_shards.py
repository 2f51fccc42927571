"""Tar shards on a disk and in an object store: rows at known places, indexes kept, and stores that refuse, named."""

import io
import json
import logging
import random
import re
import socket
import tarfile
from collections import Counter

import numpy as np
import pytest
from safetensors.numpy import save

from cosmos_rl_core.data.source import PromptSource
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.observe.gallery import write_video
from cosmos_rl_wfm.data import shards as shards_module
from cosmos_rl_wfm.data.cache import identity
from cosmos_rl_wfm.data.clips import ClipReader
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.data.loader import ClipLoader
from cosmos_rl_wfm.data.rows import load_rows
from cosmos_rl_wfm.data.shards import expand
from cosmos_rl_wfm.data.storage import endpoint, reaching, read_bytes, s3_options

pytestmark = pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")

SECRET = "not-to-be-told"


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """The bytes of four clips, grey as their number."""
    root = tmp_path_factory.mktemp("videos")
    for number in range(4):
        write_video(root / f"{number}.mp4", np.full((6, 16, 16, 3), 40 * number, np.uint8), fps=8)
    return [(root / f"{number}.mp4").read_bytes() for number in range(4)]


def tar(path, members):
    """An archive of (name, bytes)."""
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


@pytest.fixture
def folder(tmp_path, videos):
    """Two shards of two clips."""
    root = tmp_path / "shards"
    root.mkdir()
    for shard in range(2):
        numbers = (2 * shard, 2 * shard + 1)
        members = [
            (f"{n:04d}.{end}", data) for n in numbers for end, data in (("mp4", videos[n]), ("txt", b"clip %d" % n))
        ]
        tar(root / f"clips-{shard:03d}.tar", members)
    return root


@pytest.fixture
def make(tmp_path):
    """Configs with a cache folder of this test."""

    def config(path, **keys):
        size = {"frames": 6, "height": 16, "width": 16}
        held = {"path": str(path), "size": size, "cache_path": str(tmp_path / "cache"), "timeout_s": 5, **keys}
        return WFMDataConfig.model_validate(held)

    return config


def greys(config, rows):
    """The clips of rows, as the numbers they were made of."""
    reader = ClipReader(config)
    return [round(reader.clip(row, np.random.default_rng(0)).video.mean() / 40) for row in rows]


def captions(config, rows, *, count, first=0):
    """The captions of a stream's clips; None where there is none."""
    source = PromptSource(rows, origin="shards", seed=2)
    clips = ClipLoader(config, seed=2).load([source[first + place] for place in range(count)])
    return [None if clip is None else clip.caption for clip in clips]


@pytest.mark.parametrize("path", ["clips-{000..001}.tar", "clips-*.tar", "", "clips-00{0,1}.tar"])
def test_shards_are_rows_at_known_places(folder, make, path):
    config = make(folder / path)
    rows, _ = load_rows(config)
    assert [(row["key"], row["caption"], row["position"]) for row in rows] == [
        ("clips-000/0000", "clip 0", 0),
        ("clips-000/0001", "clip 1", 1),
        ("clips-001/0002", "clip 2", 0),
        ("clips-001/0003", "clip 3", 1),
    ]
    assert rows[3]["video"] == str(folder / "clips-001.tar")
    assert greys(config, rows) == [0, 1, 2, 3]


def test_rows_can_travel_as_json(folder, make):
    rows, _ = load_rows(make(folder))
    assert json.loads(json.dumps(rows)) == rows


def test_braces_stand_for_names():
    assert expand("s3://b/{x,y}/c-{008..010}.tar") == [
        f"s3://b/{word}/c-{number}.tar" for word in "xy" for number in ("008", "009", "010")
    ]
    with pytest.raises(UserError, match=r"\{3\.\.1\} counts down"):
        expand("c-{3..1}.tar")


def test_shards_of_the_webdataset_library_are_read(tmp_path, make, videos):
    TarWriter = pytest.importorskip("webdataset").TarWriter
    with TarWriter(str(tmp_path / "w.tar")) as sink:
        for number in (2, 1):
            caption = {"caption": f"clip {number}", "score": number}
            sink.write({"__key__": f"sub.dir/s{number}", "mp4": videos[number], "json": caption})
    config = make(tmp_path / "w.tar")
    rows, _ = load_rows(config)
    assert [(row["key"], row["score"]) for row in rows] == [("w/sub.dir/s2", 2), ("w/sub.dir/s1", 1)]
    assert greys(config, rows) == [2, 1]


def test_embeddings_lie_in_shards_too(tmp_path, make, videos):
    embedding = save({"x": np.ones((3, 8), np.float32)})
    members = [("a.mp4", videos[0]), ("a.t5.safetensors", embedding), ("a.json", b'{"caption": "x"}')]
    tar(tmp_path / "e.tar", members)
    config = make(tmp_path / "e.tar")
    (row,), _ = load_rows(config)
    assert ClipReader(config, text_width=8).text(row).shape == (3, 8)
    (row,), _ = load_rows(make(tmp_path / "e.tar", text_embeddings="off"))
    assert row["text_embedding"] == ""


def test_samples_without_a_clip_or_caption_are_named(tmp_path, make, videos, caplog):
    members = [
        ("a.mp4", videos[0]),
        ("b.txt", b"x"),
        ("c.mp4", videos[1]),
        ("c.txt", b" "),
        ("d.mp4", videos[1]),
        ("d.txt", b"y"),
    ]
    tar(tmp_path / "m.tar", members)
    (row,), _ = load_rows(make(tmp_path / "m.tar"))
    assert row["key"] == "m/d"
    for reason in ("m.tar/a (no caption)", "m.tar/b (no clip; there are .txt)", "m.tar/c (its caption is empty)"):
        assert reason in caplog.text


def test_files_that_macos_adds_to_an_archive_or_a_folder_are_no_samples(tmp_path, make, videos, caplog):
    attributes = b"\x00\x05\x16\x07" + bytes(100)
    members = [("._0000.mp4", attributes), ("0000.mp4", videos[1]), ("._0000.txt", attributes), ("0000.txt", b"one")]
    (tmp_path / "mac").mkdir()
    tar(tmp_path / "mac" / "m.tar", members)
    (tmp_path / "mac" / "._m.tar").write_bytes(attributes)
    config = make(tmp_path / "mac")
    rows, _ = load_rows(config)
    assert ([(row["key"], row["caption"]) for row in rows], greys(config, rows)) == ([("m/0000", "one")], [1])
    (tmp_path / "folder").mkdir()
    for name, data in members:
        (tmp_path / "folder" / name).write_bytes(data)
    rows, _ = load_rows(make(tmp_path / "folder"))
    assert [(row["key"], row["caption"]) for row in rows] == [("0000", "one")]
    assert caplog.text == ""


def test_a_name_that_occurs_again_is_one_row_of_its_last_files(tmp_path, make, videos, caplog):
    first = [("a.mp4", videos[0]), ("a.txt", b"old"), ("b.mp4", videos[1])]
    tar(tmp_path / "m.tar", [*first, ("a.mp4", videos[2]), ("a.txt", b"new"), ("b.txt", b"apart")])
    config = make(tmp_path / "m.tar")
    for _ in range(2):  # by its headers, and by the cached index
        caplog.clear()
        rows, _ = load_rows(config)
        assert [(row["key"], row["caption"]) for row in rows] == [("m/a", "new"), ("m/b", "apart")]
        assert greys(config, rows) == [2, 1]
        assert "2 left out: m.tar/a.mp4 (the name occurs again); m.tar/a.txt (the name occurs again)" in caplog.text


def test_a_cut_shard_gives_the_samples_before_the_cut(folder, make, caplog):
    whole = (folder / "clips-000.tar").read_bytes()
    rows, _ = load_rows(make(folder))
    start, size = rows[1]["video_at"]
    (folder / "clips-000.tar").write_bytes(whole[: start + size // 2])
    rows, _ = load_rows(make(folder))
    assert [row["caption"] for row in rows] == ["clip 0", "clip 2", "clip 3"]
    assert "clips-000.tar (is damaged or no plain tar, read up to sample 2" in caplog.text


def test_a_shard_with_a_bad_header_gives_the_samples_before_it_and_is_named(folder, make, caplog):
    whole = bytearray((folder / "clips-000.tar").read_bytes())
    rows, _ = load_rows(make(folder))
    start, _ = rows[1]["video_at"]
    whole[start - 512 : start - 500] = b"no such name"
    (folder / "clips-000.tar").write_bytes(whole)
    rows, _ = load_rows(make(folder))
    assert [row["caption"] for row in rows] == ["clip 0", "clip 2", "clip 3"]
    assert f"clips-000.tar (is damaged at byte {start - 512}, read up to sample 1)" in caplog.text


@pytest.mark.parametrize(("content", "wrong"), [(b"no tar" * 200, "no plain tar"), (None, "there is no such shard")])
def test_shards_that_are_none_are_one_clear_error(tmp_path, make, content, wrong):
    if content is not None:
        (tmp_path / "n.tar").write_bytes(content)
    with pytest.raises(UserError, match=rf"no row is left: .*n\.tar \(.*{wrong}"):
        load_rows(make(tmp_path / "n.tar"))


def test_an_index_is_read_once_and_again_when_the_shard_changes(folder, make, monkeypatch, videos):
    indexed = []
    real = shards_module.index_tar
    monkeypatch.setattr(shards_module, "index_tar", lambda file: indexed.append(1) or real(file))
    first, _ = load_rows(make(folder))
    again, _ = load_rows(make(folder))
    assert again == first and len(indexed) == 2
    tar(folder / "clips-001.tar", [("0009.mp4", videos[3]), ("0009.txt", b"new")])
    rows, _ = load_rows(make(folder))
    assert [row["caption"] for row in rows] == ["clip 0", "clip 1", "new"] and len(indexed) == 3


@pytest.mark.parametrize(
    "damage",
    [b"", b"[]", b'{"samples": [1]}', b'{"samples": [{"keys": 1}], "fault": ""}', b"[" * 5000],
    ids=lambda value: str(value)[:40],
)
def test_an_index_that_is_damaged_is_made_again(folder, make, damage):
    first, _ = load_rows(make(folder))
    kept = list((folder.parent / "cache/shards").iterdir())
    assert len(kept) == 2
    for file in kept:
        file.write_bytes(damage)
    assert load_rows(make(folder))[0] == first
    assert all(file.read_bytes() != damage for file in kept)


def test_a_caption_as_large_as_memory_is_left_out(tmp_path, make, videos, caplog):
    tar(
        tmp_path / "m.tar",
        [
            (f"{n}.{e}", data)
            for n, text in (("a", b"x" * 2**22), ("b", b"b"))
            for e, data in (("mp4", videos[0]), ("txt", text))
        ],
    )
    (row,), _ = load_rows(make(tmp_path / "m.tar"))
    assert row["key"] == "m/b"
    assert "m.tar/a (a caption of more than 1,048,576 bytes)" in caplog.text


def fuzz(shard, count):
    """Bytes of the headers changed; returns how many archives were whole and damaged."""
    whole, draw, outcomes = shard.read_bytes(), random.Random(0), Counter()
    with tarfile.open(shard) as archive:
        headers = [member.offset for member in archive]
    for _ in range(count):
        changed = bytearray(whole)
        for _ in range(draw.choice((1, 1, 3))):
            changed[draw.choice(headers) + draw.randrange(512)] = draw.choice(b"\x00\x80\xff 017/xgLK-")
        index = shards_module.index_tar(io.BytesIO(changed))
        assert len(index.samples) <= 2
        outcomes["damaged" if index.fault else "whole"] += 1
    return outcomes


def test_damaged_shards_give_an_index(folder):
    assert fuzz(folder / "clips-000.tar", 100).total() == 100


@pytest.mark.slow
def test_5_000_damaged_shards_give_an_index(folder):
    outcomes = fuzz(folder / "clips-000.tar", 5_000)
    print(dict(outcomes))
    assert outcomes["damaged"] > 1000


def test_a_stream_over_shards_goes_on_at_any_place(folder, make):
    config = make(folder)
    rows, _ = load_rows(config)
    whole = captions(config, rows, count=10)
    assert sorted(whole[:4]) == ["clip 0", "clip 1", "clip 2", "clip 3"]
    assert captions(config, rows, count=7, first=3) == whole[3:]


@pytest.fixture(scope="module")
def server():
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def settings(monkeypatch):
    """Set the S3 variables of a test, and no other."""
    file_system = pytest.importorskip("s3fs", reason="an extra of the package").S3FileSystem

    def set_all(url):
        for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name, raising=False)
        values = {
            "ACCESS_KEY_ID": "reader",
            "SECRET_ACCESS_KEY": SECRET,
            "ENDPOINT_URL": url,
            "REGION_NAME": "us-east-1",
        }
        for name, value in values.items():
            monkeypatch.setenv(f"PROD_S3_CHECKPOINT_{name}", value)
        file_system.clear_instance_cache()

    yield set_all
    file_system.clear_instance_cache()


@pytest.fixture
def bucket(server, settings, folder, request):
    """A bucket of this test with the shards."""
    settings(server)
    name = re.sub("[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())[:60].strip("-")
    client = pytest.importorskip("boto3").client(
        "s3", endpoint_url=server, aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1"
    )
    client.create_bucket(Bucket=name)
    for shard in folder.iterdir():
        client.upload_file(str(shard), name, f"data/{shard.name}")
    return client, name


@pytest.mark.parametrize("path", ["data/clips-{000..001}.tar", "data"])
def test_shards_in_a_bucket_are_rows(bucket, make, path):
    config = make(f"s3://{bucket[1]}/{path}")
    rows, _ = load_rows(config)
    assert [row["caption"] for row in rows] == ["clip 0", "clip 1", "clip 2", "clip 3"]
    assert rows[2]["video"] == f"s3://{bucket[1]}/data/clips-001.tar"
    assert greys(config, rows) == [0, 1, 2, 3]


def test_a_folder_in_a_bucket_is_rows(bucket, make, videos):
    client, name = bucket
    for key, body in {"metas/a.txt": b"clip 3", "videos/a.mp4": videos[3], "videos/b.mp4": b""}.items():
        client.put_object(Bucket=name, Key=f"set/{key}", Body=body)
    config = make(f"s3://{name}/set")
    rows, _ = load_rows(config)
    assert [(row["caption"], row["video"]) for row in rows] == [("clip 3", f"s3://{name}/set/videos/a.mp4")]
    assert greys(config, rows) == [3]


def test_a_list_of_prompts_in_a_bucket_is_rows(bucket, make):
    client, name = bucket
    client.put_object(Bucket=name, Key="p.jsonl", Body=b'{"caption": "x", "video": "v/a.mp4"}')
    (row,), _ = load_rows(make(f"s3://{name}/p.jsonl"))
    assert row["video"] == f"s3://{name}/v/a.mp4"


def test_an_object_that_changes_has_another_identity(bucket):
    client, name = bucket
    row = {"video": f"s3://{name}/data/clips-000.tar"}
    before = identity(row)
    client.put_object(Bucket=name, Key="data/clips-000.tar", Body=b"other")
    assert identity(row) != before


def test_a_clip_that_went_away_is_a_fault_of_its_row(bucket, make, caplog):
    client, name = bucket
    config = make(f"s3://{name}/data")
    rows, _ = load_rows(config)
    client.delete_object(Bucket=name, Key="data/clips-000.tar")
    assert sorted(captions(config, rows, count=4), key=str) == [None, None, "clip 2", "clip 3"]
    assert "clips-000/0000: cannot be read" in caplog.text
    assert "clips-000/0001: cannot be read" in caplog.text


def test_a_store_that_stops_answering_ends_the_step_and_is_named(bucket, make, settings, monkeypatch):
    config = make(f"s3://{bucket[1]}/data")
    rows, _ = load_rows(config)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        settings(f"http://127.0.0.1:{free.getsockname()[1]}")
    with pytest.raises(UserError, match=r"s3://.*/data/clips-.*\.tar: http://127\.0\.0\.1:\d+ cannot be reached"):
        captions(config, rows, count=4)


def test_keys_reach_neither_files_nor_logs(bucket, make, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        load_rows(make(f"s3://{bucket[1]}/data"))
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written and not [path for path in written if SECRET.encode() in path.read_bytes()]
    assert SECRET not in caplog.text


def test_a_missing_bucket_is_named(server, settings, make):
    settings(server)
    with pytest.raises(UserError, match=r"s3://no-such-bucket/data'?: .*no such folder"):
        load_rows(make("s3://no-such-bucket/data"))


def test_a_store_that_refuses_the_key_is_named_with_what_to_look_at(settings):
    settings("http://store:9")
    wanted = r"s3://b/x: http://store:9 refuses: Access Denied\. Check PROD_S3_CHECKPOINT_ACCESS_KEY_ID"
    with pytest.raises(UserError, match=wanted), reaching("s3://b/x"):
        raise PermissionError("Access Denied")


def test_an_endpoint_that_refuses_is_named_with_what_to_look_at(settings, make, monkeypatch):
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings(f"http://user:{SECRET}@127.0.0.1:{port}")
    wanted = rf"s3://bucket/data: http://127\.0\.0\.1:{port} cannot be reached: .*Check PROD_S3_CHECKPOINT_ENDPOINT_URL"
    with pytest.raises(UserError, match=wanted) as caught:
        load_rows(make("s3://bucket/data"))
    assert SECRET not in str(caught.value)


def test_an_endpoint_that_never_answers_is_named(settings, monkeypatch):
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        settings(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(
            UserError, match=r"s3://bucket/a\.mp4: http://127\.0\.0\.1:\d+ cannot be reached: .*[Tt]imeout"
        ):
            read_bytes("s3://bucket/a.mp4", timeout_s=0.2)


def test_settings_come_from_the_environment_or_are_left_to_that_of_aws():
    options = s3_options({"PROD_S3_CHECKPOINT_ENDPOINT_URL": "http://store", "PROD_S3_CHECKPOINT_REGION_NAME": "eu"})
    assert options["client_kwargs"] == {"endpoint_url": "http://store", "region_name": "eu"}
    assert "key" not in options
    assert s3_options({})["client_kwargs"] == {}
    with pytest.raises(UserError, match=r"PROD_S3_CHECKPOINT_ACCESS_KEY_ID is set and .*SECRET_ACCESS_KEY is not"):
        s3_options({"PROD_S3_CHECKPOINT_ACCESS_KEY_ID": "x"})


def test_the_endpoint_is_named_without_its_password():
    assert endpoint({"AWS_ENDPOINT_URL": "http://me:pw@store:9/x"}) == "http://store:9/x"
    assert endpoint({}) == "the AWS endpoint"
