"""The dataset's Zarr metadata: canonical JSON, whose root carries its own digest and is the commit pointer."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.store.atomic import read_regular, xxh3_hex
from pipeline.store.chunk_codecs import codec_name, zarr_codecs
from schemas.dataset import FORMAT_VERSION, ArraySpec
from schemas.errors import ChecksumError, DatasetError, SchemaError

ROOT_DOCUMENT = "zarr.json"
"""The root's metadata, and in each array's folder that array's."""

COORDINATES = ("episode_index", "timestamp_s")
"""Arrays that label steps: xarray shows them as coordinates."""

TABLES = "_tables"
COPIES = "_copies"
"""Folder of the second copies of the root's metadata and of all tables but ``steps``, from which they are repaired."""

_ZERO_DIGEST = "0" * 32
_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC = {"name": "crc32c"}
_FILL: dict[str, bool | int | float] = {"b": False, "u": 0, "i": 0, "f": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRef:
    """One file of ``_tables``, as the root names it."""

    path: str
    """Relative to the dataset."""
    nbytes: int
    xxh3: str
    """xxh3-128 of the file, hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """What the root metadata of a finished dataset says."""

    root: Path
    generation: int
    num_steps: int
    num_episodes: int
    shard_steps: int
    """Shard of the frame arrays."""
    arrays: Mapping[str, ArraySpec]
    lengths: Mapping[str, int]
    """First side of each array."""
    recipe: Mapping[str, Any]
    tables: Mapping[str, TableRef]
    attributes: Mapping[str, Any]
    """All of the root's ``headrace`` attributes."""

    def hide_replaced(self, valid: np.ndarray, steps: np.ndarray) -> None:
        """Set ``valid`` (bool, writable) False at the ``steps`` (int64, any order) of episodes that were replaced.

        The array ``valid`` on disk says what was recorded: no committed byte changes when an episode is replaced.
        """
        ranges = self.attributes.get("replaced", [])
        if ranges:
            starts, stops = np.array(ranges, np.int64).T
            last = np.searchsorted(starts, steps, side="right") - 1
            valid[(last >= 0) & (steps < stops[last])] = False


def canonical_json(value: Any) -> bytes:
    """Serialise with sorted keys, no spaces, ASCII: equal values are equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def array_metadata(spec: ArraySpec, length: int) -> dict[str, Any]:
    """Return an array's Zarr v3 metadata; :func:`spec_of` is the inverse."""
    attributes = dict(spec.attributes)
    if "valid_array" in attributes:
        raise SchemaError(f"expected no attribute `valid_array` of {spec.name!r}, found one; set the field instead")
    if spec.valid_array:
        attributes["valid_array"] = spec.valid_array
    sharding = {
        "chunk_shape": [spec.chunk_steps, *spec.row_shape],
        "codecs": zarr_codecs(spec),
        "index_codecs": [_ENDIAN, _CRC],
        "index_location": "end",
    }
    return {
        "attributes": attributes,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [spec.shard_steps, *spec.row_shape]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "data_type": spec.dtype,
        "dimension_names": list(spec.dims),
        "fill_value": _FILL[np.dtype(spec.dtype).kind],
        "node_type": "array",
        "shape": [length, *spec.row_shape],
        "storage_transformers": [],
        "zarr_format": 3,
    }


def array_document(spec: ArraySpec, length: int) -> bytes:
    """Return the ``zarr.json`` of an array's own folder: its entry in the root, serialised alone."""
    return canonical_json(array_metadata(spec, length))


def root_document(specs_and_lengths: Mapping[str, tuple[ArraySpec, int]], attributes: Mapping[str, Any]) -> bytes:
    """Return the root ``zarr.json``: all arrays' metadata inline, and the digest of these very bytes.

    Parameters
    ----------
    specs_and_lengths
        ``name -> (specification, length of the first axis)``.
    attributes
        ``generation``, ``num_steps``, ``num_episodes``, ``shard_steps``, ``recipe``, ``tables`` (values may be
        :class:`TableRef`), and what else the root shall say; ``format_version`` and ``metadata_xxh3`` are added.
    """
    lengths = {"step": attributes["num_steps"], "episode": attributes["num_episodes"]}
    for name, (spec, length) in specs_and_lengths.items():
        if spec.name != name or length != lengths[spec.dims[0]]:
            raise SchemaError(
                f"expected {spec.name} of {lengths[spec.dims[0]]} {spec.dims[0]}s, found {name} of {length}"
            )
    tables = {
        name: asdict(ref) if isinstance(ref, TableRef) else dict(ref) for name, ref in attributes["tables"].items()
    }
    headrace = {**attributes, "format_version": FORMAT_VERSION, "metadata_xxh3": _ZERO_DIGEST, "tables": tables}
    root_attributes: dict[str, Any] = {"headrace": headrace}
    coordinates = [name for name in COORDINATES if name in specs_and_lengths]
    if coordinates:
        root_attributes["coordinates"] = " ".join(coordinates)
    metadata = {name: array_metadata(spec, length) for name, (spec, length) in specs_and_lengths.items()}
    document = {
        "attributes": root_attributes,
        "consolidated_metadata": {"kind": "inline", "metadata": metadata, "must_understand": False},
        "node_type": "group",
        "zarr_format": 3,
    }
    headrace["metadata_xxh3"] = xxh3_hex(canonical_json(document))
    return canonical_json(document)


def root_copies(generation: int) -> tuple[str, str]:
    """Return the paths of the copies of a generation's root metadata, relative to the dataset."""
    return f"{TABLES}/zarr-{generation}.json", f"{COPIES}/zarr-{generation}.json"


def read_info(path: str | Path, generation: int | None = None) -> DatasetInfo:
    """Read the root metadata of a finished dataset and check its digest; no other file is touched.

    With ``generation`` an older one that ``headrace gc`` has not removed: committed steps never change, so that its
    arrays are the beginnings of today's.

    Raises
    ------
    DatasetError
        Not a dataset, not a finished one, of a foreign version, or damaged; the message says which.
    """
    root = Path(path)
    if generation is None:
        return _newest(root)
    found = whole_copy(root, generation)
    if found is None:
        raise DatasetError(
            f"expected generation {generation} of {root}, found none kept; open it without a generation for the newest"
        )
    return found[0]


def _newest(root: Path) -> DatasetInfo:
    """Read the root; an older one in its place is refused, since a copy of a newer one proves that it was committed."""
    info = info_of(root, _read_root(root))
    while whole_copy(root, info.generation + 1) is not None:
        again = info_of(root, _read_root(root))  # an append may just have been committed
        if again.generation == info.generation:
            raise DatasetError(
                f"expected generation {info.generation + 1}, found the metadata of {info.generation} in their place; "
                "run `headrace verify --repair`",
                file=root / ROOT_DOCUMENT,
            )
        info = again
    return info


def whole_copy(root: Path, generation: int) -> tuple[DatasetInfo, bytes] | None:
    """Return what the root's metadata of a generation said, and their bytes; None where no copy is whole."""
    for path in root_copies(generation):
        try:
            document = read_regular(root / path)
            info = info_of(root, document)
        except (OSError, DatasetError):
            continue
        if info.generation == generation:
            return info, document
    return None


def info_of(root: Path, raw: bytes) -> DatasetInfo:
    """Return what root metadata says; DatasetError unless ``raw`` is exactly what was written."""
    document = _parse(root, raw)
    try:
        return _info(root, document)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, SchemaError) as error:
        raise DatasetError(
            f"expected metadata as this version writes it, found {error!r}; open it with the Headrace that wrote it",
            file=root / ROOT_DOCUMENT,
        ) from error


def spec_of(name: str, metadata: Mapping[str, Any]) -> ArraySpec:
    """Return the specification behind an array's metadata; its attributes come back in order of their names."""
    sharding = metadata["codecs"][0]["configuration"]
    attributes = dict(metadata["attributes"])
    valid_array = attributes.pop("valid_array", "")
    spec = ArraySpec(
        name=name,
        dims=tuple(metadata["dimension_names"]),
        row_shape=tuple(metadata["shape"][1:]),
        dtype=metadata["data_type"],
        chunk_steps=sharding["chunk_shape"][0],
        shard_steps=metadata["chunk_grid"]["configuration"]["chunk_shape"][0],
        codec=codec_name(sharding["codecs"]),
        valid_array=valid_array,
        attributes=tuple(sorted(attributes.items())),
    )
    if canonical_json(array_metadata(spec, metadata["shape"][0])) != canonical_json(metadata):
        raise SchemaError(f"expected the layout of format version {FORMAT_VERSION} for {name!r}, found another")
    return spec


def _read_root(root: Path) -> bytes:
    if not root.is_dir():
        found = "a file" if root.exists() else "nothing"
        raise DatasetError(f"expected the folder of a dataset, found {found} at {root}; check the path")
    try:
        return read_regular(root / ROOT_DOCUMENT)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise DatasetError(
            f"expected to read it, found: {error.strerror}; check the file", file=root / ROOT_DOCUMENT
        ) from error
    if (root.parent / f"{root.name}.work" / "plan.json").exists():
        raise DatasetError(
            f"expected a finished dataset, found an unfinished conversion at {root}; run the same `headrace convert` again"
        )
    if any((root / "_tables").glob("manifest-*.parquet")):
        raise DatasetError(
            f"expected {ROOT_DOCUMENT} in {root}, found a dataset that lost it; run `headrace verify --repair`"
        )
    version_2 = any((root / name).exists() for name in (".zgroup", ".zarray", ".zmetadata"))
    found = "a Zarr v2 store" if version_2 else "no zarr.json"
    raise DatasetError(f"expected a dataset, found {found} at {root}; make one with `headrace convert`")


def _parse(root: Path, raw: bytes) -> dict[str, Any]:
    """Return the parsed root document if it is a dataset's, of this version, and whole."""
    file = root / ROOT_DOCUMENT
    damaged = "run `headrace verify --repair`, or restore the file from a copy"
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DatasetError(
            f"expected JSON, found {len(raw)} bytes that are not ({error}); {damaged}", file=file
        ) from error
    attributes = document.get("attributes") if isinstance(document, dict) else None
    headrace = attributes.get("headrace") if isinstance(attributes, dict) else None
    if not isinstance(document, dict) or not isinstance(headrace, dict):
        raise DatasetError(
            "expected a Headrace dataset, found other Zarr metadata; open it with zarr.open or xarray.open_zarr",
            file=file,
        )
    version = headrace.get("format_version")
    if version != FORMAT_VERSION:
        raise DatasetError(
            f"expected format_version {FORMAT_VERSION}, found {version!r}; use the version of Headrace that wrote it",
            file=file,
        )
    expected = headrace.get("metadata_xxh3")
    found = xxh3_hex(_with_zero_digest(document)) if _is_canonical(document, raw) else "other bytes than were written"
    if found != expected:
        raise ChecksumError(f"expected metadata of xxh3 {expected!r}, found {found}; {damaged}", file=file)
    return document


def _is_canonical(document: dict[str, Any], raw: bytes) -> bool:
    try:
        return canonical_json(document) == raw
    except (ValueError, RecursionError):  # NaN and infinity, which JSON does not have
        return False


def _with_zero_digest(document: dict[str, Any]) -> bytes:
    attributes = document["attributes"]
    headrace = {**attributes["headrace"], "metadata_xxh3": _ZERO_DIGEST}
    return canonical_json({**document, "attributes": {**attributes, "headrace": headrace}})


def _info(root: Path, document: Mapping[str, Any]) -> DatasetInfo:
    attributes = document["attributes"]["headrace"]
    metadata = document["consolidated_metadata"]["metadata"]
    tables = {name: TableRef(**ref) for name, ref in attributes["tables"].items()}
    for path in (*(ref.path.removeprefix("_tables/") for ref in tables.values()), *metadata):
        if "/" in path or path.startswith("."):
            raise ValueError(f"the name {path!r}")  # nothing outside the dataset is ever opened
    for name, entry in metadata.items():
        expected = attributes[f"num_{entry['dimension_names'][0]}s"]
        if entry["shape"][0] != expected:
            raise ValueError(f"{entry['shape'][0]} rows of {name}")
    return DatasetInfo(
        root=root,
        generation=attributes["generation"],
        num_steps=attributes["num_steps"],
        num_episodes=attributes["num_episodes"],
        shard_steps=attributes["shard_steps"],
        arrays={name: spec_of(name, entry) for name, entry in metadata.items()},
        lengths={name: entry["shape"][0] for name, entry in metadata.items()},
        recipe=attributes["recipe"],
        tables=tables,
        attributes=attributes,
    )
