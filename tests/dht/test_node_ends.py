"""However the main process ends, nothing of its node is left within five seconds."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dht.processes import NodeProgram, is_alive, wait_until

LIMIT_S = 5.0


@pytest.fixture
def start(key_file: Path) -> Iterator[Callable[..., NodeProgram]]:
    programs: list[NodeProgram] = []

    def start_one(*options: str) -> NodeProgram:
        programs.append(NodeProgram.start(key_file, *options))
        return programs[-1]

    yield start_one
    for program in programs:
        program.end()


Start = Callable[..., NodeProgram]


def test_main_process_killed_in_the_middle_of_a_request_leaves_nothing(start: Start):
    program = start()
    program.tell("die")
    program.process.wait(LIMIT_S)
    wait_until(lambda: not program.left(), LIMIT_S)


@pytest.mark.sweep  # as above, between its requests
@pytest.mark.parametrize("p2pd_goes_first", [False, True])
def test_killed_main_process_leaves_nothing(start: Start, p2pd_goes_first: bool):
    program = start()
    program.process.kill()
    program.process.wait()
    if p2pd_goes_first:  # before the child has seen the end
        os.kill(program.p2pd, signal.SIGKILL)
    wait_until(lambda: not program.left(), LIMIT_S)


def test_nothing_is_left_in_shared_memory_though_all_processes_are_killed_at_once(start: Start):
    program = start()
    assert program.ask("ping")  # an answer comes through shared memory
    owners = program.process.pid, program.child
    os.killpg(program.process.pid, signal.SIGKILL)
    os.killpg(program.child, signal.SIGKILL)
    program.process.wait()
    wait_until(lambda: not any(map(is_alive, owners)), LIMIT_S)
    assert not [path for pid in owners for path in Path("/dev/shm").glob(f"torch_{pid}_*")]


@pytest.mark.swarm
def test_main_process_that_fails_ends_and_leaves_nothing(start: Start):
    program = start()
    program.tell("raise")
    assert program.process.wait(LIMIT_S) == 1
    wait_until(lambda: not program.left(), LIMIT_S)


# ---- the main process goes on --------------------------------------------------------------------
@pytest.fixture(scope="module")
def ignoring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProgram]:
    """One that no signal of a terminal ends; a test that hurts its node closes that."""
    program = NodeProgram.start(tmp_path_factory.mktemp("key") / "identity.key", "ignore")
    yield program
    program.end()


@pytest.fixture
def program(ignoring: NodeProgram) -> NodeProgram:
    if not is_alive(ignoring.child):
        ignoring.open()
    return ignoring


def test_ctrl_c_and_sigterm_leave_the_node_to_the_main_process(program: NodeProgram):
    for number in (signal.SIGINT, signal.SIGTERM):
        os.killpg(program.process.pid, number)
    os.kill(program.child, signal.SIGTERM)
    assert program.ask("ping")
    assert program.sockets
    assert is_alive(program.child)
    assert is_alive(program.p2pd)
    assert program.ask("close") == "closed"
    assert not is_alive(program.child)
    assert not is_alive(program.p2pd)
    assert not program.sockets


@pytest.mark.parametrize(("killed", "other"), [("p2pd", "child"), ("child", "p2pd")])
def test_node_and_p2pd_end_with_each_other(program: NodeProgram, killed: str, other: str):
    os.kill(getattr(program, killed), signal.SIGKILL)
    wait_until(lambda: not is_alive(getattr(program, other)), LIMIT_S)
    assert program.ask("close") == "closed"
    assert not program.sockets


@pytest.mark.swarm
def test_stopped_node_is_closed_all_the_same(program: NodeProgram):
    os.kill(program.child, signal.SIGSTOP)
    assert program.ask("close") == "closed"
    wait_until(lambda: not is_alive(program.child) and not is_alive(program.p2pd), LIMIT_S)
    assert not program.sockets
