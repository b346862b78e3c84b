"""How fast images become training input, beside Pillow, OpenCV and torchvision where they are installed.

    python benchmarks/pixels.py [--rounds 15] [--json]

Input is photographic: mosaics of the photographs that scikit-image and scikit-learn ship, where they are installed, else clouds of
noise with the spectrum of a photograph. Every table is one run: contestants take turns, round after round, and the best round of
each counts, in ms per image on one thread unless it says otherwise; `x` is Pillow's time over the contestant's. One thread is timed
by its own CPU clock, which other programs disturb least; two threads and latencies by the wall's. Each runs once
before it is timed, so that no compilation is in the times; what compiling costs is a table of its own.

What was not reached (two virtual cores of a Xeon, 2026-12-01, everything else stopped): two threads were asked to be 1.85 times one;
1920x1080 q90 gave 1.73 exact and 1.77 fast, where libjpeg-turbo alone, decoding and nothing else, gave 1.71. That is the machine's
limit: the two threads share no lock of ours, and what remains of a frame after decoding is a tenth of it.
"""

import argparse
import importlib.util
import io
import itertools
import json
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import PIL
import simplejpeg
from PIL import Image

from pipeline.loaders import MultiViewPreprocessor
from schemas.recipe import Recipe, ViewRecipe
from tasks.normalize import SIGNED_MEAN, SIGNED_STD, normalize_images
from tasks.resize import decode_resized, place, resize_frame

TARGET = (224, 224)
PHOTOGRAPHS = {
    "skimage": [
        "data/astronaut.png",
        "data/coffee.png",
        "data/chelsea.png",
        "data/rocket.jpg",
        "data/motorcycle_left.png",
    ],
    "sklearn": ["datasets/images/china.jpg", "datasets/images/flower.jpg"],
}
NUMPY_EXPRESSION, OPENPI_EXPRESSION = "NumPy ((x / 255 - mean) / std)", "openpi (astype(float32) / 255 * 2 - 1)"
Work = Callable[[], Any]
Name = TypeVar("Name")


def photographs() -> list[Image.Image]:
    """Return the photographs that installed packages ship, without importing them."""
    found = []
    for package, names in PHOTOGRAPHS.items():
        spec = importlib.util.find_spec(package)
        if spec and spec.origin:
            found += [
                Image.open(path).convert("RGB")
                for path in (Path(spec.origin).parent / name for name in names)
                if path.exists()
            ]
    return found


def scene(height: int, width: int, seed: int) -> Image.Image:
    """Return a mosaic of photographs at their own resolution, or clouds where there are none."""
    photos = photographs()
    if not photos:
        return clouds(height, width, seed)
    canvas = Image.new("RGB", (width, height))
    order = itertools.cycle(photos[seed % len(photos) :] + photos[: seed % len(photos)])
    top = 0
    while top < height:
        left, row_height = -37 * seed, 0
        while left < width:
            photo = next(order)
            canvas.paste(photo, (left, top))
            left, row_height = left + photo.width, max(row_height, 300)
        top += row_height
    return canvas


def clouds(height: int, width: int, seed: int) -> Image.Image:
    """Return noise whose amplitude falls with frequency, as a photograph's does."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    spectrum = rng.normal(size=(3, *frequency.shape, 2)) @ [1, 1j] / np.maximum(frequency, 1 / width) ** 1.1
    image = np.moveaxis(np.fft.irfft2(spectrum, (height, width)), 0, 2)
    return Image.fromarray(np.clip(image / image.std() * 50 + 128, 0, 255).astype(np.uint8))


def jpeg(image: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def best_ms(
    contestants: dict[Name, Work], rounds: int, per_call: int = 1, clock: Callable[[], float] = time.thread_time
) -> dict[Name, float]:
    """Return the best round of each in ms, divided by ``per_call``."""
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(rounds + 1):
        for name, work in contestants.items():
            start = clock()
            work()
            best[name] = min(best[name], (clock() - start) * 1e3 / per_call)
    return best


def over(images: Sequence[bytes], decode: Callable[[bytes, np.ndarray], Any]) -> Work:
    out = np.zeros((*TARGET, 3), np.uint8)
    return lambda: [decode(image, out) for image in images]


def on_threads(work: Callable[[], Work], number: int = 2) -> Work:
    """Run as many independent copies of the work at once."""
    copies = [work() for _ in range(number)]

    def run() -> None:
        threads = [threading.Thread(target=copy) for copy in copies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run


def pillow(data: bytes, out: np.ndarray) -> None:
    """openpi's ``resize_with_pad`` on an image from a file."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    top, left, height, width = place((image.height, image.width), TARGET).target
    canvas = Image.new("RGB", TARGET[::-1], 0)
    canvas.paste(image.resize((width, height), Image.Resampling.BILINEAR), (left, top))
    out[...] = np.asarray(canvas)


def opencv(data: bytes, out: np.ndarray) -> None:
    """What converters commonly do: area interpolation, which is near Pillow's and not equal."""
    import cv2

    image = cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
    top, left, height, width = place(image.shape[:2], TARGET).target
    out[:] = 0
    out[top : top + height, left : left + width] = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)


def torchvision(data: bytes, out: np.ndarray) -> None:
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms.v2.functional import resize

    image = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
    top, left, height, width = place((image.shape[1], image.shape[2]), TARGET).target
    out[:] = 0
    out[top : top + height, left : left + width] = (
        resize(image, [height, width], antialias=True).permute(1, 2, 0).numpy()
    )


def exact(data: bytes, out: np.ndarray) -> None:
    decode_resized(data, out)


def fast(data: bytes, out: np.ndarray) -> None:
    decode_resized(data, out, fast=True)


def bare(data: bytes, out: np.ndarray) -> None:
    """Full decoding alone, by libjpeg-turbo through the thinnest wrapper."""
    simplejpeg.decode_jpeg(data, "RGB")


def bare_pillow(data: bytes, out: np.ndarray) -> None:
    np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def bare_opencv(data: bytes, out: np.ndarray) -> None:
    import cv2

    cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)


def contestants() -> dict[str, Callable[[bytes, np.ndarray], None]]:
    found: dict[str, Callable[[bytes, np.ndarray], None]] = {"Pillow": pillow}
    if importlib.util.find_spec("cv2"):
        import cv2

        cv2.setNumThreads(1)
        found["OpenCV area"] = opencv
        found["OpenCV, decoding only"] = bare_opencv
    if importlib.util.find_spec("torchvision"):
        import torch

        torch.set_num_threads(1)
        found["torchvision"] = torchvision
    found["Pillow, decoding only"] = bare_pillow
    return {**found, "simplejpeg, decoding only": bare, "Headrace exact": exact, "Headrace fast": fast}


def threaded_contestants() -> dict[str, Callable[[bytes, np.ndarray], None]]:
    """Bare decoding shows how far two threads can go on this machine at all."""
    return {"Pillow": pillow, "simplejpeg, decoding only": bare, "Headrace exact": exact, "Headrace fast": fast}


def difference(images: Sequence[bytes], decode: Callable[[bytes, np.ndarray], None]) -> str:
    """Return greatest difference and PSNR against the exact path, worst image."""
    one, other = np.zeros((*TARGET, 3), np.uint8), np.zeros((*TARGET, 3), np.uint8)
    most, worst = 0, float("inf")
    for image in images:
        exact(image, one)
        decode(image, other)
        error = np.abs(one.astype(int) - other)
        most = max(most, int(error.max()))
        top, left, height, width = place(simplejpeg.decode_jpeg_header(image)[:2], TARGET).target
        squared = float((error[top : top + height, left : left + width] ** 2).mean())
        worst = min(worst, 10 * np.log10(255**2 / squared) if squared else float("inf"))
    return "equal" if most == 0 else f"max {most}, {worst:.1f} dB"


def decoding(height: int, width: int, quality: int, rounds: int) -> list[dict[str, Any]]:
    images = [jpeg(scene(height, width, seed), quality) for seed in range(4)]
    single = best_ms({name: over(images, work) for name, work in contestants().items()}, rounds, len(images))
    threaded = {
        (name, number): on_threads(lambda decode=decode: over(images, decode), number)
        for name, decode in threaded_contestants().items()
        for number in (1, 2)
    }
    wall = best_ms(threaded, rounds, len(images), time.perf_counter)
    rows = []
    for name, ms in single.items():
        row: dict[str, Any] = {
            "input": f"{width}x{height} q{quality}",
            "what": name,
            "ms": ms,
            "x": single["Pillow"] / ms,
        }
        if not name.endswith("decoding only"):
            row["error"] = difference(images, contestants()[name])
        if (name, 2) in wall:
            row["2 threads"] = 2 * wall[name, 1] / wall[name, 2]
        rows.append(row)
    return rows


def resizing(height: int, width: int, rounds: int) -> list[dict[str, Any]]:
    image = scene(height, width, 1)
    frame, out = np.asarray(image), np.zeros((*TARGET, 3), np.uint8)
    _, _, inner_height, inner_width = place((height, width), TARGET).target
    works: dict[str, Work] = {
        "Pillow": lambda: image.resize((inner_width, inner_height), Image.Resampling.BILINEAR),
        "Headrace": lambda: resize_frame(frame, out),
    }
    if importlib.util.find_spec("cv2"):
        import cv2

        works["OpenCV area"] = lambda: cv2.resize(frame, (inner_width, inner_height), interpolation=cv2.INTER_AREA)
    best = best_ms({name: lambda work=work: [work() for _ in range(10)] for name, work in works.items()}, rounds, 10)
    what = f"resize {width}x{height} to {inner_width}x{inner_height}"
    return [{"input": what, "what": name, "ms": ms, "x": best["Pillow"] / ms} for name, ms in best.items()]


def normalising(rounds: int, num_frames: int = 96) -> list[dict[str, Any]]:
    """A batch of 32 steps of 3 views; bytes moved are those read and written."""
    frames = np.random.default_rng(0).integers(0, 256, (num_frames, *TARGET, 3), dtype=np.uint8)
    mean, std = np.array(SIGNED_MEAN), np.array(SIGNED_STD)
    rows = []
    for dtype, layout in itertools.product(("float32", "float16", "uint16"), ("channels last", "channels first")):
        shape = frames.shape if layout == "channels last" else (num_frames, 3, *TARGET)
        out = np.zeros(shape, dtype)
        half = (frames.nbytes + out.nbytes) // 2
        source, target = np.ones(half, np.uint8), np.zeros(half, np.uint8)
        works: dict[str, Work] = {
            "memcpy of the same bytes": lambda source=source, target=target: np.copyto(target, source),
            "Headrace": lambda out=out: normalize_images(frames, mean, std, out),
        }
        if dtype == "float32" and layout == "channels last":
            works[NUMPY_EXPRESSION] = lambda: ((frames / 255.0 - mean) / std).astype(np.float32)
            works[OPENPI_EXPRESSION] = lambda: frames.astype(np.float32) / 255.0 * 2.0 - 1.0
        best = best_ms(works, rounds)
        copy = best["memcpy of the same bytes"]
        what = f"normalise {num_frames} frames to {'bfloat16' if dtype == 'uint16' else dtype}, {layout}"
        rows += [
            {"input": what, "what": name, "ms": ms, "of memcpy": ms / copy, "x": ms / best["Headrace"]}
            for name, ms in best.items()
        ]
    return rows


def latency(height: int, width: int, calls: int) -> list[dict[str, Any]]:
    """What a control loop waits for three views: Pillow one after another, against the preprocessor."""
    views = tuple(ViewRecipe(name=name) for name in ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"))
    images = [jpeg(scene(height, width, seed), 90) for seed in range(3)]
    out = np.zeros((3, *TARGET, 3), np.uint8)
    rows = []
    with MultiViewPreprocessor(Recipe(name="pi0", views=views)) as prepare:
        prepare.warm()
        serial = MultiViewPreprocessor(prepare.recipe, threads=1)
        works: dict[str, Work] = {
            "Pillow": lambda: [pillow(image, place) for image, place in zip(images, out, strict=True)],
            "MultiViewPreprocessor, 1 thread": lambda: serial(images, out),
            f"MultiViewPreprocessor, {prepare.threads} threads": lambda: prepare(images, out),
        }
        times: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(calls):
            for name, work in works.items():
                start = time.perf_counter()
                work()
                times[name].append((time.perf_counter() - start) * 1e3)
    for name, found in times.items():
        p50, p99 = np.quantile(found, [0.5, 0.99])
        base = np.median(times["Pillow"])
        rows.append({"input": f"3 views {width}x{height} q90", "what": name, "ms": p50, "p99": p99, "x": base / p50})
    return rows


def compiling() -> list[dict[str, Any]]:
    """First use in a fresh process, in CPU time."""
    code = """if True:
        import time, numpy as np
        t = time.process_time(); import tasks.resize, tasks.normalize; print(time.process_time() - t)
        t = time.process_time(); tasks.resize.warm(); print(time.process_time() - t)
        t = time.process_time(); tasks.resize.warm(); print(time.process_time() - t)
        f = np.zeros((8, 8, 3), np.uint8); o = np.zeros(f.shape, np.float32)
        t = time.process_time(); tasks.normalize.normalize_images(f, (0, 0, 0), (1, 1, 1), o); print(time.process_time() - t)
    """
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    names = ["import of tasks.resize and tasks.normalize", "first resize", "second resize", "first normalise"]
    return [
        {"input": "CPU time in a fresh process", "what": name, "ms": float(line) * 1e3}
        for name, line in zip(names, done.stdout.split(), strict=True)
    ]


def targets(tables: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return what was asked of each, beside what this run measured."""
    rows = [row for table in tables.values() for row in table]

    def of(start: str, what: str) -> dict[str, Any]:
        return next(row for row in rows if row["input"].startswith(start) and row["what"] == what)

    large, small = "1920x1080 q90", "640x480 q90"
    exact, fast, bare = of(large, "Headrace exact"), of(large, "Headrace fast"), of(large, "simplejpeg, decoding only")
    normalised = [row for row in rows if row["input"].startswith("normalise") and row["what"] == "Headrace"]
    naive, openpi = (of("normalise", name) for name in (NUMPY_EXPRESSION, OPENPI_EXPRESSION))
    found = [
        ("exact, 1920x1080 q90, times Pillow", ">= 1.5 (stretch 1.7)", exact["x"]),
        ("exact, 1920x1080 q90, of bare decoding", "stretch <= 1.15", exact["ms"] / bare["ms"]),
        ("fast, 1920x1080 q90, times Pillow", ">= 2.4", fast["x"]),
        ("fast, 1920x1080 q90, against exact", ">= 45 dB", fast["error"]),
        ("exact on two threads, times one", ">= 1.85", exact["2 threads"]),
        ("fast on two threads, times one", ">= 1.85", fast["2 threads"]),
        ("bare decoding on two threads, times one", "the limit", bare["2 threads"]),
        ("exact, 640x480 q90, times Pillow", ">= 1.3 (stretch 1.6)", of(small, "Headrace exact")["x"]),
        ("resize 640x480, times Pillow", ">= 1.3 (stretch 2.5)", of("resize 640x480", "Headrace")["x"]),
        *((f"{row['input']}, of memcpy", "<= 1.25", row["of memcpy"]) for row in normalised),
        ("normalise, times NumPy", ">= 8", naive["x"]),
        ("normalise, times openpi", ">= 4", openpi["x"]),
    ]
    return [{"what": what, "asked": asked, "measured": measured} for what, asked, measured in found]


def table(rows: list[dict[str, Any]]) -> str:
    """Format rows as Markdown with the columns that any of them has."""
    columns = list(dict.fromkeys(column for row in rows for column in row))

    def cell(value: Any) -> str:
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(
        lines + ["| " + " | ".join(cell(row.get(column, "")) for column in columns) + " |" for row in rows]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rounds = options.rounds
    tables = {
        "JPEG bytes to 224x224, padded": [
            row
            for (height, width), quality in itertools.product([(1080, 1920), (480, 640)], [75, 90, 95])
            for row in decoding(height, width, quality, rounds)
        ],
        "Resizing alone": [row for size in [(1080, 1920), (480, 640)] for row in resizing(*size, rounds)],
        "Normalising a batch": normalising(rounds),
        "Latency of a control loop (ms is p50)": [
            row for size in [(1080, 1920), (480, 640)] for row in latency(*size, 20 * rounds)
        ],
        "Compilation": compiling(),
    }
    tables["What was asked"] = targets(tables)
    facts = {
        "python": platform.python_version(), "numpy": np.__version__, "pillow": PIL.__version__, "machine": platform.machine(),
        "photographs": len(photographs()), "rounds": rounds,
    }  # fmt: skip
    if options.json:
        print(json.dumps({**facts, "tables": tables}, indent=2))
        return
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for title, rows in tables.items():
        print(f"\n{title}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
