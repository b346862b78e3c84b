"""Frames of video by exact index. Every frame bears its own index in its pixels, as blocks that survive lossy coding."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
import pytest

from pipeline.readers.video import probe_video, read_video_frames
from schemas.errors import Reason, SchemaError, SourceError
from schemas.source import Fault
from tests.conftest import shared_data

HEIGHT, WIDTH, BITS = 48, 128, 8


def stamped(index: int) -> np.ndarray:
    """Return a frame whose 8 vertical bars spell ``index`` in binary, on a moving ramp that keeps the coder busy."""
    ramp = (np.arange(WIDTH) * 2 + index * 5) % 40
    bars = np.repeat([(index >> bit) & 1 for bit in range(BITS)], WIDTH // BITS) * 160
    return np.repeat(np.tile((ramp + bars + 20).astype(np.uint8), (HEIGHT, 1))[..., None], 3, axis=2)


def read_stamp(frame: np.ndarray) -> int:
    bars = frame.astype(float).mean(axis=(0, 2)).reshape(BITS, -1).mean(axis=1)
    return sum((value > 120) << bit for bit, value in enumerate(bars))


def write_video(
    path: Path, num_frames: int, codec: str = "libx264", options: dict[str, str] | None = None, gop: int = 12
) -> Path:
    if codec not in av.codecs_available:
        pytest.skip(f"this build of FFmpeg lacks {codec}")
    faststart = {"movflags": "faststart"} if path.suffix == ".mp4" else {}
    with av.open(str(path), "w", options=faststart) as container:
        stream = container.add_stream(codec, rate=30)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.codec_context.gop_size = gop
        stream.codec_context.options = options or {}
        for index in range(num_frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(stamped(index), format="rgb24")))
        container.mux(stream.encode())
    return path


CODECS = [
    pytest.param(("libx264", {"preset": "ultrafast", "bf": "0"}, 1), id="h264-intra"),
    pytest.param(("libx264", {"preset": "ultrafast"}, 2), id="h264-gop2"),
    pytest.param(("libx264", {"preset": "medium", "bf": "3"}, 12), id="h264-b-frames"),
    pytest.param(
        ("libx264", {"preset": "medium", "bf": "3", "x264-params": "open-gop=1:b-pyramid=2"}, 10), id="h264-open-gop"
    ),
    pytest.param(("libx264", {"preset": "medium"}, 250), id="h264-one-gop"),
    pytest.param(("libx265", {"x265-params": "log-level=none:open-gop=1:bframes=4"}, 12), id="hevc-open-gop"),
    pytest.param(("libsvtav1", {"preset": "12", "svtav1-params": "pred-struct=2"}, 8), id="av1"),
    pytest.param(("mpeg4", {"bf": "2"}, 12), id="mpeg4-b-frames"),
    pytest.param(("libvpx-vp9", {"cpu-used": "8"}, 16), id="vp9"),
]


@pytest.fixture(scope="module", params=CODECS)
def video(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    codec, options, gop = request.param
    return write_video(tmp_path_factory.mktemp("video") / "clip.mp4", 50, codec, options, gop)


def stamps(path: Path, steps: Sequence[int]) -> list[int | Reason]:
    found = list(read_video_frames(path, np.array(steps, np.int64)))
    return [frame.reason if isinstance(frame, Fault) else read_stamp(frame) for frame in found]


@pytest.mark.parametrize(
    "steps", [range(50), range(0, 50, 7), [49], [0], [23, 23, 23, 24], range(11, 14), [5, 37, 37, 48], []], ids=str
)
def test_every_step_gets_its_own_frame_whatever_the_group_of_pictures(video, steps):
    assert stamps(video, steps) == list(steps)


def test_frames_equal_those_of_a_plain_decode_bit_for_bit(video):
    with av.open(str(video)) as container:
        plain = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    steps = np.array([0, 13, 26, 26, 49])
    for step, frame in zip(steps, read_video_frames(video, steps), strict=True):
        np.testing.assert_array_equal(frame, plain[step])


def test_steps_past_the_end_are_a_count_mismatch_and_earlier_ones_are_served(video):
    assert stamps(video, [48, 49, 50, 1000]) == [48, 49, Reason.COUNT_MISMATCH, Reason.COUNT_MISMATCH]


@pytest.mark.parametrize("share", [0.35, 0.6, 0.85, 0.99])
def test_a_truncated_video_never_gives_a_neighbouring_frame(video, tmp_path, share):
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(video.read_bytes()[: int(video.stat().st_size * share)])
    found = stamps(cut, range(50))
    assert all(frame in (step, Reason.TRUNCATED) for step, frame in enumerate(found))
    assert found[-1] == Reason.TRUNCATED
    assert stamps(cut, [40, 45, 49])[-1] == Reason.TRUNCATED


@pytest.mark.parametrize("seed", range(4))
def test_damaged_bytes_never_give_the_frame_of_another_step(video, tmp_path, seed):
    """A coder has no checksum, so damage may go unseen and spoil a frame; but no step may get what belongs to another."""
    data = bytearray(video.read_bytes())
    rng = np.random.default_rng(seed)
    start = data.index(b"mdat") + 4
    at = int(rng.integers(start, len(data) - 40))
    data[at : at + 40] = rng.integers(0, 256, 40, dtype=np.uint8).tobytes()
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(data)
    steps = np.arange(50)
    sound = list(read_video_frames(video, steps))
    for step, found in zip(steps, read_video_frames(broken, steps), strict=True):
        if isinstance(found, Fault):
            assert found.reason in (Reason.DECODE, Reason.TRUNCATED)
        else:
            assert not any(np.array_equal(found, other) for index, other in enumerate(sound) if index != step)


def test_a_video_without_timestamps_is_counted_from_its_beginning(tmp_path):
    path = write_video(tmp_path / "raw.h264", 30, "libx264", {"preset": "ultrafast", "bf": "0"}, 10)
    assert stamps(path, [0, 7, 7, 29]) == [0, 7, 7, 29]
    assert stamps(path, [12]) == [12]


def test_a_video_in_avi_keeps_its_indices(tmp_path):
    path = write_video(tmp_path / "clip.avi", 30, "mpeg4", {}, 10)
    assert stamps(path, [0, 11, 29]) == [0, 11, 29]


def test_a_video_in_matroska_keeps_its_indices_with_b_frames(tmp_path):
    path = write_video(tmp_path / "clip.mkv", 40, "libx264", {"bf": "3"}, 10)
    assert stamps(path, [0, 11, 25, 39]) == [0, 11, 25, 39]


def test_a_missing_file_is_a_fault_for_every_step(tmp_path):
    found = list(read_video_frames(tmp_path / "none.mp4", np.array([3, 4])))
    assert [(fault.reason, fault.start, fault.stop) for fault in found] == [
        (Reason.MISSING_FILE, 3, 4),
        (Reason.MISSING_FILE, 4, 5),
    ]
    assert str(tmp_path) not in found[0].message + found[0].path


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", Reason.TRUNCATED),
        (b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom\0\0\x10\0mdat" + bytes(100), Reason.TRUNCATED),
        (b"<html>404 not found</html>", Reason.DECODE),
        (bytes(5000), Reason.DECODE),
    ],
    ids=["empty", "without its index", "a web page", "zeros"],
)
def test_what_is_no_video_is_a_fault_with_a_reason(tmp_path, data, reason):
    path = tmp_path / "bad.mp4"
    path.write_bytes(data)
    assert stamps(path, [0, 1]) == [reason, reason]
    with pytest.raises(SourceError) as refused:
        probe_video(path)
    assert refused.value.reason == reason


def test_a_sound_file_without_pictures_is_unsupported(tmp_path):
    path = tmp_path / "sound.wav"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
    assert stamps(path, [0]) == [Reason.UNSUPPORTED]


def test_a_replaced_file_is_read_again(tmp_path):
    path = write_video(tmp_path / "clip.mp4", 20)
    assert stamps(path, [19]) == [19]
    shutil.copy(write_video(tmp_path / "short.mp4", 10), path)
    assert stamps(path, [9, 19]) == [9, Reason.COUNT_MISMATCH]


def test_unsorted_steps_are_refused(tmp_path):
    with pytest.raises(SchemaError, match="sorted"):
        next(read_video_frames(tmp_path / "any.mp4", np.array([2, 1])))


def test_a_probe_reads_size_rate_and_length_from_the_header(video):
    info = probe_video(video)
    assert (info.num_frames, info.height_px, info.width_px, info.rate_hz) == (50, HEIGHT, WIDTH, 30.0)


@pytest.mark.parametrize(
    "parts",
    [
        ("lerobot_v2.1", "starvla_sim_pick_place", "videos", "chunk-000", "video.ego_view", "episode_000001.mp4"),
        ("lerobot_v1", "aloha_sim_insertion_human", "videos", "observation.images.top_episode_000000.mp4"),
    ],
    ids=["av1", "h264"],
)
def test_real_recordings_equal_a_plain_decode(parts):
    path = shared_data(*parts)
    steps = [0, 1, 57, 58, 58, 131, 200]
    with av.open(str(path)) as container:
        plain = {}
        for index, frame in enumerate(container.decode(video=0)):
            if index in steps:
                plain[index] = frame.to_ndarray(format="rgb24")
            if index > steps[-1]:
                break
    for step, frame in zip(steps, read_video_frames(path, np.array(steps)), strict=True):
        np.testing.assert_array_equal(frame, plain[step])
    np.testing.assert_array_equal(next(read_video_frames(path, np.array([131]))), plain[131])


def test_real_frames_show_what_upstream_stored_for_them():
    """The stored tensors come from another encoding of the episode, so they are near and not equal: each must be nearest to its own
    frame or a direct neighbour (the arm hardly moves at the end), and within 1 of 255 in the mean."""
    folder = shared_data("lerobot_frames", "pusht")
    video = shared_data("lerobot_v1", "pusht", "videos", "observation.image_episode_000000.mp4")
    frames = np.stack(list(read_video_frames(video, np.arange(161)))).astype(np.float64)
    for step in (0, 1, 80, 81, 159, 160):
        data = (folder / f"frame_{step}.safetensors").read_bytes()
        stored = safetensor(data, "observation.image").transpose(1, 2, 0) * 255.0
        distance = np.abs(frames - stored).mean(axis=(1, 2, 3))
        assert distance[step] < 1.0
        assert abs(int(distance.argmin()) - step) <= 1


def safetensor(data: bytes, name: str) -> np.ndarray:
    import json

    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])[name]
    start, stop = (8 + length + offset for offset in entry["data_offsets"])
    return np.frombuffer(data[start:stop], np.float32).reshape(entry["shape"])
