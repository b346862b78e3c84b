"""What the commands say, as JSON values: ``--json`` prints them, the screens draw them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from schemas.errors import HeadraceError, Reason, SourceError
from schemas.source import EpisodeRef, Fault, SourceIndex

_EPISODE_COLUMNS = (
    "key", "source", "start", "stop", "rate_hz", "rate_measured_hz", "jitter_s", "instructions",
    "views", "num_invalid", "valid", "generation", "replaced_by",
)  # fmt: skip


def nbytes_text(nbytes: float) -> str:
    """Return bytes in decimal units.

    >>> nbytes_text(1536000)
    '1.5 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def count_reasons(faults: Iterable[Fault]) -> dict[str, dict[str, int]]:
    """Return how many faults there are by kind (``quarantined``, ``warned``, ``left_out``) and reason, in order of reasons."""
    counts: dict[str, dict[str, int]] = {"quarantined": {}, "warned": {}, "left_out": {}}
    for fault in sorted(faults, key=lambda fault: fault.reason):
        kind = "left_out" if fault.reason.is_wish else "warned" if fault.is_warning else "quarantined"
        counts[kind][str(fault.reason)] = counts[kind].get(str(fault.reason), 0) + 1
    return counts


def reasons_text(counts: Mapping[str, int]) -> str:
    """Return counts by reason as one line.

    >>> reasons_text({"decode": 2, "frozen": 1})
    '2 decode, 1 frozen'
    """
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items())


def summarize_index(index: SourceIndex) -> dict[str, Any]:
    """Return what ``headrace inspect`` says, as JSON values."""
    episodes = index.episodes
    views: dict[str, dict[str, Any]] = {}
    for ref in episodes:
        for view in ref.views:
            entry = views.setdefault(
                view.name,
                {"kind": view.kind, "encoding": view.encoding, "sizes": [], "episodes": 0, "missing_from": []},
            )
            size = [view.height_px, view.width_px]
            if view.present and size not in entry["sizes"]:
                entry["sizes"].append(size)
            entry["episodes"] += view.present
            if not view.present:
                entry["missing_from"].append(ref.key)
    signals = {
        s.name: {"shape": list(s.shape), "dtype": s.dtype, "units": s.units} for ref in episodes for s in ref.signals
    }
    rates = sorted({ref.rate_hz for ref in episodes})
    return {
        "format": index.format,
        "name": index.name,
        "num_episodes": len(episodes),
        "num_steps": sum(ref.num_steps for ref in episodes),
        "rates_hz": rates,
        "duration_s": sum(ref.num_steps / ref.rate_hz for ref in episodes if ref.rate_hz),
        "views": views,
        "signals": signals,
        "state": list(index.state),
        "actions": list(index.actions),
        "episodes": [_episode_summary(ref) for ref in episodes],
        "problems": [_fault_summary(fault) for fault in index.faults],
        "notes": list(index.notes),
    }


def _episode_summary(ref: EpisodeRef) -> dict[str, Any]:
    return {
        "key": ref.key,
        "num_steps": ref.num_steps,
        "rate_hz": ref.rate_hz,
        "views": [view.name for view in ref.views if view.present],
        "missing_views": [view.name for view in ref.views if not view.present],
        "instructions": list(ref.instructions),
    }


def _fault_summary(fault: Fault) -> dict[str, Any]:
    return {
        "reason": str(fault.reason),
        "episode": fault.episode,
        "stream": fault.stream,
        "start": fault.start,
        "stop": fault.stop,
        "path": fault.path,
        "message": fault.message,
    }


def summarize_dataset(path: Path) -> dict[str, Any]:
    """Return what ``headrace info`` says, as JSON values."""
    from pipeline.store.metadata import read_info
    from pipeline.store.tables import read_table

    info = read_info(path)
    quarantine = read_table(info, "quarantine").to_pylist()
    counts = count_reasons(
        Fault(reason=Reason(row["reason"]), message="", is_warning=row["is_warning"]) for row in quarantine
    )
    manifest = read_table(info, "manifest", ["kind", "nbytes", "array"]).to_pylist()
    sizes: dict[str, int] = {}
    source_nbytes = 0
    for row in manifest:
        if row["kind"] == "shard":
            sizes[row["array"]] = sizes.get(row["array"], 0) + row["nbytes"]
        else:
            source_nbytes += max(row["nbytes"], 0)
    episodes = read_table(info, "episodes", _EPISODE_COLUMNS).to_pylist()
    for row in episodes:
        if row["replaced_by"] >= 0:
            row["num_invalid"] = row["stop"] - row["start"]  # whatever it was: none of its steps is served
    return {
        "path": str(path),
        "format_version": info.attributes["format_version"],
        "generation": info.generation,
        "num_episodes": info.num_episodes,
        "num_steps": info.num_steps,
        "num_invalid_steps": sum(row["num_invalid"] for row in episodes),
        "num_replaced_episodes": sum(row["replaced_by"] >= 0 for row in episodes),
        "shard_steps": info.shard_steps,
        "recipe": info.recipe["name"],
        "codec": info.recipe["frames"]["codec"],
        "views_from": info.attributes["bindings"]["views"],
        "signals_from": info.attributes["bindings"]["signals"],
        "arrays": {
            name: {
                "shape": [info.lengths[name], *spec.row_shape],
                "dtype": spec.dtype,
                "dims": list(spec.dims),
                "nbytes": sizes.get(name, 0),
            }
            for name, spec in info.arrays.items()
        },
        "nbytes": sum(sizes.values()),
        "source_nbytes": source_nbytes,
        **counts,
        "tasks": read_table(info, "tasks")["task"].to_pylist(),
        "episodes": episodes,
    }


def error_to_json(error: HeadraceError) -> dict[str, Any]:
    """Return an error as JSON values: what, why (a reason of the quarantine, or None), where, and what to do next."""
    message, _, next_step = error.message.rpartition("; ")
    return {
        "error": message or next_step,
        "kind": type(error).__name__,
        "reason": str(error.reason) if isinstance(error, SourceError) else None,
        "where": {name: str(value) for name, value in error.where.items()},
        "next_step": next_step if message else "",
    }


def verify_to_json(report: Any) -> dict[str, Any]:
    """Return a verification as JSON values."""
    return {"ok": report.ok, **asdict(report)}


def summarize_recipes(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the built-in recipes, as JSON values."""
    from pipeline.recipes import load_recipe, recipe_text

    return [
        {
            "name": name,
            "summary": recipe_text(name).splitlines()[0].lstrip("# "),
            "views": [view.name for view in load_recipe(name).views],
        }
        for name in names
    ]
