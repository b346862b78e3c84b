"""What a person sees in a terminal, and the same facts as JSON."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pipeline.plan import Estimate, Plan
from pipeline.report import ConvertReport
from pipeline.summaries import count_reasons, nbytes_text, reasons_text
from pipeline.watch import Watch

if TYPE_CHECKING:
    from pipeline.drift import DriftReport  # which imports the kernels, as no other screen does

SHOWN_ROWS = 12
"""Rows of a long table that fit a screen; the rest is counted, and whole in --json."""
MAX_NAME_LETTERS = 36
"""Of a view or signal, as many as never break."""
INSTRUCTION_LETTERS = 60
"""Of an instruction, as much as fits a line; the rest is dots."""


def err_console() -> Console:
    """Return a console on standard error; it obeys NO_COLOR, and breaks lines between words in a terminal and never in a pipe."""
    return Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def out_console() -> Console:
    """Return a console on standard output."""
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def print_index(summary: Mapping[str, Any]) -> None:
    """Print one screen about a raw source."""
    console = out_console()
    rates = ", ".join(f"{rate:g} Hz" if rate else "irregular" for rate in summary["rates_hz"]) or "unknown rate"
    console.print(
        f"[bold]{_plain(summary['name'])}[/bold]: format [bold]{summary['format']}[/bold], "
        f"{summary['num_episodes']:,} episode{_s(summary['num_episodes'])}, {summary['num_steps']:,} step{_s(summary['num_steps'])}, {rates}, "
        + (f"{summary['duration_s']:.1f} s" if summary["duration_s"] else "duration not known before reading")
    )
    _print_views(console, summary)
    _print_signals(console, summary)
    _print_episodes(console, summary["episodes"])
    for problem in summary["problems"][:SHOWN_ROWS]:
        console.print(
            Text(f"refused {problem['episode'] or problem['path']}: {problem['reason']}: {problem['message']}", "red")
        )
    _print_more(console, summary["problems"], "problems")
    for note in summary["notes"]:
        console.print(Text(f"note: {note}", "yellow"))


def print_drift(report: "DriftReport") -> None:
    """Print how far a dataset lies from frozen statistics, dimension by dimension."""
    console = out_console()
    first = report.first_episode
    which = f"episodes {first} to {report.num_episodes - 1}" if first else f"all {report.num_episodes} episodes"
    table = _table("array", "dimension", "shift of mean, std", "std / frozen", "outside [q01, q99]", "flags")
    for row in report.dims:
        numbers = [f"{value:.3g}" if value is not None else "-" for value in (row.shift_std, row.std_ratio)]
        outside = f"{row.outside:.1%}" if row.outside is not None else "-"
        flags = Text(", ".join(row.flags), "red")
        table.add_row(row.array, str(row.dim), *numbers, outside, flags)
    console.print(
        f"{which}, {report.num_anchors:,} samples of horizon {report.horizon}, against {_plain(report.against)}"
    )
    console.print(table)
    num = len({(row.array, row.dim) for row in report.dims if row.flags})
    console.print(f"{num} of {len(report.dims)} dimensions drifted" if num else "no dimension drifted")


def warn_near_constant(norm_stats: bytes) -> None:
    """Say on standard error which dimensions of a ``norm_stats.json`` no scaling can serve."""
    from pipeline.stats_export import near_constant_lines

    for line in near_constant_lines(json.loads(norm_stats)):
        err_console().print(Text(f"warning: {line}", "yellow"))


def _print_views(console: Console, summary: Mapping[str, Any]) -> None:
    table = _table("view", "kind", "stored", "size", "episodes", names=summary["views"])
    for name, view in summary["views"].items():
        sizes = ", ".join(f"{width}x{height}" if height else "unknown" for height, width in view["sizes"]) or "-"
        missing = view["missing_from"]
        shown = f", not in {', '.join(missing[:4])}" if missing else ""
        shown += f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        table.add_row(*map(Text, (name, view["kind"], view["encoding"], sizes, str(view["episodes"]) + shown)))
    console.print(table)


def _print_signals(console: Console, summary: Mapping[str, Any]) -> None:
    table = _table("signal", "shape", "dtype", "units", "makes", names=summary["signals"])
    for name, signal in summary["signals"].items():
        makes = [target for target in ("state", "actions") if name in summary[target]]
        shape = "x".join(map(str, signal["shape"])) or "1"
        table.add_row(*map(Text, (name, shape, signal["dtype"], signal["units"], ", ".join(makes))))
    console.print(table)


def _print_episodes(console: Console, episodes: Sequence[Mapping[str, Any]]) -> None:
    table = _table("episode", "steps", "rate", "instruction")
    for row in episodes[:SHOWN_ROWS]:
        said = row["instructions"][0] if row["instructions"] else ""
        more = f" (+{len(row['instructions']) - 1})" if len(row["instructions"]) > 1 else ""
        table.add_row(
            *map(
                Text,
                (
                    row["key"],
                    f"{row['num_steps']:,}",
                    f"{row['rate_hz']:g} Hz" if row["rate_hz"] else "irregular",
                    _short(said) + more,
                ),
            )
        )
    console.print(table)
    _print_more(console, episodes, "episodes")


def _print_more(console: Console, rows: Sequence[Any], what: str) -> None:
    if len(rows) > SHOWN_ROWS:
        console.print(f"and {len(rows) - SHOWN_ROWS:,} more {what}: --json has them all")


def _table(*headers: str, names: Iterable[str] = ()) -> Table:
    """Return a table without rows, its first column wide enough for ``names`` of usual length, so that other columns break first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        table.add_column(header, overflow="fold")
    table.columns[0].min_width = min(MAX_NAME_LETTERS, max(map(len, names), default=0))
    return table


def _short(text: str) -> str:
    return text if len(text) <= INSTRUCTION_LETTERS else text[: INSTRUCTION_LETTERS - 3].rstrip() + "..."


def _plain(text: object) -> str:
    """Escape rich's markup: names come from the data."""
    from rich.markup import escape

    return escape(str(text))


def _s(count: int) -> str:
    return "" if count == 1 else "s"


class ConvertScreen(Watch):
    """Plan, then a progress bar with rate and time left, on standard error."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = err_console()
        self.quiet = quiet
        self.progress: Progress | None = None
        self.bar = self.progress_steps = 0

    def __enter__(self) -> "ConvertScreen":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None

    def planned(self, plan: Plan, cost: Estimate, reused: int) -> None:
        """Print the plan and start the bar."""
        if self.quiet:
            return
        self._stop()
        for line in plan_lines(plan, cost, reused):
            self.console.print(Text(line))
        self.progress = Progress(
            TextColumn("converting"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f}% {task.completed:,.0f}/{task.total:,.0f} steps"),
            _Rate(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.bar = self.progress.add_task("steps", total=cost.num_steps)
        self.progress.start()

    def advanced(self, done_steps: int, total_steps: int, frames: int) -> None:
        """Move the bar."""
        if self.progress is not None:
            self.progress.update(self.progress.task_ids[0], completed=done_steps, total=total_steps)

    def said(self, text: str) -> None:
        """Print one line above the bar."""
        if not self.quiet:
            self.console.print(Text(text))


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f} steps/s" if task.speed else "- steps/s")


def plan_lines(plan: Plan, cost: Estimate, reused: int) -> list[str]:
    """Return the plan as a person reads it."""
    lines = [
        f"plan: {cost.num_episodes:,} episode{_s(cost.num_episodes)}, {cost.num_steps:,} steps, {cost.num_frames:,} frames, "
        f"{cost.num_shards:,} shard{_s(cost.num_shards)} of {plan.shard_steps} steps (generation {plan.generation})",
        f"      about {nbytes_text(cost.dataset_nbytes)} on disk ({plan.recipe.frames.codec}; {nbytes_text(cost.free_nbytes)} free), "
        f"at most about {nbytes_text(cost.memory_nbytes)} of memory",
    ]
    for target, sources in plan.bindings.views.items():
        served = sum(bool(plan.bindings.view(episode.ref, target)) for episode in plan.episodes)
        missing = len(plan.episodes) - served
        note = f" (masked in {missing} episode{_s(missing)})" if missing and served else " (masked)" if missing else ""
        guessed = bool(sources) and not set(sources) & set(plan.recipe.view(target).candidates)
        hint = f" (guessed; --view {target}=... chooses another)" if guessed else ""
        lines.append(f"      view {target} <- {' or '.join(sources) or 'nothing'}{note}{hint}")
    for name, columns in plan.bindings.signals.items():
        shown = ", ".join(columns[:6]) + (f", ... ({len(columns)} columns)" if len(columns) > 6 else "")
        lines.append(f"      {name}[{plan.bindings.sizes[name]}] <- {shown}")
        if plan.bindings.sizes[name] > plan.recipe.action_dim:
            lines.append(
                f"      {name} is wider than action_dim {plan.recipe.action_dim}: loaders hand it out as it is, unpadded"
            )
    if left_out := count_reasons(fault for _, fault in plan.faults)["left_out"]:
        lines.append(f"      left out: {reasons_text(left_out)}")
    if reused:
        lines.append(f"      continuing: {reused} of {cost.num_shards} shards are finished already")
    return lines


def print_report(report: ConvertReport) -> None:
    """Print what a conversion did, on standard error like all that is human; the dataset is the result."""
    console = err_console()
    if not report.complete:
        console.print("dry run: nothing was written")
        return
    if report.num_episodes == 0:
        console.print(f"nothing new: {report.unchanged_episodes} episodes unchanged, generation {report.generation}")
    else:
        rate = report.num_steps / report.seconds if report.seconds else 0.0
        reused = f", {report.shards_reused} reused" if report.shards_reused else ""
        console.print(
            Text(
                f"done: {report.dataset}, generation {report.generation}: {report.num_episodes:,} episode{_s(report.num_episodes)}, {report.num_steps:,} steps, "
                f"{report.num_frames:,} frames in {report.seconds:.1f} s ({rate:,.0f} steps/s), "
                f"{report.shards_written} shard{_s(report.shards_written)} written{reused}, {nbytes_text(report.nbytes)}",
                "green",
            ),
        )
    for names in report.moved_episodes[:SHOWN_ROWS]:
        console.print(Text(f"known under another name: {names}"))
    for name in report.removed_episodes[:SHOWN_ROWS]:
        console.print(Text(f"no longer in the source, kept in the dataset: {name}", "yellow"))
    _print_counts(console, asdict(report))
    for problem in report.problems[:SHOWN_ROWS]:
        console.print(Text(f"  {problem}", "yellow"))
    for note in report.notes:
        console.print(Text(f"note: {note}"))


def print_dataset(summary: Mapping[str, Any]) -> None:
    """Print one screen about a dataset."""
    console = out_console()
    console.print(
        f"[bold]{_plain(summary['path'])}[/bold]: recipe [bold]{_plain(summary['recipe'])}[/bold], generation {summary['generation']}, "
        f"{summary['num_episodes']:,} episode{_s(summary['num_episodes'])}, {summary['num_steps']:,} steps "
        f"({summary['num_invalid_steps']} invalid), {nbytes_text(summary['nbytes'])} from {nbytes_text(summary['source_nbytes'])} raw"
    )
    for target, sources in summary["views_from"].items():
        console.print(Text(f"view {target} <- {' or '.join(sources) or 'nothing'}"))
    for name, columns in summary["signals_from"].items():
        more = f", ... ({len(columns)} columns)" if len(columns) > 6 else ""
        console.print(Text(f"{name} <- {', '.join(columns[:6])}{more}"))
    table = _table("array", "shape", "dtype", "on disk")
    for name, array in summary["arrays"].items():
        shape = " x ".join(f"{side:,}" for side in array["shape"])
        table.add_row(*map(Text, (name, shape, array["dtype"], nbytes_text(array["nbytes"]))))
    console.print(table)
    table = _table("episode", "steps", "rate", "measured", "masked views", "instruction")
    for row in summary["episodes"][:SHOWN_ROWS]:
        said = row["instructions"][0] if row["instructions"] else ""
        steps = f"{row['stop'] - row['start']:,}" + (f" ({row['num_invalid']} invalid)" if row["num_invalid"] else "")
        masked = ", ".join(view for view in summary["views_from"] if view not in row["views"]) or "none"
        rates = f"{row['rate_hz']:g} Hz", f"{row['rate_measured_hz']:.2f} Hz"
        key = row["key"] + (f" (replaced by {row['replaced_by']})" if row["replaced_by"] >= 0 else "")
        table.add_row(*map(Text, (key, steps, *rates, masked, _short(said))))
    console.print(table)
    _print_more(console, summary["episodes"], "episodes")
    if _print_counts(console, summary):
        console.print("(rows in _tables/quarantine-*.parquet, reasons in docs/quarantine.md)")


def _print_counts(console: Console, counts: Mapping[str, Any]) -> bool:
    """Print how much was refused, is odd or was left out, by reason; False where nothing was."""
    kinds = {"quarantined": "quarantined", "warned": "odd, and served", "left_out": "left out"}
    for kind, said in kinds.items():
        if counts[kind]:
            console.print(Text(f"{said}: {reasons_text(counts[kind])}", "yellow"))
    return any(counts[kind] for kind in kinds)


def run_verify(path: Path, *, quick: bool, quiet: bool) -> Any:
    """Verify with a progress bar."""
    from pipeline.verification import verify

    console = err_console()
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        bar = progress.add_task("verifying", total=None)
        return verify(path, quick=quick, progress=lambda done, total: progress.update(bar, completed=done, total=total))


def print_verify(report: Any, path: Path, *, quick: bool = False) -> None:
    """Print the verdict and every problem."""
    console = out_console()
    if report.ok:
        console.print(
            Text(
                f"sound: {path}: {report.num_files:,} files, {nbytes_text(report.nbytes)}{' (quick: no frame was read)' if quick else ''}",
                "green",
            ),
        )
        return
    for problem in report.problems:
        steps = f" steps {problem.start}:{problem.stop}" if problem.stop > problem.start else ""
        place = f"{problem.array}{steps} " if problem.array else ""
        console.print(Text(f"damaged: {place}({problem.path}): {problem.message}", "red"))
    console.print(Text(f"{len(report.problems)} problem{_s(len(report.problems))} in {path}", "red"))


def print_repair(report: Any, path: Path) -> None:
    """Print what was damaged, what was repaired, and what is left."""
    console = out_console()
    for problem in report.damaged:
        console.print(Text(f"damaged: {problem}", "yellow"))
    for file in report.repaired:
        console.print(Text(f"repaired: {file}", "green"))
    for move in report.moved:
        console.print(Text(f"moved away: {move}", "yellow"))
    for problem in report.left:
        console.print(Text(f"left: {problem}", "red"))
    verdict = f"sound: {path}" if report.ok else f"{len(report.left)} problem{_s(len(report.left))} left in {path}"
    console.print(Text(verdict, "green" if report.ok else "red"))


def print_bench(measured: Mapping[str, Any]) -> None:
    """Print what the loaders of a dataset read, beside the limit of the machine."""
    console = out_console()
    console.print(f"{_plain(measured['path'])}: {measured['cores']} cores, load {measured['load']:.1f} before")
    for name, loader in measured["loaders"].items():
        size = nbytes_text(loader["sample_nbytes"])
        console.print(f"[bold]{name}[/bold], batches of {loader['batch_size']}, {size} a sample, in random order")
        table = _table("threads", "samples/s", "MB/s", "copy MB/s", "of copy", "busy cores")
        for row in loader["threads"]:
            rates = (row["samples_per_s"], row["nbytes_per_s"] / 1e6, row["copy_nbytes_per_s"] / 1e6)
            shown = (f"{rate:,.0f}" for rate in rates)
            table.add_row(str(row["threads"]), *shown, f"{row['of_copy']:.0%}", f"{row['busy_cores']:.1f}")
        console.print(table)
        console.print(f"bound by {loader['verdict']}")
    for name, reason in measured["not_measured"].items():
        console.print(Text(f"{name}: not measured: {reason}", "dim"))


def print_recipes(summaries: Sequence[Mapping[str, Any]]) -> None:
    """Print the built-in recipes."""
    table = _table("recipe", "what it makes", "views")
    for row in summaries:
        table.add_row(*map(Text, (row["name"], row["summary"], ", ".join(row["views"]))))
    out_console().print(table)
