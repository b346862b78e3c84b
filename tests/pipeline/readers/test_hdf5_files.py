"""HDF5 files are opened without trusting them."""

import builtins
import os
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.readers import READERS, hdf5_rows, hdf5_texts, open_source
from pipeline.readers.hdf5_files import Hdf5File, open_hdf5
from schemas.errors import MissingExtraError, Reason, SourceError
from schemas.source import Fault
from tests.pipeline.readers import hdf5_builders as builders


@contextmanager
def opened(path: Path) -> Iterator[Hdf5File]:
    with open_hdf5(path.parent, path.name) as file:
        yield file


def read_all(path: Path, name: str) -> np.ndarray:
    """Read an array step by step, a block at a time."""
    with opened(path) as file:
        rows = file.rows(name)
        out, step = [], 0
        while step < rows.num_steps:
            first, last = rows.block(step, rows.num_steps)
            assert first <= step < last
            out.append(rows.read(first, last)[step - first :])
            step = last
    return np.concatenate(out)


# -- links and storage that lead elsewhere -----------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["group/rows"] = np.arange(6.0).reshape(3, 2)
    (tmp_path / "secret.bin").write_bytes(bytes(range(48)))
    return tmp_path


def test_links_that_leave_the_file_are_refused_and_others_serve(secret: Path) -> None:
    path = secret / "a.h5"
    with h5py.File(path, "w") as file:
        file["real/rows"] = np.ones((3, 2))
        file["hard"] = file["real/rows"]
        file["soft"] = h5py.SoftLink("/real/rows")
        file["real/beside"] = h5py.SoftLink("rows")
        file["twice"] = h5py.SoftLink("soft")
        file["dangling"] = h5py.SoftLink("/nowhere/rows")
        file["circle"] = h5py.SoftLink("/circle")
        file["outside"] = h5py.ExternalLink("secret.h5", "/group/rows")
        file["outside_group"] = h5py.ExternalLink("secret.h5", "/group")
        file["through"] = h5py.SoftLink("/outside_group/rows")
    with opened(path) as file:
        for name in ("hard", "soft", "real/beside", "twice", "/real/rows", "./real/rows"):
            assert file.rows(name).num_steps == 3
        for name in ("circle", "outside", "outside_group/rows", "through"):
            for ask in (file.rows, file.is_array, file.names):
                with pytest.raises(SourceError, match="a link that leaves it or runs in a circle") as caught:
                    ask(name)
                assert caught.value.reason == Reason.UNSUPPORTED
        assert not file.is_array("dangling")
        assert file.names("dangling") == []


def test_arrays_that_are_stored_in_other_files_are_refused(secret: Path) -> None:
    path = secret / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("external", (3, 2), "f8", external=[(str(secret / "secret.bin"), 0, 48)])
        layout = h5py.VirtualLayout((3, 2), "f8")
        layout[:] = h5py.VirtualSource("secret.h5", "group/rows", (3, 2))
        file.create_virtual_dataset("virtual", layout)
    with opened(path) as file:
        for name in ("external", "virtual"):
            with pytest.raises(SourceError, match="stored in others") as caught:
                file.rows(name)
            assert caught.value.reason == Reason.UNSUPPORTED


def test_a_link_out_of_the_source_is_not_opened(secret: Path) -> None:
    (secret / "raw").mkdir()
    (secret / "raw/episode_0.hdf5").symlink_to(secret / "secret.h5")
    builders.write_aloha(secret / "raw/good", (2,))
    index = open_source(secret / "raw").index()
    assert [ref.key for ref in index.episodes] == ["good/episode_0"]
    assert [(fault.path, fault.reason) for fault in index.faults] == [("episode_0.hdf5", Reason.UNSUPPORTED)]


# -- what is no array of numbers ---------------------------------------------------------------------------------------


def test_objects_text_pairs_and_references_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["text"] = ["free", "length"]
        file["fixed"] = np.array([b"a", b"b"])
        file["pairs"] = np.zeros(3, [("a", "f4"), ("b", "i4")])
        file["complex"] = np.zeros(3, np.complex64)
        file["scalar"] = 3.0
        file["empty"] = h5py.Empty("f4")
        file["opaque"] = np.array([b"ab", b"cd"]).view("V2")
        file.create_dataset("reference", data=[file["scalar"].ref], dtype=h5py.ref_dtype)
        ragged = file.create_dataset("ragged", (2,), h5py.vlen_dtype(np.uint8))
        ragged[0] = [1, 2, 3]
        file["group/x"] = 1
        names = [name for name in file if name != "group"]
    with opened(path) as file:
        for name in names:
            with pytest.raises(SourceError, match="plain numbers along steps") as caught:
                file.rows(name)
            assert caught.value.reason == Reason.UNSUPPORTED
        for name in ("group", "nothing", "scalar/x"):
            with pytest.raises(SourceError, match="found none") as caught:
                file.rows(name)


def test_attributes_are_texts_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        values = {"text": "é", "bytes": b"\xff", "fixed": np.bytes_("ab"), "one": ["x"], "two": ["x", "y"]}
        values |= {"number": np.int64(7), "truth": np.True_, "float": 0.5, "large": np.zeros(2000), "bad": "{"}
        file.attrs.update({**values, "list": "[1]", "object": '{"a": 1}'})
    with opened(path) as file:
        found = {name: file.text("/", name) for name in (*values, "absent") if name != "large"}
        assert found == {
            "text": "é",
            "bytes": "?",  # of no encoding
            "fixed": "ab",
            "one": "x",
            "two": "",
            "number": "7",
            "truth": "True",
            "float": "",
            "bad": "{",
            "absent": "",
        }
        assert file.mapping("/", "object") == {"a": 1}
        assert file.mapping("/", "absent") == file.mapping("/nowhere", "object") == {}
        for name in ("bad", "list"):
            with pytest.raises(SourceError, match="expected JSON|expected a JSON object"):
                file.mapping("/", name)
        monkeypatch.setattr("pipeline.readers.hdf5_files.MAX_TEXT_NBYTES", 1000)
        with pytest.raises(SourceError, match="a short text") as caught:
            file.text("/", "large")
        assert caught.value.reason == Reason.TOO_LARGE


# -- chunks ------------------------------------------------------------------------------------------------------------


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4)),
    chunk=st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4)) | st.none(),
    dtype=st.sampled_from(["u1", "<f4", ">f8", ">i2", "bool"]),
    packing=st.fixed_dictionaries(
        {"shuffle": st.booleans(), "fletcher32": st.booleans(), "compression": st.sampled_from([None, "gzip", "lzf"])}
    ),
)
def test_rows_are_those_that_h5py_reads(tmp_path_factory, shape, chunk, dtype, packing) -> None:
    path = tmp_path_factory.getbasetemp() / "packed.h5"
    values = np.random.default_rng(1).integers(0, 2 if dtype == "bool" else 200, shape).astype(dtype)
    chunk = chunk and tuple(min(pair) for pair in zip(chunk, shape, strict=True))
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, chunks=chunk, **(packing if chunk else {}))
        file.create_dataset("y", data=values, chunks=chunk, maxshape=(None, *shape[1:]) if chunk else None)
    for name in ("x", "y"):
        found = read_all(path, name)
        assert found.dtype == np.dtype(dtype).newbyteorder("=")
        np.testing.assert_array_equal(found, values)


def test_a_packed_chunk_unpacks_to_no_more_than_its_size(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    bomb = zlib.compress(bytes(2**24))
    with h5py.File(path, "w") as file:
        data = file.create_dataset("x", (4, 8), "u1", chunks=(2, 8), compression="gzip")
        data[:2] = 7
        data.id.write_direct_chunk((2, 0), bomb)
    with opened(path) as file:
        rows = file.rows("x")
        np.testing.assert_array_equal(rows.read(0, 2), np.full((2, 8), 7))
        with pytest.raises(SourceError, match="unpacks to 16 bytes") as caught:
            rows.read(2, 4)
        assert caught.value.reason == Reason.DECODE


def test_filters_that_stack_or_are_unknown_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple((4, 8))
        for name, filters in (("twice", (1, 1)), ("foreign", (32015,))):
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_chunk((2, 8))
            for code in filters:
                plist.set_filter(code, h5py.h5z.FLAG_OPTIONAL, (1,))
            h5py.h5d.create(file.id, name.encode(), h5py.h5t.NATIVE_UINT8, space, plist)
    with opened(path) as file:
        for name, code in (("twice", r"\[1, 1\]"), ("foreign", r"\[32015\]")):
            with pytest.raises(SourceError, match=f"HDF5 filters {code}") as caught:
                file.rows(name)
            assert caught.value.reason == Reason.UNSUPPORTED


@pytest.mark.parametrize("compression", [None, "gzip", "lzf"])
@pytest.mark.parametrize("chunks", [None, (2, 8)])
def test_rows_that_were_never_written_are_not_shown_as_zeros(tmp_path: Path, chunks, compression) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        data = file.create_dataset("x", (6, 8), "u1", chunks=chunks, **({"compression": compression} if chunks else {}))
        if chunks:
            data[:2] = 1
    with opened(path) as file:
        rows = file.rows("x")
        with pytest.raises(SourceError, match="never written") as caught:
            rows.read(*rows.block(2, 4))
        assert caught.value.reason == Reason.TRUNCATED
        if chunks:
            assert rows.read(*rows.block(1, 2)).all()


def test_rows_and_chunks_have_a_greatest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("long", (2**40,), "u1", chunks=(1024,))
        file.create_dataset("wide", (2, 2**30), "u1", chunks=(1, 1024))
        file.create_dataset("thick", (8, 64), "u1", chunks=(8, 64), compression="gzip")
    monkeypatch.setattr(hdf5_rows, "MAX_BLOCK_NBYTES", 511)
    with opened(path) as file:
        for name in ("long", "wide", "thick"):
            with pytest.raises(SourceError) as caught:
                file.rows(name)
            assert caught.value.reason == Reason.TOO_LARGE


def test_a_damaged_chunk_costs_its_own_steps(tmp_path: Path) -> None:
    demo = {"actions": builders.rows(6, 7), "obs/front": np.full((6, 4, 4, 3), 9, np.uint8)}
    path = builders.write_demos(tmp_path / "a.hdf5", {"demo_0": demo})
    with h5py.File(path, "a") as file:
        for name in ("actions", "obs/front"):
            del file[f"data/demo_0/{name}"]
            data = file["data/demo_0"].create_dataset(
                name, data=demo[name], chunks=(2, *demo[name].shape[1:]), compression="gzip"
            )
            data.id.write_direct_chunk((2,) + (0,) * (data.ndim - 1), b"no deflate")
    reader = open_source(tmp_path)
    (ref,) = reader.index().episodes
    block = reader.read_signals(ref, ["actions"], np.arange(6))
    np.testing.assert_array_equal(np.isnan(block.values["actions"][:, 0]), [False, False, True, True, False, False])
    assert [(f.stream, f.reason, f.start, f.stop) for f in block.faults] == [("actions", Reason.DECODE, 2, 4)]
    found = list(reader.read_frames(ref, "front", np.arange(6)))
    assert [isinstance(frame, Fault) for frame in found] == [False, False, True, True, False, False]


# -- processes and packages --------------------------------------------------------------------------------------------


def test_threads_read_one_file_at_once(tmp_path: Path) -> None:
    builders.write_robomimic(tmp_path / "a.hdf5", (0, 1), compression="gzip")
    reader = open_source(tmp_path)
    refs = reader.index().episodes * 8
    barrier = threading.Barrier(4)

    def read(number: int) -> list[np.ndarray | bytes | Fault]:
        if number < 4:
            barrier.wait(20)
        return list(reader.read_frames(refs[number], "agentview_image", np.arange(4)))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(read, range(len(refs))))
    for frames in found:
        np.testing.assert_array_equal(np.stack(frames), np.stack(found[0]))


@pytest.mark.parametrize("name", ["aloha", "robomimic"])
def test_without_h5py_the_extra_is_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = {"aloha": builders.write_aloha, "robomimic": lambda root: builders.write_robomimic(root / "a.hdf5")}[name]
    write(tmp_path)
    reader = open_source(tmp_path)
    ref = reader.index().episodes[0]
    real_import = builtins.__import__

    def without(module: str, *args: object, **kwargs: object) -> object:
        if module.partition(".")[0] == "h5py":
            raise ModuleNotFoundError("No module named 'h5py'", name="h5py")
        return real_import(module, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    view = ref.views[0].name
    for ask in (
        lambda: open_source(tmp_path),
        lambda: READERS[name](tmp_path).index(),
        lambda: list(reader.read_frames(ref, view, np.arange(1))),
        lambda: reader.read_signals(ref, [ref.signals[0].name], np.arange(1)),
    ):
        with pytest.raises(MissingExtraError, match=r"install h5py"):
            ask()


@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_a_file_that_is_no_hdf5_is_refused_as_such(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_bytes(b"PK\x03\x04" + bytes(5000))
    with pytest.raises(SourceError, match="file signature not found") as caught, opened(tmp_path / "a.h5"):
        pass
    assert (caught.value.reason, caught.value.where["file"]) == (Reason.DECODE, "a.h5")


def test_a_heap_that_holds_hdf5_for_ever_is_refused_once_and_the_next_file_is_read(tmp_path, monkeypatch) -> None:
    """An object of the global heap whose size wraps around: libhdf5 2.0.0 looks at it again and again."""
    monkeypatch.setattr(hdf5_texts, "WAIT_S", 2.0)
    for name in ("damaged.hdf5", "sound.hdf5"):
        with h5py.File(tmp_path / name, "w") as file:
            file.attrs["env_args"] = '{"env_name": "lift"}'
            file.create_dataset("mask/train", data=["demo_0", "demo_1"], dtype=h5py.string_dtype())
    data = bytearray((tmp_path / "damaged.hdf5").read_bytes())
    size = data.index(b"GCOL") + 16 + 8
    data[size : size + 8] = (2**64 - 16).to_bytes(8, "little")
    (tmp_path / "damaged.hdf5").write_bytes(data)
    with opened(tmp_path / "damaged.hdf5") as file:
        for _ in range(2):
            with pytest.raises(SourceError, match="never returns") as caught:
                file.mapping("/", "env_args")
            assert (caught.value.reason, caught.value.where) == (Reason.DECODE, {"file": "damaged.hdf5"})
            monkeypatch.setattr(hdf5_texts, "WAIT_S", 0.0)  # known now: nobody is asked again
    monkeypatch.undo()
    with opened(tmp_path / "sound.hdf5") as file:
        assert file.mapping("/", "env_args") == {"env_name": "lift"}
        assert file.texts("mask/train") == ["demo_0", "demo_1"]
