"""The newest anchors of a live swarm answer, and later those of newer rounds, without a pause."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.request import Request, urlopen

import pytest

from dilocox.peer.memory_and_disk import proportional_bytes
from dilocox.peer.os_process import start_command
from tests.swarm.conftest import StartSwarm
from tests.swarm.processes import family
from tests.swarm.small_run import fixed_steps

ROUNDS_LIMIT_S = 120.0
SERVED_LIMIT_S = 90.0
LEAVE_LIMIT_S = 20.0


@pytest.mark.swarm
@pytest.mark.timeout(360)
def test_newer_rounds_answer_as_they_come(start_swarm: StartSwarm) -> None:
    swarm = start_swarm(rounds=fixed_steps(60), stages=2)
    for stage in range(2):
        swarm.add_peer(stage=stage)
    swarm.wait_for_rounds(2, ROUNDS_LIMIT_S)
    log = swarm.folder / "serve.log"
    words = ["serve", swarm.invite, "--port", "0", "--refresh-minutes", "0", "--dtype", "bf16"]
    child = start_command(words, log, env=swarm.environment("serve"))

    def address() -> str:
        child.check()
        found = re.search(r"chat page (http://127.0.0.1:\d+)/ and", log.read_text())
        return found[1] if found else ""

    try:
        base = swarm.wait(address, SERVED_LIMIT_S, "it answers")

        def ask(path: str, body: dict[str, Any] | None = None) -> Any:
            data = None if body is None else json.dumps(body).encode()
            request = Request(f"{base}{path}", data, {"Content-Type": "application/json"})
            with urlopen(request, timeout=30) as answer:
                return json.loads(answer.read())

        def text() -> tuple[str, int]:
            asks = {"prompt": "def ", "max_tokens": 30, "temperature": 0}
            answer = ask("/v1/completions", asks)
            assert answer["usage"]["completion_tokens"] == 30
            return answer["choices"][0]["text"], int(answer["system_fingerprint"].split("-")[-1])

        first, began = text()
        assert first

        def newer() -> bool:
            child.check()
            return text()[1] >= began + 2

        swarm.wait(newer, ROUNDS_LIMIT_S, "newer weights answer")
        (model,) = ask("/v1/models")["data"]
        assert model["id"] == "swarm-test" and model["round"] <= max(swarm.chain())
        taken = sum(proportional_bytes(each.pid) for each in family(f"{swarm.tag}.serve"))
        said = log.read_text()
        print(f"{said}takes {taken / 1e9:.2f} GB")
        planned = re.search(r"about ([0-9.]+) GB", said)
        assert planned is not None and taken < 1e9 * float(planned[1])
    finally:
        child.terminate()
        child.wait(LEAVE_LIMIT_S)
    assert child.returncode == 0
