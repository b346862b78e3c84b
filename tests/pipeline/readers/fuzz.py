"""Valid recordings, changed in the terms of their formats: a field of JSON, a header's shape, a column's type, a record with a right checksum.

Run by itself (``python -m tests.pipeline.readers.fuzz FOLDER SEED COUNT READER...``), so that a crash, a hang and memory beyond bounds end
that process and are seen by who began it. Every case is named by its reader and seed, and made again by them alone.
"""

import contextlib
import faulthandler
import gzip
import io
import json
import random
import re
import resource
import sqlite3
import struct
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from crc32c import crc32c

from tests.pipeline.readers.test_damage import WRITERS, answer

CASE_S = 100
"""Longest time of a case; HDF5 texts that never come take ten seconds."""
MEMORY_NBYTES = 3 * 2**30
"""Address space beyond what the process has before the first case: twice the largest block that a reader may unpack, and some."""
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, 10**400, -0.5, 1e308, float("nan"), float("inf"), "", "x", "\ud800", "/", "../../etc/passwd", [], {},
    [[]], [1, 2, 3], "9" * 5000, {"a": {"b": {}}},
)  # fmt: skip

Random = random.Random


def mutate(path: str, data: bytes, rng: Random) -> bytes:
    """Return a file changed as its format allows, or, one time in four, as a broken disk would."""
    kinds = [kind for pattern, kind in MUTATIONS.items() if re.search(pattern, path)]
    if kinds and rng.random() < 0.75:
        try:
            return kinds[0](data, rng)
        except (
            ValueError,
            KeyError,
            OSError,
            RuntimeError,
            IndexError,
            TypeError,
            OverflowError,
            struct.error,
            zipfile.BadZipFile,
            pa.ArrowException,
        ):
            pass  # not a change that this file can take
    return mutate_bytes(data, rng)


def mutate_bytes(data: bytes, rng: Random) -> bytes:
    """Cut, flip, fill, repeat or blow up a stretch."""
    start, stop = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    match rng.randrange(6):
        case 0:
            return data[:start]
        case 1:
            changed = bytearray(data)
            for _ in range(rng.choice((1, 1, 4, 32)) if data else 0):
                changed[rng.randrange(len(data))] = rng.randrange(256)
            return bytes(changed)
        case 2:
            return data[:start] + bytes([rng.choice((0, 255))]) * (stop - start) + data[stop:]
        case 3:
            return data[:stop] + data[start:]
        case 4:
            number = rng.choice((0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFF0))
            return data[:start] + struct.pack(rng.choice("<>") + "I", number) + data[start + 4 :]
        case _:
            return data[:start] + data[stop:]


def mutate_tree(value: Any, rng: Random) -> Any:
    """Return a JSON value with one of its nodes replaced, removed or repeated."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                return {name: item for name, item in value.items() if name != key}
            case 1:
                return {**value, rng.choice(("", "x", "../x", "é", "0")): value[key]}
            case _:
                return {**value, key: mutate_tree(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        place = rng.randrange(len(value))
        match rng.randrange(8):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                return value[:place] + [value[place]] * rng.choice((2, 1000)) + value[place:]
            case _:
                return [*value[:place], mutate_tree(value[place], rng), *value[place + 1 :]]
    return rng.choice(VALUES)


def mutate_json(data: bytes, rng: Random) -> bytes:
    """Change a JSON document, or one line of many, or the repr that LBC's recorder writes."""
    text = data.decode()
    lines = text.splitlines() if "\n" in text.strip() and not text.lstrip().startswith(("{\n", "[\n")) else [text]
    place = rng.randrange(len(lines))
    words = {"True": "true", "False": "false", "None": "null"}
    plain = re.sub(r"\b(True|False|None)\b", lambda match: words[match[0]], lines[place].replace("'", '"'))
    lines[place] = json.dumps(mutate_tree(json.loads(plain), rng))
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def mutate_gzip(data: bytes, rng: Random) -> bytes:
    """Change what is packed, or pack what unpacks to very much."""
    if rng.random() < 0.05:
        return gzip.compress(bytes(2**28))
    return gzip.compress(mutate_json(gzip.decompress(data), rng))


def mutate_npy(data: bytes, rng: Random) -> bytes:
    """Change the header's type, order or shape."""
    length = struct.unpack("<H", data[8:10])[0]
    header = data[10 : 10 + length].decode("latin1")
    numbers = list(re.finditer(r"\d+", header))
    if rng.random() < 0.5 and numbers:
        number = rng.choice(numbers)
        header = (
            header[: number.start()]
            + rng.choice(("0", "1", "3", "99999999999999999999", "4294967296", "-1"))
            + header[number.end() :]
        )
    else:
        header = re.sub(
            r"'descr': '[^']*'",
            f"'descr': '{rng.choice(('|O', '<U9', '>f8', '|u1', '<c16', '|V100', '<M8[s]', '|b1'))}'",
            header,
        )
    header = header.rstrip() + " " * (-(len(header.rstrip()) + 11) % 64) + "\n"
    return data[:8] + struct.pack("<H", len(header)) + header.encode("latin1") + data[10 + length :]


def mutate_parquet(data: bytes, rng: Random) -> bytes:
    """Change a column's type or values, or the rows."""
    table = pq.read_table(io.BytesIO(data))
    place = rng.randrange(table.num_columns)
    name, column = table.column_names[place], table.column(place)
    match rng.randrange(8):
        case 0:
            table = table.remove_column(place)
        case 1:
            table = table.set_column(place, name, pa.nulls(len(column), column.type))
        case 2:
            table = table.set_column(
                place, name, pa.array([rng.choice((b"\x80\x04N.", b"")) for _ in range(len(column))])
            )
        case 3:
            table = table.set_column(place, name, pa.array([[float(k)] * (k % 3) for k in range(len(column))]))
        case 4:
            table = table.slice(0, rng.randrange(len(table) + 1))
        case 5:
            table = table.take(pa.array([rng.randrange(len(table)) for _ in range(len(table))]))
        case 6:
            value = rng.choice((-1, 2**31, 2**62, 0))
            table = table.set_column(place, name, pa.array([value] * len(column)))
        case _:
            table = (
                table.append_column(name, column)
                if rng.random() < 0.3
                else pa.concat_tables([table] * rng.choice((2, 50)))
            )
    out = io.BytesIO()
    pq.write_table(table, out, compression=rng.choice(("snappy", "zstd", "none")))
    return out.getvalue()


def mutate_hdf5(data: bytes, rng: Random) -> bytes:
    """Replace, remove or link a member, or replace an attribute; or wrap a size in the global heap around."""
    heap = data.find(b"GCOL")
    if heap >= 0 and rng.random() < 0.01:
        return data[: heap + 24] + struct.pack("<Q", 2**64 - 16) + data[heap + 32 :]
    out = io.BytesIO(data)
    with h5py.File(out, "r+") as file:
        names: list[str] = []
        file.visit(names.append)
        name = rng.choice(names)
        match rng.randrange(7):
            case 0:
                del file[name]
            case 1:
                del file[name]
                file[name] = h5py.SoftLink(rng.choice(("/", f"/{name}", "/nowhere", f"/{rng.choice(names)}")))
            case 2:
                del file[name]
                file[name] = h5py.ExternalLink("/etc/passwd", "/")
            case 3:
                attributes = [(item, key) for item in (*names, "/") for key in file[item].attrs]
                item, key = rng.choice(attributes)
                file[item].attrs[key] = rng.choice(
                    (1, -1.5, "", "{", '{"a": NaN}', "[]", [1, 2], np.bool_(True), "9" * 5000)
                )
            case _:
                shape = rng.choice(((), (0,), (1,), (3,), (3, 0), (3, 4, 4, 3), (2**40,), (3, 2**20, 2**10)))
                kind = rng.choice(("u1", "f4", "i8", "c16", "S5", h5py.string_dtype(), h5py.vlen_dtype(np.float64)))
                is_large = np.prod(shape, dtype=float) > 1000
                del file[name]
                file.create_dataset(
                    name, shape, kind, chunks=True if is_large else None, compression="gzip" if is_large else None
                )
    return out.getvalue()


def mutate_zip(data: bytes, rng: Random) -> bytes:
    """Change, drop, repeat or rename a member."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        chosen = rng.choice(old.namelist())
        for name in old.namelist():
            content = old.read(name)
            if name == chosen:
                match rng.randrange(5):
                    case 0:
                        continue
                    case 1:
                        name = rng.choice(("../out", "/etc/passwd", "", "data", name + "/x", "é" * 300))
                    case 2:
                        content = bytes(2**26)
                    case _:
                        content = mutate(name, content, rng)
            new.writestr(name, content, rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))
    return out.getvalue()


def mutate_tfrecord(data: bytes, rng: Random) -> bytes:
    """Change a record and its checksums with it, so that its content is believed."""
    records, at = [], 0
    while at + 12 <= len(data):
        nbytes = struct.unpack("<Q", data[at : at + 8])[0]
        records.append(data[at + 12 : at + 12 + nbytes])
        at += nbytes + 16
    place = rng.randrange(len(records))
    records[place] = mutate_bytes(records[place], rng)
    return b"".join(
        length + _masked(length) + record + _masked(record)
        for record in records
        for length in [struct.pack("<Q", len(record))]
    )


def _masked(data: bytes) -> bytes:
    """Return the checksum as TFRecord masks it (tensorflow/core/lib/hash/crc32c.h)."""
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def mutate_png(data: bytes, rng: Random) -> bytes:
    """Change the header of an image, its checksum with it."""
    header = bytearray(data[16:29])
    place = rng.choice((0, 4))
    if rng.random() < 0.7:
        header[place : place + 4] = struct.pack(">I", rng.choice((0, 1, 7, 60000, 2**31 - 1, 2**32 - 1)))
    else:
        header[rng.randrange(8, 13)] = rng.choice((0, 1, 2, 3, 4, 6, 8, 16, 255))
    return data[:16] + bytes(header) + struct.pack(">I", zlib.crc32(b"IHDR" + header)) + data[33:]


def mutate_jpeg(data: bytes, rng: Random) -> bytes:
    """Change the declared size or the number of components."""
    start = re.search(rb"\xff[\xc0-\xc2]", data)
    if start is None:
        raise ValueError("no frame header")
    at = start.start() + rng.choice((5, 7))
    return data[:at] + struct.pack(">H", rng.choice((0, 1, 7, 9000, 65535))) + data[at + 2 :]


def mutate_mp4(data: bytes, rng: Random) -> bytes:
    """Change a number near the name of a box."""
    boxes = [
        match.start()
        for match in re.finditer(
            rb"moov|trak|mdia|stbl|stsd|stts|stsz|stco|stsc|ctts|avc1|tkhd|mdhd|mvhd|stss|mdat", data
        )
    ]
    at = rng.choice(boxes) + rng.choice((-4, 4, 8, 12, 16, 20, 24, 28, 32))
    return data[:at] + struct.pack(">I", rng.choice((0, 1, 7, 2**16 - 1, 2**31 - 1, 2**32 - 1))) + data[at + 4 :]


def mutate_mcap(data: bytes, rng: Random) -> bytes:
    """Change the size of a record, or a number or text at its beginning; or mend a chunk's checksum by leaving it out."""
    records, at = [], 8
    while at + 9 <= len(data) - 8:
        records.append(at)
        at += 9 + int.from_bytes(data[at + 1 : at + 9], "little")
    at = rng.choice(records)
    numbers = (0, 1, 255, 2**16 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
    if data[at] == 6 and rng.random() < 0.7:  # the checksum is not to hide what else is wrong
        data = data[: at + 33] + bytes(4) + data[at + 37 :]
        inner = at + 53 + rng.randrange(200)
        return data[:inner] + struct.pack("<I", rng.choice(numbers) % 2**32) + data[inner + 4 :]
    place = at + rng.choice((1, 9, 11, 13, 17, 25, 33))
    kind = rng.choice(("<H", "<I", "<Q"))
    return (
        data[:place]
        + struct.pack(kind, rng.choice(numbers) % 256 ** struct.calcsize(kind))
        + data[place + struct.calcsize(kind) :]
    )


def mutate_bag(data: bytes, rng: Random) -> bytes:
    """Change the value of a field of a record's header, or a size before one."""
    fields = [
        match.start()
        for match in re.finditer(rb"(op|size|conn|count|time|index_pos|chunk_pos|compression|topic|type)=", data)
    ]
    at = rng.choice(fields)
    if rng.random() < 0.3:
        at -= 4
    else:
        at = data.index(b"=", at) + 1
    width = rng.choice((1, 4, 8))
    number = rng.choice((0, 1, 2, 5, 7, 255, 2**31, 2**32 - 1, 2**63, 2**64 - 1)) % 256**width
    return data[:at] + number.to_bytes(width, "little") + data[at + width :]


def mutate_sqlite(data: bytes, rng: Random) -> bytes:
    """Change what a table says."""
    with tempfile.NamedTemporaryFile(suffix=".db3") as file:
        Path(file.name).write_bytes(data)
        database = sqlite3.connect(file.name)
        table, column = rng.choice(
            (
                ("topics", "type"),
                ("topics", "name"),
                ("topics", "id"),
                ("messages", "data"),
                ("messages", "timestamp"),
                ("messages", "topic_id"),
                ("messages", "id"),
                ("message_definitions", "encoded_message_definition"),
            )
        )
        value = rng.choice(
            (None, -1, 0, 2**62, 1e308, "", "x", "float64 x", b"", b"\0\1\0\0" * 50, "std_msgs/msg/String[9999999] x")
        )
        with contextlib.suppress(sqlite3.Error):
            if rng.random() < 0.1:
                database.execute(f"DROP TABLE {table}")
            else:
                database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = 1", (value,))
            database.commit()
        database.close()
        return Path(file.name).read_bytes()


def mutate_csv(data: bytes, rng: Random) -> bytes:
    """Replace a cell."""
    cells = re.split(rb"([,\n])", data)
    cells[rng.randrange(len(cells))] = rng.choice((b"", b"nan", b"-1", b"9" * 400, b"x", b'"', b",", b"\n", b"1e999"))
    return b"".join(cells)


MUTATIONS: dict[str, Callable[[bytes, Random], bytes]] = {
    r"\.json\.gz$": mutate_gzip,
    r"\.jsonl?$|/\.z(array|attrs|group|metadata)$": mutate_json,
    r"\.npy$": mutate_npy,
    r"\.parquet$": mutate_parquet,
    r"\.(hdf5|h5)$": mutate_hdf5,
    r"\.(zip|npz)$": mutate_zip,
    r"\.tfrecord": mutate_tfrecord,
    r"\.png$": mutate_png,
    r"\.jpe?g$": mutate_jpeg,
    r"\.mp4$": mutate_mp4,
    r"\.(csv|txt)$": mutate_csv,
    r"\.mcap$": mutate_mcap,
    r"\.bag$": mutate_bag,
    r"\.db3$": mutate_sqlite,
}
"""By the ends of paths."""


def run_case(root: Path, name: str, rng: Random) -> None:
    """Change one to three files, ask the reader for everything, and put the files back."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    kept: dict[Path, bytes] = {}
    try:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            left = [path for path in files if path.exists()]
            if not left:
                break
            path = rng.choice(left)
            kept.setdefault(path, path.read_bytes())
            match rng.randrange(20):
                case 0:
                    path.unlink(missing_ok=True)
                case 1:
                    path.write_bytes(kept[rng.choice(list(kept))] if rng.random() < 0.5 else b"")
                case _:
                    path.write_bytes(mutate(path.as_posix(), kept[path], rng))
        answer(root, name)
    finally:
        for path, data in kept.items():
            path.write_bytes(data)


def main() -> None:
    """Run ``COUNT`` cases of each reader."""
    folder, seed, count, *names = sys.argv[1:]
    began_nbytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (began_nbytes + MEMORY_NBYTES, resource.RLIM_INFINITY))
    for name in names:
        with tempfile.TemporaryDirectory(dir=folder) as root:
            WRITERS[name](Path(root))
            for case in range(int(seed), int(seed) + int(count)):
                faulthandler.dump_traceback_later(CASE_S, exit=True)
                try:
                    run_case(Path(root), name, Random(f"{name} {case}"))
                except BaseException:
                    print(f"case {name} {case}", file=sys.stderr)
                    raise
                finally:
                    faulthandler.cancel_dump_traceback_later()
        print(name, count, "peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "MiB", flush=True)


if __name__ == "__main__":
    main()
