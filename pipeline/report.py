"""What a conversion did."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.markup import card
from pipeline.summaries import nbytes_text, reasons_text
from schemas.source import Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """What a conversion did."""

    dataset: str
    generation: int
    complete: bool
    """False after a dry run."""
    num_episodes: int
    """Episodes added by this run."""
    num_steps: int
    num_frames: int
    total_episodes: int
    """Episodes of the dataset."""
    total_steps: int
    shards_written: int
    shards_reused: int
    """Shards that an interrupted run had finished."""
    nbytes: int
    """Bytes of the shards of this generation."""
    seconds: float
    unchanged_episodes: int
    moved_episodes: tuple[str, ...]
    """``old -> new`` names of episodes that the sources have under another name now."""
    removed_episodes: tuple[str, ...]
    """Episodes of the dataset that the given sources no longer have."""
    replaced_episodes: tuple[str, ...]
    """Episodes whose old recording is served no more."""
    views: Mapping[str, tuple[str, ...]]
    signals: Mapping[str, tuple[str, ...]]
    quarantined: Mapping[str, int]
    """Refused pieces of input of this run by reason."""
    warned: Mapping[str, int]
    """Pieces that are odd and served all the same, by reason."""
    left_out: Mapping[str, int]
    """Episodes that a rule of the recipe leaves out, by reason."""
    problems: tuple[str, ...]
    """The first of them, as one line each."""
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0, or 3 where something was refused."""
        return 3 if self.quarantined else 0

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        added = "added" if self.complete else "to add"
        facts: dict[str, object] = {
            "episodes": f"{self.num_episodes:,} {added}, {self.unchanged_episodes:,} unchanged, {self.total_episodes:,} in all",
            "steps": f"{self.num_steps:,} {added}, {self.total_steps:,} in all",
            **self._work(),
            "quarantined": reasons_text(self.quarantined) or "nothing",
            "odd, and served": reasons_text(self.warned) or "nothing",
            "left out": reasons_text(self.left_out) or "nothing",
        }
        lists = {
            "views and vectors": tuple(
                f"{target} <- {', '.join(found)}" for target, found in {**self.views, **self.signals}.items()
            ),
            "problems": self.problems,
            "notes": self.notes,
            "known under another name": self.moved_episodes,
            "no longer in the sources": self.removed_episodes,
            "replaced": self.replaced_episodes,
        }
        done = f"generation {self.generation}" if self.complete else "dry run: nothing was written"
        return card(f"{self.dataset}: {done}", facts, lists)

    def _work(self) -> dict[str, str]:
        """Return what was written; nothing of it is known before it is done."""
        if not self.complete:
            return {}
        return {
            "frames": f"{self.num_frames:,}",
            "shards": f"{self.shards_written:,} written, {self.shards_reused:,} finished before",
            "size": f"{nbytes_text(self.nbytes)} in {self.seconds:.1f} s",
        }


def fault_line(source: str, fault: Fault) -> str:
    """Return a refused piece of input as one line."""
    steps = f" steps {fault.start}:{fault.stop}" if fault.stop > fault.start else ""
    stream = f" {fault.stream}" if fault.stream else ""
    warning = "warning: " if fault.is_warning else ""
    return f"{warning}{source} {fault.episode}{stream}{steps}: {fault.reason}: {fault.message}"


def report_to_json(report: ConvertReport) -> dict[str, Any]:
    """Return the report as JSON values."""
    return {**asdict(report), "exit_code": report.exit_code}
