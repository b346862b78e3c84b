"""What a run tells others: the metrics of a text file and of a scrape, the queries of the examples, JSON lines, memory."""

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request

import pytest

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.monitor import MonitorOptions, monitored
from pipeline.verification import VerifyReport, verify
from pipeline.watch import Watch
from schemas.errors import HeadraceError, MissingExtraError, SourceError
from tests.conftest import REPOSITORY
from tests.pipeline.recordings import truncate, write_recipe, write_route

EXAMPLES = REPOSITORY / "examples" / "monitoring"


def run(folder, watch_too=None, **monitor):
    options = MonitorOptions(**monitor)
    with monitored(options, watch_too or Watch(), folder / "out", "run1") as watch:
        return convert(
            folder / "raw",
            folder / "out",
            folder / "tiny.toml",
            watch=watch,
            shard_steps=4,
            cluster=ClusterOptions(workers=0),
        )


@pytest.fixture
def raw(tmp_path):
    """Two routes of 8 and 6 steps, one frame of which is cut short."""
    write_route(tmp_path / "raw", 1, 8)
    write_route(tmp_path / "raw", 2, 6)
    truncate(tmp_path / "raw" / "route_02" / "rgb" / "0003.png")
    write_recipe(tmp_path)
    return tmp_path


def samples(text: str) -> dict[str, float]:
    """Return ``name{labels but dataset} -> value`` of a text file of Prometheus."""
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {re.sub(r'dataset="[^"]*",?', "", name).replace("{}", ""): float(value) for name, _, value in lines}


def test_the_text_file_counts_what_was_converted_and_stays_true_when_nothing_is_new(raw):
    pytest.importorskip("prometheus_client", reason="needs the extra metrics")
    file = raw / "headrace.prom"
    before_s = time.time()
    report = run(raw, metrics_file=str(file))
    found = samples(file.read_text())
    on_disk = sum(path.stat().st_size for path in (raw / "raw").rglob("*") if path.is_file())
    used = on_disk - sum(path.stat().st_size for path in (raw / "raw").rglob("rgb_right/*"))
    assert report.exit_code == 3
    assert (found["headrace_steps_converted_total"], found["headrace_frames_converted_total"]) == (14, 2 * 14 - 1)
    assert used <= found["headrace_source_read_bytes_total"] <= on_disk
    assert found["headrace_dataset_written_bytes_total"] > report.nbytes
    refused = {key: value for key, value in found.items() if key.startswith("headrace_quarantined_total")}
    assert refused == {
        f'headrace_quarantined_total{{reason="{reason}"}}': n for reason, n in report.quarantined.items()
    }
    for stage in ("rows", "read", "decode", "resize", "write"):
        assert found[f'headrace_stage_seconds_count{{stage="{stage}"}}'] == 4  # shards
        assert found[f'headrace_stage_seconds_sum{{stage="{stage}"}}'] > 0
    assert found["headrace_generation"] == 1 and found["headrace_exit_code"] == 3
    assert found["headrace_queue_tasks"] == found["headrace_eta_seconds"] == 0
    committed = found["headrace_last_commit_timestamp_seconds"]
    assert before_s - 2 < committed < time.time() + 2
    assert run(raw, metrics_file=str(file)).num_episodes == 0
    again = samples(file.read_text())
    assert again["headrace_last_commit_timestamp_seconds"] == committed
    assert again["headrace_last_success_timestamp_seconds"] > found["headrace_last_success_timestamp_seconds"]
    assert again["headrace_steps_converted_total"] == 0
    assert [path.name for path in raw.glob("headrace.prom*")] == ["headrace.prom"]


def test_a_run_that_fails_says_so_and_a_place_that_cannot_be_written_stops_it_first(raw):
    pytest.importorskip("prometheus_client", reason="needs the extra metrics")
    (raw / "tiny.toml").write_text(
        (raw / "tiny.toml").read_text().replace("[views.main]", 'on_bad_frame = "stop"\n[views.main]', 1)
    )
    with pytest.raises(SourceError):
        run(raw, metrics_file=str(raw / "headrace.prom"))
    assert samples((raw / "headrace.prom").read_text())["headrace_exit_code"] == 1
    with pytest.raises(
        HeadraceError, match="expected to write metrics to .*, found: No such file or directory; choose"
    ):
        run(raw, metrics_file=str(raw / "nowhere" / "headrace.prom"))


def test_a_finished_file_that_is_not_what_was_written_counts_as_a_checksum_failure(raw):
    pytest.importorskip("prometheus_client", reason="needs the extra metrics")

    class Stop(Watch):
        def said(self, text):
            if text == "writing tables, committing":
                raise HeadraceError("expected nothing, found a test; go on")

    with pytest.raises(HeadraceError, match="found a test"):
        run(raw, Stop())
    part = sorted((raw / "out.work" / "parts").glob("part-*"))[1]
    part.write_bytes(bytes([part.read_bytes()[0] ^ 1]) + part.read_bytes()[1:])
    run(raw, metrics_file=str(raw / "headrace.prom"))
    found = samples((raw / "headrace.prom").read_text())
    assert (found["headrace_checksum_failures_total"], found["headrace_steps_converted_total"]) == (1, 4)


def test_a_verification_counts_its_problems_for_an_alert(raw):
    metrics = pytest.importorskip("pipeline.metrics")
    pytest.importorskip("prometheus_client", reason="needs the extra metrics")
    run(raw)
    file, counts = raw / "verify.prom", []
    for _ in range(2):
        report = verify(raw / "out")
        metrics.write_verify_metrics(str(file), report, raw / "out")
        found = samples(file.read_text())
        counts.append(found["headrace_verify_problems"])
        assert found["headrace_verified_bytes"] == report.nbytes
        truncate(raw / "out" / "rgb_main" / "c.0.0.0.0")
    assert counts[0] == 0 and counts[1] > 0
    assert abs(found["headrace_last_verify_timestamp_seconds"] - time.time()) < 60


def test_metrics_without_their_package_name_the_extra(raw, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'headrace\[metrics\]'"):
        run(raw, metrics_file="x.prom")


def test_the_log_is_json_lines_of_one_run(raw, capsys):
    run(raw, log_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert {line["run_id"] for line in lines} == {"run1"} and {line["dataset"] for line in lines} == {f"{raw}/out"}
    events = [line["event"] for line in lines]
    assert events[0] == "planned" and events[-2:] == ["committed", "ended"] and "refused" in events
    assert lines[0]["steps"] == 14 and lines[-1]["exit_code"] == 3


def test_the_memory_page_shows_the_program_and_its_worker_over_time(raw):
    run(raw, memory_profile=str(raw / "memory.html"))
    page = (raw / "memory.html").read_text()
    assert page.count("<polyline") >= 2 and "headrace, traced" in page and "memory over time" in page


# -- the files that users take -----------------------------------------------------------------------------------------


def metric_names() -> set[str]:
    """Return the name of every series that a run may write."""
    metrics = pytest.importorskip("pipeline.metrics")
    pytest.importorskip("prometheus_client", reason="needs the extra metrics")
    made = metrics.Metrics(REPOSITORY / "no-dataset", "run1")
    report = VerifyReport(ok=True, num_files=0, nbytes=0, problems=())
    registries = (made.registry, metrics.verify_registry(report, REPOSITORY / "no-dataset"))
    families = {family.name: family.type for registry in registries for family in registry.collect()}
    endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}
    return {name + ending for name, kind in families.items() for ending in endings.get(kind, ("",))}


def queries() -> dict[str, str]:
    """Return every query of the dashboard and the rules, by where it stands."""
    board = json.loads((EXAMPLES / "grafana.json").read_text("utf-8"))
    found = {f"panel {p['title']}: {t['refId']}": t["expr"] for p in board["panels"] for t in p["targets"]}
    found["variable"] = board["templating"]["list"][1]["query"]["query"]
    rules = re.findall(
        r"alert: (\w+)\n\s+expr: (?:>\n)?(.*?)\n\s+(?:for|labels):",
        (EXAMPLES / "alerts.yml").read_text("utf-8"),
        re.DOTALL,
    )
    return found | dict(rules)


def test_every_query_names_metrics_that_exist():
    names, asked = metric_names(), queries()
    assert len(asked) >= 20 and "HeadraceNoCommit" in asked and "HeadraceThroughputDrop" in asked
    for where, query in asked.items():
        found = set(re.findall(r"headrace_\w+", query))
        assert found and found <= names, where
    shown = set(re.findall(r"headrace_\w+", " ".join(asked.values())))
    assert {name.removesuffix("_total") for name in shown} > {
        "headrace_steps_converted",
        "headrace_retries",
        "headrace_quarantined",
    }
    page = (REPOSITORY / "docs" / "monitoring.md").read_text("utf-8")
    documented = set(re.findall(r"^\| `(headrace_\w+)", page, re.MULTILINE))
    assert documented == {re.sub("_(bucket|sum|count)$", "", name) for name in names}


def need(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"needs {program}, of Debian's package prometheus")
    return found


def test_prometheus_accepts_the_rules_the_configuration_and_every_query(tmp_path):
    promtool = need("promtool")
    for kind, file in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        done = subprocess.run([promtool, "check", kind, str(EXAMPLES / file)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    board = {where: query for where, query in queries().items() if where.startswith("panel")}
    rules = [
        f"  - record: a{k}\n    expr: {json.dumps(q.replace('$dataset', '.*'))}" for k, q in enumerate(board.values())
    ]
    (tmp_path / "board.yml").write_text("groups:\n- name: board\n  rules:\n" + "\n".join(rules) + "\n")
    done = subprocess.run([promtool, "check", "rules", str(tmp_path / "board.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Gate(Watch):
    """Holds a run after its second shard, and after its third, until somebody has looked."""

    def __init__(self):
        self.shards, self.seen, self.moved = 0, threading.Event(), threading.Event()

    def wrote(self, result):
        self.shards += 1
        if self.shards in (2, 3):
            (self.seen if self.shards == 2 else self.moved).wait(60)


def test_a_real_prometheus_scrapes_a_running_conversion(raw):
    pytest.importorskip("prometheus_client", reason="needs the extra metrics")
    program, port, web, gate = need("prometheus"), free_port(), free_port(), Gate()
    text = (EXAMPLES / "prometheus.yml").read_text("utf-8")
    text = text.replace("localhost:9400", f"127.0.0.1:{port}").replace("15s", "200ms").replace("- alerts.yml", "[]")
    (raw / "prometheus.yml").write_text(text.replace("rule_files:\n  []", "rule_files: []"))
    files = [f"--config.file={raw}/prometheus.yml", f"--storage.tsdb.path={raw}/tsdb"]
    server = subprocess.Popen([program, *files, f"--web.listen-address=127.0.0.1:{web}"], stderr=subprocess.DEVNULL)

    def ask(query: str) -> float:
        url = f"http://127.0.0.1:{web}/api/v1/query?query={urllib.parse.quote(query)}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                found = json.load(answer)["data"]["result"]
        except OSError:
            return -1.0
        return float(found[0]["value"][1]) if found else -1.0

    def wait_for(query: str, wanted) -> float:
        until = time.monotonic() + 30
        while not wanted(value := ask(query)) and time.monotonic() < until:
            time.sleep(0.1)
        return value

    work = threading.Thread(target=run, args=(raw, gate), kwargs={"metrics_port": port})
    try:
        work.start()
        assert (
            wait_for("headrace_steps_converted_total", lambda value: value > 0) == 4
        )  # the gate comes before the metrics
        assert ask("headrace_exit_code") == -1 and ask("headrace_planned_steps") == 14
        assert ask('headrace_stage_seconds_count{stage="decode"}') == 1
        assert wait_for("headrace_queue_tasks", lambda value: value >= 0) >= 1
        gate.seen.set()
        assert wait_for("headrace_steps_converted_total", lambda value: value > 4) > 4
    finally:
        gate.seen.set()
        gate.moved.set()
        work.join()
        server.terminate()
        server.wait(timeout=30)
