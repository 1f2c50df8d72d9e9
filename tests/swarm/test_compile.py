"""A volunteer's peer compiles its layers, and trains with one that does not."""

from __future__ import annotations

import pytest

from tests.swarm.conftest import StartSwarm
from tests.swarm.small_run import fixed_steps

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

FIRST_STEP_LIMIT_S = 240.0
END_LIMIT_S = 60.0


def test_a_peer_with_compiled_layers_counts_beside_one_without_and_needs_a_compiler(
    start_swarm: StartSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = start_swarm(rounds=fixed_steps(40))
    monkeypatch.setenv("CXX", str(swarm.folder / "no-compiler"))
    without = swarm.add_peer("--compile")
    without.expected = False
    swarm.wait(lambda: without.child.returncode is not None, FIRST_STEP_LIMIT_S, "it has ended")
    last = without.log_text().splitlines()[-1]
    assert "install a C++ compiler" in last and "without --compile" in last

    monkeypatch.delenv("CXX")
    compiled, plain = swarm.add_peer("--compile"), swarm.add_peer()
    line = swarm.wait_for_counted(compiled, after_round=-1, limit_s=FIRST_STEP_LIMIT_S)
    swarm.wait_for_counted(plain, after_round=line["round"], limit_s=END_LIMIT_S)
    assert any((swarm.folder / "cache").rglob("*.so"))
    swarm.assert_equal_chains()
