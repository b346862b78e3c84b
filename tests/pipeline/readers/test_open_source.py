"""How a source is found, and what is not followed, opened or believed."""

import contextlib
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.graph import frames
from pipeline.readers import READERS, open_source
from pipeline.readers.folders import inside, natural_key, numbered, read_inside
from pipeline.readers.lbc import LbcReader
from pipeline.readers.others import index_source
from pipeline.readers.records import parse_record
from schemas.errors import Reason, SourceError, UsageError
from schemas.source import Fault
from tests.pipeline.readers import (
    builders,
    hdf5_builders,
    replay_builder,
)
from tests.pipeline.readers.test_damage import WRITERS


@pytest.mark.parametrize("name", READERS)
def test_the_format_is_found_or_may_be_named(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / "raw")
    for format in ("", name):
        reader = open_source(tmp_path / "raw", format)
        assert type(reader) is READERS[name]
        assert reader.root == tmp_path / "raw"
        assert reader.index().format == name


def test_recordings_of_another_format_beside_are_said_with_the_way_to_read_them(tmp_path: Path) -> None:
    builders.write_lbc_route(tmp_path / "town/route_1")
    builders.write_npy(tmp_path / "town/arm/run")
    hdf5_builders.write_aloha(tmp_path / "hands", (3, 2))
    (tmp_path / "papers").mkdir()
    reader = open_source(tmp_path)
    notes = index_source(reader).notes
    assert [note.partition(",")[0] for note in notes if "format" in note] == [
        "hands holds 2 episodes of format aloha",
        "town/arm holds 1 episode of format npy",
    ]
    assert all("as a source of its own" in note for note in notes if "format" in note)
    assert index_source(reader, is_chosen=True).notes == reader.index().notes


@pytest.mark.parametrize("name", READERS)
def test_one_format_alone_is_not_told_of_others(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / "raw" / "one")
    reader = open_source(tmp_path / "raw" / ("one" if name == "lerobot" else ""))
    assert index_source(reader) == reader.index()


def test_a_message_says_what_was_tried_and_what_each_missed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing here")
    with pytest.raises(SourceError) as caught:
        open_source(tmp_path)
    for name in READERS:
        assert f"{name}: no " in str(caught.value)


def test_a_format_that_is_named_but_not_there_says_what_is_missing(tmp_path: Path) -> None:
    builders.write_lbc_route(tmp_path / "route")
    with pytest.raises(SourceError, match="bench2drive: no folder with anno/ and camera/"):
        open_source(tmp_path, "bench2drive")
    with pytest.raises(UsageError, match=f"expected a format of {', '.join(READERS)}, found 'vla'"):
        open_source(tmp_path, "vla")


@pytest.mark.parametrize("name", READERS)
def test_no_folder_an_empty_one_and_a_file_are_one_clear_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "raw.tar.gz").write_bytes(b"\x1f\x8b")
    for path, match in (
        ("nowhere", "found nothing at"),
        ("empty", "found the empty folder"),
        ("raw.tar.gz", "found the file"),
    ):
        with pytest.raises(SourceError, match=match):
            open_source(tmp_path / path)
        with pytest.raises(SourceError, match=match):
            open_source(tmp_path / path, name)
        with pytest.raises(SourceError, match=match):
            READERS[name](tmp_path / path).index()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(SourceError, match="check the permissions") as caught:
        open_source(tmp_path / "closed")
    assert caught.value.reason == Reason.IO


def test_links_that_leave_the_source_are_refused_and_others_serve(tmp_path: Path) -> None:
    outside = builders.write_lbc_route(tmp_path / "outside")
    route = builders.write_lbc_route(tmp_path / "raw/route")
    (tmp_path / "raw/away").symlink_to(outside)
    (tmp_path / "raw/again").symlink_to(route)
    (tmp_path / "raw/route/loop").symlink_to(tmp_path / "raw")
    (route / "rgb/0001.png").unlink()
    (route / "rgb/0001.png").symlink_to(outside / "rgb/0001.png")
    (route / "rgb/0002.png").unlink()
    (route / "rgb/0002.png").symlink_to("0003.png")
    reader = LbcReader(tmp_path / "raw")
    index = reader.index()
    assert [ref.key for ref in index.episodes] == ["route"]  # and not once more through the link beside it
    assert [(fault.reason, fault.path) for fault in index.faults] == [(Reason.UNSUPPORTED, "away")]
    found = list(frames(reader, index.episodes[0], "rgb", np.arange(4)))
    assert [frame.reason if isinstance(frame, Fault) else int(frame[0, 0, 1]) // 8 for frame in found] == [
        0,
        Reason.UNSUPPORTED,
        3,
        3,
    ]


def test_a_root_may_be_a_link(tmp_path: Path) -> None:
    builders.write_lbc_route(tmp_path / "raw/route")
    (tmp_path / "link").symlink_to(tmp_path / "raw")
    reader = open_source(tmp_path / "link")
    (ref,) = reader.index().episodes
    assert isinstance(next(frames(reader, ref, "rgb", np.arange(1))), np.ndarray)


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    builders.write_lbc_route(tmp_path / "route")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").symlink_to(tmp_path / "a")
    (tmp_path / "c").symlink_to(tmp_path / "c")
    assert [ref.key for ref in LbcReader(tmp_path).index().episodes] == ["route"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    route = builders.write_lbc_route(tmp_path / "route")
    (route / "rgb/0000.png").unlink()
    os.mkfifo(route / "rgb/0000.png")
    reader = LbcReader(route)
    found: list[object] = []

    def read() -> None:
        (ref,) = reader.index().episodes
        found.extend(frames(reader, ref, "rgb", np.array([0])))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(20)
    assert [fault.reason for fault in found if isinstance(fault, Fault)] == [Reason.UNSUPPORTED]


def test_a_file_may_not_be_larger_than_its_kind(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1001)
    with pytest.raises(SourceError) as caught:
        read_inside(tmp_path, "large", 1000)
    assert caught.value.reason == Reason.TOO_LARGE
    assert len(read_inside(tmp_path, "large", 1001)) == 1001
    assert len(read_inside(tmp_path, "large", 1001, head_nbytes=7)) == 7


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "\0"])
def test_a_path_may_not_leave_the_source(tmp_path: Path, path: str) -> None:
    with pytest.raises(SourceError):
        inside(tmp_path, path)


def test_names_that_are_no_text_are_refused(tmp_path: Path) -> None:
    builders.write_lbc_route(tmp_path / "route")
    try:
        os.mkdir(os.fsencode(tmp_path) + b"/route_\xff")
    except OSError:
        pytest.skip("this file system takes no such names")
    index = LbcReader(tmp_path).index()
    assert [ref.key for ref in index.episodes] == ["route"]
    assert ["UTF-8" in fault.message for fault in index.faults] == [True]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 10**20)), max_size=20))
def test_natural_order_is_the_order_of_the_numbers(pairs: list[tuple[str, int]]) -> None:
    names = sorted((f"{letter}_{number}" for letter, number in pairs), key=natural_key)
    assert names == [f"{letter}_{number}" for letter, number in sorted(pairs)]


@given(st.lists(st.text("/0a1", max_size=8) | st.text(max_size=8), max_size=12))
@example(["a", "a/b"])
@example(["a", "a/1", "a/b", "1"])
def test_any_names_can_be_ordered(names: list[str]) -> None:
    assert sorted(sorted(names, key=natural_key)) == sorted(names)


def test_numbers_are_taken_from_names_and_nothing_else() -> None:
    names = {
        "00001.json.gz",
        "00007.json.gz",
        "-0001.json.gz",
        "00002.json.gz.part",
        "x.json.gz",
        "٣.json.gz",
        "9999999999.json.gz",
    }
    found = numbered(frozenset(names), (".json.gz",))
    assert (found.first, found.stop, found.count, found.width, found.others) == (1, 8, 2, 5, 5)


@given(
    st.dictionaries(
        st.text("ab' \"\\\n(", max_size=5),
        st.none() | st.booleans() | st.floats() | st.text("True'(nan)\\", max_size=9),
    )
)
def test_the_repr_of_a_record_is_read_as_the_record(record: dict[str, object]) -> None:
    found = parse_record(repr(record).encode())
    if any("\\" in repr(text) for pair in record.items() for text in pair):
        return  # Python's escapes are not JSON's: such a record need only not raise another error
    assert repr(found) == repr(record)


@given(st.binary(max_size=200) | st.text("{}[]'\":,()\\ntruefalsenaninf0123456789.eE+- ", max_size=200).map(str.encode))
def test_any_bytes_are_a_record_or_an_error_of_ours(data: bytes) -> None:
    with contextlib.suppress(SourceError):
        assert isinstance(parse_record(data), dict)


@pytest.mark.parametrize(
    "data", [b"[" * 200_000, b"{'a':" * 50_000, b"'\\" * 500_000, b"{'" + b"\\'" * 500_000, b"9" * 10_000]
)
def test_hostile_records_are_refused_in_good_time(data: bytes) -> None:
    with pytest.raises(SourceError):
        parse_record(data)


def test_a_replay_buffer_may_be_given_by_its_own_folder(tmp_path: Path) -> None:
    replay_builder.write_pusht(tmp_path / "raw")
    (ends,) = (tmp_path / "raw").rglob("meta/episode_ends/.zarray")
    store = ends.parents[2]
    reader = open_source(store)
    assert reader.name == "diffusion-policy"
    assert reader.index().episodes
