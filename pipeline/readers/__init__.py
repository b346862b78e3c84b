"""Readers of raw formats, by name, and how the right one is found."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from pipeline.readers.aloha import AlohaReader
from pipeline.readers.bench2drive import Bench2DriveReader
from pipeline.readers.carla_dump import CarlaDumpReader
from pipeline.readers.carla_garage import CarlaGarageReader
from pipeline.readers.carla_recorder import CarlaRecorderReader
from pipeline.readers.diffusion_policy import DiffusionPolicyReader
from pipeline.readers.droid import DroidReader
from pipeline.readers.folders import source_root
from pipeline.readers.lbc import LbcReader
from pipeline.readers.lerobot import LeRobotReader
from pipeline.readers.npy import NpyReader
from pipeline.readers.planner_npz import PlannerNpzReader
from pipeline.readers.protocol import Reader
from pipeline.readers.rlds import RldsReader
from pipeline.readers.robomimic import RobomimicReader
from pipeline.readers.rosbag import RosbagReader
from schemas.errors import Reason, SourceError, UsageError

READERS: dict[
    str,
    type[
        LbcReader
        | Bench2DriveReader
        | CarlaGarageReader
        | CarlaRecorderReader
        | LeRobotReader
        | DroidReader
        | AlohaReader
        | RobomimicReader
        | RldsReader
        | DiffusionPolicyReader
        | RosbagReader
        | NpyReader
        | CarlaDumpReader
        | PlannerNpzReader
    ],
] = {
    reader.name: reader
    for reader in (
        LeRobotReader,
        PlannerNpzReader,
        Bench2DriveReader,
        CarlaGarageReader,  # before LbcReader, which also knows a folder by rgb/ and measurements/
        LbcReader,
        CarlaRecorderReader,
        DroidReader,
        AlohaReader,
        RobomimicReader,
        RldsReader,
        DiffusionPolicyReader,
        RosbagReader,
        NpyReader,
        CarlaDumpReader,
    )
}
"""In the order in which they are tried: the most specific first."""


def open_source(path: str | Path, format: str = "", options: Mapping[str, str] | None = None) -> Reader:
    """Return the reader of the recordings below ``path``: the one called ``format``, or the first that knows them.

    Parameters
    ----------
    path
        The folder of recordings.
    format
        Name of the reader; empty finds out.
    options
        Fields of the reader by name, as text: ``{"channel_order": "rgb"}``. ``docs/formats.md`` lists them.

    Raises
    ------
    UsageError
        Where no reader is called ``format``, or it has no such option.
    SourceError
        Where ``path`` is no folder, is empty, cannot be read, or is of no known format; the message says what each misses.
    """
    if format and format not in READERS:
        raise UsageError(f"expected a format of {', '.join(READERS)}, found {format!r}; leave it out to have it found")
    root = source_root(path)
    missed = {}
    for name in [format] if format else READERS:
        missed[name] = READERS[name].sniff(root)
        if not missed[name]:
            chosen = _options(name, options or {})
            return cast(Reader, READERS[name](root, **chosen))  # frozen, which the protocol's attributes do not foresee
    tried = "; ".join(f"{name}: {miss}" for name, miss in missed.items())
    raise SourceError(
        f"expected recordings of a known format in {root}, found none ({tried}); check the path", Reason.UNSUPPORTED
    )


def _options(name: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a reader in their own types."""
    known: dict[str, Any] = {field.name: field.default for field in fields(READERS[name]) if field.name != "root"}
    options: dict[str, Any] = {}
    for key, text in given.items():
        if key not in known:
            offered = ", ".join(known) or "none"
            raise UsageError(f"expected an option of the {name} reader ({offered}), found {key!r}; see docs/formats.md")
        try:
            kind = type(known[key])
            options[key] = tuple(text.split(",")) if kind is tuple else kind(text)
        except ValueError as error:
            raise UsageError(f"expected {key} as {kind.__name__}, found {text!r}; correct --reader") from error
    return options
