"""The command line: a command parses, calls one function, prints its result.

Answers go to standard output; progress and everything else human goes to standard error, so that ``--json`` prints one document.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from pipeline import __version__
from pipeline.cli_jobs import (
    ClusterFileName,
    Json,
    LogJson,
    MemoryProfilePage,
    MetricsFile,
    MetricsPort,
    PerformanceReport,
    ReservedCores,
    perform,
    print_json,
    run,
)
from schemas.errors import HeadraceError, Stopped, UsageError

app = typer.Typer(
    name="headrace",
    help="Raw CARLA and robot recordings in, a checksummed Zarr + Parquet dataset out, training batches on the other side.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipe_app = typer.Typer(help="List recipes, or print one to start from.", no_args_is_help=True)
app.add_typer(recipe_app, name="recipe")

Dataset = Annotated[Path, typer.Argument(help="A dataset that `headrace convert` made.")]
Format = Annotated[str, typer.Option("--format", help="Name of the raw format; found out unless given.")]
ReaderOptions = Annotated[
    list[str] | None,
    typer.Option("--reader", help="Option of the reader, such as channel_order=rgb; see docs/formats.md."),
]
Recipe = Annotated[
    str, typer.Option("--recipe", "-r", help="A built-in recipe (`headrace recipe list`) or a TOML file.")
]


def main() -> NoReturn:
    """Run the command line; errors become one line on standard error and the documented exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # schedulers send SIGTERM before they kill: stop as Ctrl-C does
        signal.signal(number, _stop)
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    as_json = "--json" in arguments
    try:
        raise SystemExit(app(arguments, standalone_mode=not as_json) or 0)
    except HeadraceError as error:
        if debug:
            raise
        _fail(str(error), error.exit_code, error if as_json else None)
    except Stopped as stopped:
        _fail(str(stopped), stopped.exit_code, HeadraceError(str(stopped)) if as_json else None)
    except _ClickError as error:  # only with --json; else it has printed itself
        usage = UsageError(f"{error.format_message().rstrip('.')}; see --help")
        _fail(str(usage), usage.exit_code, usage)
    except BrokenPipeError:  # `headrace ... | head`
        sys.stderr.close()
        raise SystemExit(1) from None
    except OSError as error:
        if debug:
            raise
        message = f"expected to read and write files, found: {error}; correct it and run the same command again"
        _fail(message, 1, HeadraceError(message) if as_json else None)


_ClickError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Of click, or of the copy of it that newer typers bring along."""


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # asked twice, the process dies at once: nothing is lost by that either
    sys.unraisablehook = _stop_again
    raise Stopped(number)


def _stop_again(lost: "sys.UnraisableHookArgs") -> None:
    """Ask again where the signal came in a destructor, such as that of a future of Dask's: no exception gets out of one."""
    if isinstance(lost.exc_value, Stopped):
        signal.signal(lost.exc_value.number, _stop)
        threading.Timer(0.05, os.kill, (os.getpid(), lost.exc_value.number)).start()
    else:
        sys.__unraisablehook__(lost)


def _fail(message: str, code: int, error: HeadraceError | None = None) -> NoReturn:
    """Say it to people, and with ``error`` to programs too, and end."""
    print(f"headrace: {message}", file=sys.stderr)
    if error is not None:
        from pipeline.summaries import error_to_json

        print_json({**error_to_json(error), "exit_code": code})
    raise SystemExit(code)


def _version(asked: bool) -> None:
    if asked:
        print(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Options of every command."""


@app.command()
def inspect(
    raw: Annotated[Path, typer.Argument(help="A folder of raw recordings.")],
    json: Json = False,
    format: Format = "",
    reader: ReaderOptions = None,
) -> None:
    """Say what is here: format, episodes, views, signals, rates, problems. Metadata only, no pixel is decoded."""
    from pipeline import screens, summaries
    from pipeline.readers import open_source
    from pipeline.readers.others import index_source
    from pipeline.recipes import parse_flags

    opened = open_source(raw, format, parse_flags("--reader", reader or []))
    index = index_source(opened, is_chosen=bool(format))
    summary = summaries.summarize_index(index)
    if json:
        print_json(summary)
    else:
        screens.print_index(summary)


@app.command()
def convert(
    paths: Annotated[list[Path], typer.Argument(metavar="RAW... OUT", help="Raw folders, then the dataset to make.")],
    recipe: Recipe = "pi0",
    view: Annotated[
        list[str] | None, typer.Option("--view", help="target=source, such as base_0_rgb=rgb_front.")
    ] = None,
    size: Annotated[int | None, typer.Option(help="Pixels a side of every view.", min=1, max=8192)] = None,
    rate: Annotated[float | None, typer.Option(help="Rate of the output grid in Hz.", min=0.001, max=10_000)] = None,
    codec: Annotated[str | None, typer.Option(help="How frames are stored: raw, zstd, jpeg:Q.")] = None,
    decode: Annotated[
        str | None, typer.Option(help="exact, or fast: large JPEGs at a part of their size, within 45 dB of exact.")
    ] = None,
    shard_steps: Annotated[int | None, typer.Option(help="Steps of a frame shard, a power of two.", min=1)] = None,
    on_bad_frame: Annotated[str | None, typer.Option(help="mask, drop-episode or stop.")] = None,
    map: Annotated[str, typer.Option("--map", help="OpenDRIVE map, or folder of maps, for planner tensors.")] = "",
    planner_store: Annotated[
        str | None, typer.Option(help="samples, or tracks: keep tracks and map, compute samples in the loader.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first refused piece of input.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Discard an unfinished run.")] = False,
    rehash: Annotated[
        bool, typer.Option("--rehash", help="Compare source files by content, not by size and time.")
    ] = False,
    replace: Annotated[
        list[str] | None,
        typer.Option("--replace", metavar="EPISODE", help="An episode whose recording changed: serve the new one."),
    ] = None,
    episodes: Annotated[
        list[str] | None,
        typer.Option("--episodes", metavar="PATTERN|@FILE", help="Take only these now, such as 'town05/*'."),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Take so many new episodes at most now.", min=1)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    format: Format = "",
    reader: ReaderOptions = None,
    workers: Annotated[
        int | None, typer.Option(help="Worker processes; one a core unless given, 0 for none.", min=0)
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of each worker.", min=1)] = 1,
    memory: Annotated[str, typer.Option(help="Memory limit of each worker, such as 2GiB.")] = "auto",
    reserve_cores: ReservedCores = 0,
    scheduler: Annotated[str, typer.Option(help="Address of a running Dask scheduler.")] = "",
    cluster: ClusterFileName = "",
    performance_report: PerformanceReport = "",
    metrics_file: MetricsFile = "",
    metrics_port: MetricsPort = None,
    log_json: LogJson = False,
    memory_profile: MemoryProfilePage = "",
    json: Json = False,
) -> None:
    """Plan, convert and commit. The same command again resumes, or appends episodes that are new."""
    from pipeline.cluster import cluster_options
    from pipeline.conversion import convert as run
    from pipeline.monitor import MonitorOptions
    from pipeline.recipes import parse_flags

    if len(paths) < 2:
        raise UsageError("expected RAW... OUT, found one path; name the dataset to make last")
    monitor = MonitorOptions(
        metrics_file=metrics_file, metrics_port=metrics_port, log_json=log_json, memory_profile=memory_profile
    )
    perform(
        lambda watch: run(
            paths[:-1],
            paths[-1],
            recipe,
            watch=watch,
            views=parse_flags("--view", view or []),
            size=size,
            rate_hz=rate,
            decode=decode,
            codec=codec,
            shard_steps=shard_steps,
            on_bad_frame=on_bad_frame,
            map=map,
            planner_store=planner_store,
            strict=strict,
            restart=restart,
            rehash=rehash,
            replace=replace or [],
            episodes=episodes or [],
            limit=limit,
            dry_run=dry_run,
            format=format,
            reader=parse_flags("--reader", reader or []),
            cluster=cluster_options(
                cluster,
                workers=workers,
                threads=threads,
                memory=memory,
                scheduler=scheduler,
                reserve_cores=reserve_cores,
                performance_report=performance_report,
            ),
        ),
        paths[-1],
        monitor,
        json=json,
    )


app.command()(run)


@app.command()
def info(out: Dataset, json: Json = False) -> None:
    """Say what a dataset holds."""
    from pipeline import screens, summaries

    summary = summaries.summarize_dataset(out)
    if json:
        print_json(summary)
    else:
        screens.print_dataset(summary)


@app.command()
def verify(
    out: Dataset,
    quick: Annotated[
        bool, typer.Option("--quick", help="Existence, sizes, indexes, tables; no frame is read.")
    ] = False,
    repair: Annotated[
        list[Path] | None,
        typer.Option("--repair", metavar="RAW", help="Put damage right, from these recordings where they are needed."),
    ] = None,
    map: Annotated[str, typer.Option("--map", help="With --repair: OpenDRIVE map, or folder of maps.")] = "",
    format: Format = "",
    reader: ReaderOptions = None,
    workers: Annotated[
        int | None, typer.Option(help="With --repair: worker processes; one a core unless given, 0 for none.", min=0)
    ] = None,
    cluster: ClusterFileName = "",
    metrics_file: MetricsFile = "",
    json: Json = False,
) -> None:
    """Compare every byte of a dataset with what was committed; exit code 1 where anything differs."""
    from pipeline import screens, summaries

    if repair:
        from pipeline.cluster import cluster_options
        from pipeline.recipes import parse_flags
        from pipeline.repair import repair as run

        if quick or metrics_file:
            other = "--quick" if quick else "--metrics-file"
            raise UsageError(f"expected {other} or --repair, found both; leave one out")
        with screens.ConvertScreen(quiet=json) as screen:
            found = run(
                out,
                repair,
                format=format,
                reader=parse_flags("--reader", reader or []),
                map=map,
                cluster=cluster_options(cluster, workers=workers),
                watch=screen,
            )
        print_json(summaries.verify_to_json(found)) if json else screens.print_repair(found, out)
        raise typer.Exit(0 if found.ok else 1)
    report = screens.run_verify(out, quick=quick, quiet=json)
    if metrics_file:
        from pipeline.metrics import write_verify_metrics

        write_verify_metrics(metrics_file, report, out.expanduser().absolute())
    if json:
        print_json(summaries.verify_to_json(report))
    else:
        screens.print_verify(report, out, quick=quick)
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def preview(
    path: Annotated[Path, typer.Argument(help="A folder of raw recordings, or a dataset.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="What to write, by its ending: .html, .png, .mp4 or .rrd.")
    ],
    episode: Annotated[int | None, typer.Option(help="The only episode to show, by its number.", min=0)] = None,
    episodes: Annotated[int, typer.Option(help="Episodes to show, at most.", min=1)] = 12,
    samples: Annotated[int, typer.Option(help="Planner samples to show, at most.", min=1)] = 6,
    json: Json = False,
    format: Format = "",
    reader: ReaderOptions = None,
) -> None:
    """Look at recordings or a dataset: a page, a picture, a video of one episode, or a Rerun recording."""
    from pipeline.preview import write_preview
    from pipeline.recipes import parse_flags
    from pipeline.summaries import nbytes_text

    options = {"episode": episode, "episodes": episodes, "samples": samples}
    written = write_preview(path, output, format=format, reader=parse_flags("--reader", reader or []), **options)
    if json:
        print_json(written)
    else:
        print(f"{output}: {nbytes_text(output.stat().st_size)}")


@app.command()
def stats(
    out: Dataset,
    format: Annotated[
        str, typer.Option("--format", help="openpi, lerobot, lerobot-episodes, diffusion-policy or diffusion-planner.")
    ] = "openpi",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; standard output unless given.")
    ] = None,
    horizon: Annotated[
        int | None, typer.Option(help="Steps of an action chunk; the recipe's unless given.", min=1)
    ] = None,
    delta: Annotated[str, typer.Option(help="Delta dimensions as openpi spells them, such as 6,-1,6,-1.")] = "",
    tail: Annotated[str, typer.Option(help="repeat the last action, or drop chunks that are not whole.")] = "repeat",
    adapter: Annotated[
        str, typer.Option(help="aloha: state and actions as openpi's adapt_to_pi gives them, before --delta.")
    ] = "",
    published: Annotated[
        bool, typer.Option("--published", help="Diffusion Planner's published constants, not computed ones.")
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="FILE", help="Frozen norm_stats.json: say how far the data lies from it."),
    ] = None,
    json: Json = False,
) -> None:
    """Compute statistics of what training sees, exactly and without touching a pixel."""
    from pipeline import screens
    from pipeline.stats_export import parse_delta, stats_file

    mask = parse_delta(delta)
    if against is not None:
        from pipeline.drift import drift_report

        if format != "openpi" or output is not None or published:
            raise UsageError("expected --against alone, found it with --format, -o or --published; leave those out")
        report = drift_report(out, against, horizon=horizon, delta_mask=mask, tail=tail, adapter=adapter)
        print_json(report.to_json()) if json else screens.print_drift(report)
        raise typer.Exit(3 if report.drifted else 0)
    options = {"horizon": horizon, "delta_mask": mask, "tail": tail, "adapter": adapter}
    data = stats_file(out, format, published=published, **options)  # type: ignore[arg-type]
    if format == "openpi":
        screens.warn_near_constant(data)
    if output is None:
        sys.stdout.write(data.decode())
    else:
        output.write_bytes(data)


@app.command()
def bench(
    out: Dataset,
    json: Json = False,
    batch_size: Annotated[int, typer.Option(help="Samples of a batch.", min=1)] = 32,
    threads: Annotated[int, typer.Option(help="Most threads of a loader; one a core unless given.", min=0)] = 0,
    seconds: Annotated[float, typer.Option(help="Seconds of each single measurement.", min=0.01)] = 0.5,
) -> None:
    """Measure what the loaders read on this machine, beside what it can copy, and say what bounds them."""
    from pipeline import screens
    from pipeline.bench import bench_dataset

    measured = bench_dataset(out, batch_size=batch_size, max_threads=threads, seconds=seconds)
    if json:
        print_json(measured)
    else:
        screens.print_bench(measured)


@app.command()
def export(
    out: Dataset,
    target: Annotated[Path, typer.Argument(help="A new folder.")],
    to: Annotated[
        str, typer.Option("--to", help="lerobot (2.1, which openpi reads), lerobot-v3 (3.0) or planner-npz.")
    ] = "lerobot",
    images: Annotated[str, typer.Option(help="png (lossless), jpeg or video.")] = "png",
    view: Annotated[list[str] | None, typer.Option("--view", help="A view to export; all unless given.")] = None,
    json: Json = False,
) -> None:
    """Write a dataset in another format, so that nobody is locked in."""
    from pipeline.export import export_dataset

    report = export_dataset(out, target, to, images=images, views=tuple(view or ()))
    if json:
        print_json(report)
    else:
        print(", ".join(f"{name} {value}" for name, value in report.items()))


@app.command()
def gc(out: Dataset, json: Json = False) -> None:
    """Remove the tables of old generations; readers that opened one lose it."""
    from dataclasses import asdict

    from pipeline import summaries
    from pipeline.generations import remove_old_generations

    removed = remove_old_generations(out)
    if json:
        print_json(asdict(removed))
    else:
        size = summaries.nbytes_text(removed.nbytes)
        print(f"removed {len(removed.paths)} files, {size}; generation {removed.generation} stays")


@recipe_app.command("list")
def recipe_list(json: Json = False) -> None:
    """List the built-in recipes."""
    from pipeline import screens, summaries
    from pipeline.recipes import BUILT_IN

    found = summaries.summarize_recipes(BUILT_IN)
    if json:
        print_json(found)
    else:
        screens.print_recipes(found)


@recipe_app.command("show")
def recipe_show(name: Annotated[str, typer.Argument(help="A recipe's name or file.")], json: Json = False) -> None:
    """Print a recipe as TOML, to start from."""
    from pipeline.recipes import BUILT_IN, load_recipe, recipe_text
    from schemas.recipe import recipe_to_mapping

    recipe = load_recipe(name)
    if json:
        print_json(recipe_to_mapping(recipe))
    else:
        print(recipe_text(name) if name in BUILT_IN else Path(name).read_text("utf-8"), end="")


@app.command()
def demo(
    folder: Annotated[Path, typer.Argument(help="A new folder for the demonstration.")],
    json: Json = False,
) -> None:
    """Make small raw drives and a robot set, convert them for Pi0 and Diffusion Planner, verify, and iterate batches."""
    from pipeline.demo.walk import run_demo

    summary = run_demo(folder, quiet=json)
    if json:
        print_json(summary)


if __name__ == "__main__":
    main()
