"""What a preview shows, and that it is one safe page of bounded size whatever it is made of."""

import importlib.util
import json
import math
import re
import shutil
import time
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.preview import write_preview
from pipeline.preview.film import Film
from pipeline.preview.material import PreviewOptions, open_subject
from pipeline.preview.page import MAX_NBYTES, build_page
from pipeline.preview.planner_view import COLOURS, counted, draw_picture, draw_svg
from pipeline.preview.raw_subject import as_picture
from pipeline.preview.subject import TO_UNIT_RANGE, Episode, Refusals, Signal
from pipeline.store.metadata import read_info
from pipeline.verification import verify
from schemas.errors import MissingExtraError, Reason, UsageError
from schemas.source import Fault
from tasks.from_above import marks_of
from tests.pipeline.readers.builders import write_lerobot, write_npy
from tests.pipeline.recordings import frame, truncate, write_recipe, write_route
from tests.tasks.test_from_above import sample

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)> \" ' & &amp; ]]> שלום \u202e \x00\x07"
VOID = {"img", "meta", "link", "br", "col"}


class Page(HTMLParser):
    """The parsed page; every element must be closed in order."""

    def __init__(self, data: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(data.decode("utf-8"))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def check_page(data: bytes) -> Page:
    """Hold what every page must be."""
    page = Page(data)
    assert len(data) < MAX_NBYTES
    names = Counter(name for name, _ in page.elements)
    assert not names.keys() & {"script", "iframe", "object", "embed", "form", "input", "audio", "video", "base"}
    assert [names[name] for name in ("h1", "main", "header", "nav", "title")] == [1] * 5
    assert page.all("html") == [{"lang": "en"}]
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        assert not any(name.startswith("on") or name == "style" for name in attributes)
        for name in ("src", "href"):
            target = attributes.get(name) or "data:"
            assert target.startswith("data:") or target[1:] in ids, target[:80]
        assert attributes.get("aria-labelledby") in (None, *ids)
    assert all(attributes["alt"] for attributes in page.all("img"))
    assert all(attributes.get("scope") for attributes in page.all("th"))
    assert all(attributes.get("aria-label") or attributes.get("aria-hidden") for attributes in page.all("svg"))
    levels = [int(name[1]) for name, _ in page.elements if re.fullmatch("h[1-6]", name)]
    assert all(next_level <= level + 1 for level, next_level in pairwise(levels))
    assert "url(" not in data.decode() and "@import" not in data.decode()
    return page


def page_of(path: Path, **options: int) -> Page:
    return check_page(build_page(open_subject(path), PreviewOptions(**options)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two routes, of which the second lacks a view and has a broken frame, raw and converted."""
    folder = tmp_path_factory.mktemp("preview")
    write_route(folder / "raw", 1, 9)
    write_route(folder / "raw", 2, 7, views=("rgb",))
    truncate(folder / "raw" / "route_02" / "rgb" / "0003.png")
    report = convert(folder / "raw", folder / "out", write_recipe(folder), cluster=ClusterOptions(workers=0))
    assert report.total_steps == 16
    return folder


@pytest.mark.parametrize("name", ["raw", "out"])
def test_a_page_says_what_is_there_what_is_missing_and_what_was_refused(folder, name):
    page = page_of(folder / name)
    view = "rgb_left" if name == "raw" else "left"
    assert f"View {view} is missing from 1 of 2 episodes." in page.text
    assert "decode" in page.text or "truncated" in page.text
    assert "route_02" in page.text and "0003.png" in page.text
    assert any("just before" in attributes["alt"] for attributes in page.all("img"))
    for part in ("Views", "Frames", "Trajectories", "Rate, jitter and gaps", "Quarantine", "Colours and brightness"):
        assert part in page.text
    assert "Shown: all 2 episodes" in page.text


def test_units_reach_the_dataset_and_the_page(folder):
    attributes = dict(read_info(folder / "out").arrays["state"].attributes)
    assert (attributes["features"], attributes["feature_units"]) == (["speed"], ["m/s"])
    assert all(" m/s, median" in page_of(folder / name).text for name in ("raw", "out"))


def test_a_page_of_a_dataset_names_its_checksums_and_sizes(folder):
    text = page_of(folder / "out").text
    document = json.loads((folder / "out" / "zarr.json").read_text())["attributes"]["headrace"]
    assert document["metadata_xxh3"] in text
    assert all(table["xxh3"] in text for table in document["tables"].values())
    assert "times the raw size of" in text


@pytest.mark.parametrize("name", ["raw", "out"])
def test_the_same_input_gives_the_same_page(folder, name):
    first, second = (build_page(open_subject(folder / name), PreviewOptions()) for _ in range(2))
    assert first == second


def test_what_stands_out_names_the_episode(tmp_path):
    for route in range(1, 5):
        write_route(tmp_path / "raw", route, 4, views=("rgb",))
    y, x = np.mgrid[:48, :64]
    scene = np.stack([220 - 3 * y, 60 + y, 30 + x], axis=2).astype(np.uint8)
    for route, shown in ((1, scene), (2, scene[:, :, ::-1]), (3, scene), (4, scene)):
        for step in range(4):
            picture = shown * (route != 3 or step < 2)
            Image.fromarray(picture).save(tmp_path / "raw" / f"route_{route:02d}" / "rgb" / f"{step:04d}.png")
    text = page_of(tmp_path / "raw").text
    assert "rgb of route_02 looks unlike the other episodes, as if red and blue were swapped." in text
    assert "2 of 16 frames of rgb are black, or nearly: route_03." in text
    assert text.count("looks unlike") == text.count("or nearly") == 1


def test_recordings_of_no_fixed_rate_are_as_long_as_their_times_say(tmp_path):
    subject = open_subject(write_npy(tmp_path / "raw", 4, timestamp_s=np.array([0.0, 0.3, 0.7, 2.5])))
    assert [episode.rate_hz for episode in subject.episodes] == [0.0]
    assert "Duration2.5 s" in check_page(build_page(subject, PreviewOptions())).text


def test_one_episode_alone(folder):
    page = page_of(folder / "out", episode=1)
    assert "Episode 1 route_02" in page.text and "Episode 0" not in page.text
    with pytest.raises(UsageError, match="0 to 1, found 2"):
        page_of(folder / "out", episode=2)


def test_strings_from_the_data_are_text_and_nothing_else(tmp_path):
    raw = write_lerobot(tmp_path / "a<b>&'\"")
    tasks = [{"task_index": 7, "task": HOSTILE}, {"task_index": 3, "task": "משוך"}]
    (raw / "meta/tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    lines = [{"episode_index": k, "tasks": [HOSTILE], "length": n} for k, n in ((0, 3), (1, 4))]
    (raw / "meta/episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    convert(raw, tmp_path / "out", "pi0", cluster=ClusterOptions(workers=0))
    for path in (raw, tmp_path / "out"):
        page = page_of(path)
        assert HOSTILE.replace("\x00", "\ufffd").replace("\x07", "\ufffd") in page.text
        assert all(attributes.get("dir") == "auto" for attributes in page.all("q")) and page.all("q")
    assert "a<b>&'\"" in page_of(raw).text


class Huge:
    """Ten thousand episodes of a hundred steps, thirty views of noise, 480 features, everything of it refused."""

    path, kind, num_steps = Path("huge"), "raw recordings", 1_000_000
    frame_scaling = TO_UNIT_RANGE

    def __init__(self) -> None:
        self.views = {f"view_{k}": "noise" for k in range(30)}
        shown = frozenset(self.views)
        said = ("word " * 500, *("again " * 200,) * 200)
        self.episodes = [
            Episode(key=f"episode {k} " + "x" * 300, num_steps=100, rate_hz=10.0, views=shown, instructions=said)
            for k in range(10_000)
        ]
        names = tuple(f"feature {k} " + "y" * 60 for k in range(48))
        self.signals = [Signal(name=f"signal {k}", features=names, units=("m",) * 48) for k in range(10)]
        self.reads = 0

    def frames(self, episode, view, steps):
        self.reads += len(steps)
        return [np.random.default_rng(step).integers(0, 256, (240, 320, 3), np.uint8) for step in steps]

    def rows(self, episode, names, steps):
        self.reads += len(steps)
        rng = np.random.default_rng(episode)
        return {name: rng.normal(size=(len(steps), 48)) for name in names}

    def times(self, episode, steps):
        return steps / 10.0

    def lateness(self, episode, steps):
        return "late", np.random.default_rng(episode).normal(size=len(steps))

    def sample(self, names):
        return {}

    def refusals(self, count):
        fault = Fault(reason=Reason.DECODE, message="z" * 5000, episode="e" * 5000, path="p" * 5000)
        return Refusals(counts={"decode": 1_000_000}, shown=(fault,) * count)

    def near(self, fault):
        return np.random.default_rng(0).integers(0, 256, (240, 320, 3), np.uint8), "noise"

    def facts(self):
        return [("Note", "n" * 10_000)]

    def provenance(self, episodes):
        return []


def test_a_page_stays_small_and_reads_little_whatever_it_is_made_of():
    huge = Huge()
    began = time.perf_counter()
    page = check_page(build_page(huge, PreviewOptions()))
    assert time.perf_counter() - began < 60  # a bound on the order of the work, not a timing
    assert huge.reads < 12 * (12 * 8 + 240 + 8)
    assert "12 of 30 views" in page.text and "of 10,000 episodes" in page.text and "128 of 480 features" in page.text
    assert "40 of 1,000,000 pieces" in page.text


def test_values_that_are_not_finite_are_drawn_around(tmp_path):
    state = np.full((5, 3), np.nan, np.float32)
    state[:, 1] = [0, math.inf, -math.inf, 1e38, 2]
    write_npy(tmp_path / "raw", state=state)
    page = page_of(tmp_path / "raw")
    assert "have values that are not finite" in page.text
    assert not any("nan" in (attributes.get("d") or "") for attributes in page.all("path"))


@pytest.mark.parametrize("name", ["page.pdf", "page", "page.htm", "no/page.html"])
def test_an_output_of_another_kind_is_refused_before_anything_is_read(tmp_path, name):
    with pytest.raises(UsageError, match="expected"):
        write_preview(tmp_path / "nothing", tmp_path / name)


@pytest.mark.parametrize("name", ["page.html", "sheet.png", "episode.mp4"])
def test_what_is_stopped_leaves_the_output_that_was_there_and_nothing_else(folder, tmp_path, monkeypatch, name):
    (tmp_path / name).write_bytes(b"from before")

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", full)
        with pytest.raises(OSError, match="No space"):
            write_preview(folder / "raw", tmp_path / name)
        assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(name, b"from before")]
    assert write_preview(folder / "raw", tmp_path / name)["path"] == str(tmp_path / name)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() != b"from before"


def test_a_folder_is_no_output(folder, tmp_path):
    (tmp_path / "page.html").mkdir()
    with pytest.raises(UsageError, match="found a folder"):
        write_preview(folder / "raw", tmp_path / "page.html")


def test_nothing_is_written_into_what_is_looked_at(folder):
    with pytest.raises(UsageError, match="outside of"):
        write_preview(folder / "out", folder / "out" / "report.html")


def test_a_picture_shows_the_frames_that_were_recorded(folder, tmp_path):
    written = write_preview(folder / "out", tmp_path / "sheet.png", episode=0)
    with Image.open(tmp_path / "sheet.png") as picture:
        picture.load()
    assert (picture.width, picture.height) == (written["width_px"], written["height_px"])
    assert picture.width > 8 * 200


def test_depth_and_labels_become_pictures():
    depth = as_picture(np.array([[1.0, 10.0, 1000.0]], np.float32))
    assert depth[0, 0].tolist() == [255] * 3 and depth[0, 2].tolist() == [0] * 3 and 100 < depth[0, 1, 0] < 200
    labels = as_picture(np.array([[0, 1, 2, 1]], np.uint8))
    assert labels[0, 0].tolist() == [0, 0, 0]
    assert labels[0, 1].tolist() == labels[0, 3].tolist() != labels[0, 2].tolist()


def test_a_video_shows_every_step_of_an_episode_in_order(folder, tmp_path):
    import av

    written = write_preview(folder / "out", tmp_path / "episode.mp4", episode=0)
    assert written["pictures"] == written["steps"] == 9
    with av.open(str(tmp_path / "episode.mp4")) as video:
        pictures = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
        assert float(video.streams.video[0].average_rate) == written["rate_hz"] == 2
    assert len(pictures) == 9
    redness = [(picture[-40:, :342, 0].astype(int) - picture[-40:, :342, 1]).sum(axis=0) for picture in pictures]
    now = [int(row.argmax()) for row in redness]
    assert now == sorted(set(now))  # the line moves on at every step
    expected = [frame(1, step, 0)[1:].mean(axis=(0, 1)) for step in range(9)]
    found = [picture[80:280, 8:330].mean(axis=(0, 1)) for picture in pictures]
    assert [np.abs(np.array(expected) - row).sum(axis=1).argmin() for row in found] == list(range(9))


def test_a_long_episode_is_shown_at_its_own_speed():
    huge = Huge()
    huge.episodes = [replace(huge.episodes[0], num_steps=100_000, rate_hz=30.0)]
    film = Film(huge, 0)
    assert len(film.steps) <= 1800
    assert len(film.steps) / film.rate_hz == pytest.approx(100_000 / 30.0, rel=1e-3)


def test_a_rerun_recording_needs_its_extra(folder, tmp_path):
    if importlib.util.find_spec("rerun") is None:
        with pytest.raises(MissingExtraError, match=r"headrace\[rerun\]"):
            write_preview(folder / "out", tmp_path / "out.rrd")
        return
    written = write_preview(folder / "out", tmp_path / "out.rrd")
    data = (tmp_path / "out.rrd").read_bytes()
    assert written["episodes"] == [0, 1] and data[:3] == b"RRF"


@pytest.mark.parametrize("hostile", [HOSTILE, "x" * 100_000])
def test_what_a_notebook_shows_of_a_result_is_text_and_short(folder, hostile):
    report = convert(folder / "raw", folder / "out", folder / "tiny.toml", cluster=ClusterOptions(workers=0))
    shown = replace(report, dataset=hostile, problems=(hostile,) * 1000)._repr_html_()
    page = Page(shown.encode())
    assert len(shown) < 50_000 and not {name for name, _ in page.elements} & {"script", "img"}
    assert "2 in all" in page.text and "and 980 more" in page.text
    assert "sound" in Page(verify(folder / "out")._repr_html_().encode()).text


# -- planner samples ---------------------------------------------------------------------------------------------------


def places_of(picture: Image.Image, kind: str) -> np.ndarray:
    """Return row and column, as shares of the picture, of the pixels of a kind's colour."""
    colour = [int(COLOURS[kind][k : k + 2], 16) for k in (1, 3, 5)]
    found = np.argwhere((np.abs(np.asarray(picture).astype(int) - colour) < 8).all(axis=2))
    return found / picture.width


def test_what_is_ahead_on_the_left_is_drawn_above_on_the_left():
    marks = marks_of(sample())
    picture = draw_picture(marks, title="")
    car, ego, cone = (places_of(picture, kind).mean(axis=0) for kind in ("vehicle", "ego", "static"))
    np.testing.assert_allclose(ego, [0.7 - 1.4 / 50, 0.5], atol=0.02)  # the middle of the box is before the rear axle
    np.testing.assert_allclose(car, [0.7 - 10 / 50, 0.5 - 6 / 50], atol=0.02)
    np.testing.assert_allclose(cone, [0.7 - 5 / 50, 0.5 + 4 / 50], atol=0.02)
    assert counted(marks) == (
        "1 lanes (1 at red), 1 vehicle, 1 static object; the ego ends 5.0 m ahead and 0.0 m to the right"
    )


def test_the_drawing_of_the_page_has_the_same_places():
    drawn = Page(draw_svg(marks_of(sample()), label="x").encode())
    (path,) = [attributes["d"] for attributes in drawn.all("path") if attributes["class"] == "plan vehicle"]
    points = np.array([[float(number) for number in point.split()] for point in re.split("[MLZ]", path) if point])
    np.testing.assert_allclose(
        (points.max(axis=0) + points.min(axis=0)) / 2 / 520, [0.5 - 6 / 50, 0.7 - 10 / 50], atol=1e-3
    )


# -- a browser ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page_without_error_request_or_barrier(folder, tmp_path, scheme):
    playwright = pytest.importorskip("playwright.sync_api")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    chromium = shutil.which("chromium") or shutil.which("google-chrome") or pytest.skip("needs Chromium")
    write_preview(folder / "out", tmp_path / "page.html")
    said, asked = [], []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(color_scheme=scheme)
        tab.on("console", lambda message: said.append(message.text))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto((tmp_path / "page.html").as_uri())
        found = axe.Axe().run(tab).response
        browser.close()
    assert [url for url in asked if not url.startswith("data:")] == [(tmp_path / "page.html").as_uri()]
    assert said == []
    assert len(found["passes"]) > 20
    assert [(rule["id"], rule["nodes"][0]["html"]) for rule in found["violations"]] == []
