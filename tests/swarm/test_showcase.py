"""`make showcase` in its quick form: it keeps its promises and leaves what it says."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.dht.processes import wait_until
from tests.swarm import namespaces
from tests.swarm.browser import chromium
from tests.swarm.links import available

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("needs_links")]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 540.0
START_LIMIT_S, LEAVE_LIMIT_S = 180.0, 90.0
PLOTS = ("loss", "throughput", "peers")


@pytest.fixture
def needs_links() -> None:
    """Skip where there can be none."""
    if reason := available():
        pytest.skip(reason)


@pytest.mark.timeout(LIMIT_S + 60)
def test_a_quick_showcase_keeps_its_promises_and_leaves_what_it_says(tmp_path: Path) -> None:
    out = tmp_path / "run"
    ran = subprocess.run(
        [sys.executable, "benchmarks/showcase.py", "--quick", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-3000:]

    with (out / "history.csv").open() as file:
        losses = [float(row["validation"]) for row in csv.DictReader(file) if row["validation"]]
    assert losses[-1] < losses[0] - 1.0
    with (out / "showcase-promises.csv").open() as file:
        assert {row["holds"] for row in csv.DictReader(file)} <= {"yes", ""}
    for part in PLOTS:
        assert (out / f"showcase-{part}.svg").read_text().count("<path") > 10
    assert (out / "samples.txt").read_text().count("def ") >= 2
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert model.config.num_hidden_layers == 4
    assert (out / "logs" / "peer-4-events.jsonl").stat().st_size > 0
    if chromium() is not None:
        assert (out / "page.png").stat().st_size > 20_000


@pytest.mark.timeout(START_LIMIT_S + LEAVE_LIMIT_S + 60)
def test_nothing_of_a_showcase_outlives_it(tmp_path: Path) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, "-u", "benchmarks/showcase.py", "--quick", "--out", str(out)]
    with log.open("wb") as output:
        script = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    try:
        wait_until(lambda: "stages train" in log.read_text(), START_LIMIT_S)
        hosts = [name for name in namespaces.existing() if f"-{script.pid}-" in name]
        busy = [name for name in hosts if namespaces.processes(name)]
        assert len(busy) == 6, "the bootstrap's, the monitor's, and those of four peers"
        script.terminate()
        assert script.wait(LEAVE_LIMIT_S) == 1, "it did not come to its promises"
    finally:
        script.kill()
        script.wait(10)
    assert not set(hosts) & set(namespaces.existing())
    assert (out / "logs" / "run.yaml").exists()
