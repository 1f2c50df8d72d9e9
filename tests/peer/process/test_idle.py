"""Whether other programs use a machine: what is read of it, and when a peer rests and goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from dilocox.dht.invite import Invite
from dilocox.peer.options import PeerOptions
from dilocox.peer.process.idle import LOOK_S, WATCHING, WINDOW_S, IdleWatch, Machine, nvidia_use
from dilocox.peer.process.resting import Allowance
from dilocox.peer.state_folder import StateFolder
from tests.peer.fabricated import INVITE

ME = 100
CORES = 4
HZ = 100  # ticks of a core a second


class FakeMachine:
    """A /proc and a /sys in a folder, in which time passes as the test says."""

    def __init__(self, root: Path):
        self.root = root
        self._supplies = root / "sys" / "class" / "power_supply"
        self.busy = self.total = 0
        self.ticks: dict[int, int] = {}
        self.gpu: Mapping[tuple[str, int], float] = {}
        self.start(1, 0, "init")
        self.start(ME, 1, "python\0-m\0dilocox\0peer\0dilocox:0@x")
        self.start(101, ME, "(evil) name\0")
        self.start(102, 101, "p2pd\0")
        self.start(200, 1, "/usr/bin/game\0")
        self.machine = Machine(root, me=ME, gpu=lambda: self.gpu)
        self.run(0)

    def start(self, pid: int, parent: int, command: str) -> None:
        folder = self.root / "proc" / str(pid)
        folder.mkdir(parents=True)
        (folder / "cmdline").write_bytes(command.encode())
        self.ticks[pid] = 0
        self._tell(pid, parent)
        self.parents = getattr(self, "parents", {}) | {pid: parent}

    def _tell(self, pid: int, parent: int) -> None:
        rest = f"S {parent} 0 0 0 0 0 0 0 0 0 {self.ticks[pid]} 0 0 0 20 0 1 0 5 0"
        (self.root / "proc" / str(pid) / "stat").write_text(f"{pid} (a ) (b) {rest}\n")

    def run(self, seconds: float, **cores: float) -> None:
        """Let processes (p200=1.5) take so many cores for a while."""
        for name, count in cores.items():
            pid = int(name[1:])
            taken = round(count * seconds * HZ)
            self.ticks[pid] += taken
            self.busy += taken
            self._tell(pid, self.parents[pid])
        self.total += round(seconds * HZ * CORES)
        idle = self.total - self.busy
        line = f"cpu  {self.busy} 0 0 {idle} 0 0 0 0 999 0\ncpu0 1 2 3\n"
        (self.root / "proc" / "stat").write_text(line)

    def supply(self, name: str, **files: str) -> None:
        folder = self._supplies / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(f"{text}\n")


@pytest.fixture
def fake(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


class Watched:
    """A watch on a fake machine and a clock that goes with it."""

    def __init__(self, fake: FakeMachine, *, working: bool, share: float = 0.25):
        self.fake, self.now = fake, 0.0
        self.watch = IdleWatch(fake.machine, share=share, working=working, clock=lambda: self.now)
        self.watch.look()

    def run(self, seconds: float, **cores: float) -> str:
        """Let that long pass; why the peer rests then."""
        for _ in range(round(seconds / LOOK_S)):
            self.fake.run(LOOK_S, **cores)
            self.now += LOOK_S
            self.watch.look()
        return self.watch.rest.words if self.watch.rest else ""


# ---- what is read ----------------------------------------------------------------------------
def test_a_peers_own_processes_and_those_of_other_peers_do_not_count(fake: FakeMachine) -> None:
    fake.start(300, 1, "/home/ada/.venv/bin/dilocox\0peer\0dilocox:0@x")
    fake.start(301, 300, "p2pd\0")
    fake.machine.use()
    fake.run(10, p101=1, p102=0.5, p300=0.5, p301=0.5, p200=1, p1=0.5)
    total, others, gpu = fake.machine.use() or (0, 0, 0)
    assert (total, others, gpu) == (10 * HZ * CORES, 1.5 * 10 * HZ, 0.0)


def test_of_the_gpus_that_counts_of_which_others_take_most(fake: FakeMachine) -> None:
    fake.gpu = {("0", 101): 0.9, ("0", 200): 0.1, ("1", 200): 0.3, ("1", 1): 0.2, ("1", 999): 1.0}
    assert (fake.machine.use() or (0, 0, 0))[2] == 0.5  # 999 is of another container


def test_what_nvidia_smi_tells_is_read_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_use() == {}
    told = """
# gpu         pid  type    sm    mem    enc    dec    jpg    ofa    command
# Idx           #   C/G     %      %      %      %      %      %    name
    0      12345     C     97     31      -      -      -      -    python
    0        200     G      -      -      -      -      -      -    Xorg
    1        201   C+G      4      1      -      -      -      -    game
    2          -     -      -      -      -      -      -      -    -
"""
    program = tmp_path / "nvidia-smi"
    program.write_bytes(f"#!/bin/sh\necho '{told}'\n".encode() + b"printf '\\377'\n")  # cut names
    program.chmod(0o755)
    assert nvidia_use() == {("0", 12345): 0.97, ("1", 201): 0.04}
    program.write_text("#!/bin/sh\necho 'no devices were found' >&2\nexit 6\n")
    assert nvidia_use() == {} and capfd.readouterr().err == ""


def test_a_system_that_tells_nothing_keeps_no_peer_from_work(tmp_path: Path) -> None:
    machine = Machine(tmp_path, me=ME, gpu=dict)
    assert machine.use() is None and not machine.on_battery
    watch = IdleWatch(machine, share=0.25, working=False)
    watch.look()
    assert watch.rest is None


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ({}, False),
        ({"BAT0": "Battery Discharging"}, True),
        ({"BAT0": "Battery Charging", "AC": "Mains 1"}, False),
        ({"BAT0": "Battery Discharging", "AC": "Mains 0"}, True),
        ({"BAT0": "Battery Discharging", "usb": "USB 1"}, False),
        ({"BAT0": "Battery Full"}, False),
        ({"ups": "UPS Discharging"}, True),
        ({"mouse": "Battery Discharging Device"}, False),
    ],
)
def test_a_machine_on_its_battery(
    supplies: dict[str, str], expected: bool, fake: FakeMachine
) -> None:
    for name, told in supplies.items():
        kind, state, *scope = told.split()
        name_of_state = "online" if state.isdecimal() else "status"
        fake.supply(
            name, type=kind, **{name_of_state: state}, scope=scope[0] if scope else "System"
        )
    assert fake.machine.on_battery == expected


# ---- when it rests ---------------------------------------------------------------------------
def test_it_rests_after_a_minute_of_others_and_does_not_flap(fake: FakeMachine) -> None:
    here = Watched(fake, working=True)
    assert here.run(30, p200=4) == ""  # not by a moment
    assert here.run(60, p101=4) == ""  # its own work is none of others
    assert here.run(60, p200=0.9) == ""
    why = here.run(60, p200=1.6)
    assert why == "other programs use 25% of the processor"  # when it was more than the share
    assert here.run(120, p200=0.8) == why  # half is wanted
    assert here.run(30, p200=0.4) == why
    assert here.run(60, p200=0.2) == ""


def test_a_peer_that_starts_waits_for_a_quiet_minute(fake: FakeMachine) -> None:
    here = Watched(fake, working=False)
    assert here.run(WINDOW_S - LOOK_S) == WATCHING.words
    assert here.run(LOOK_S) == ""
    busy = Watched(fake, working=False)
    assert busy.run(WINDOW_S, p200=0.8) == "other programs use 20% of the processor"


def test_a_gpu_that_others_use_is_not_idle(fake: FakeMachine) -> None:
    fake.gpu = {("0", 200): 0.6, ("0", 101): 0.4}
    here = Watched(fake, working=True)
    assert here.run(WINDOW_S) == "other programs use 60% of the GPU"
    fake.gpu = {("0", 101): 1.0}
    assert here.run(WINDOW_S) == ""


def test_on_battery_it_rests_at_once_and_goes_on_with_the_plug(fake: FakeMachine) -> None:
    here = Watched(fake, working=True)
    here.run(WINDOW_S)
    fake.supply("BAT0", type="Battery", status="Discharging")
    assert here.run(LOOK_S) == "this machine runs on its battery"
    assert here.watch.rest is not None and here.watch.rest.reason == "battery"
    fake.supply("AC", type="Mains", online="1")
    assert here.run(LOOK_S) == ""


def test_only_with_the_option_a_peer_rests_for_others(fake: FakeMachine, tmp_path: Path) -> None:
    fake.supply("BAT0", type="Battery", status="Discharging")

    def reason(*, idle_only: bool, working: bool = True, looks: bool = True) -> str:
        options = PeerOptions(invite=Invite.parse(INVITE), state=tmp_path, idle_only=idle_only)
        allowance = Allowance(options, working=working, machine=fake.machine)
        if looks:
            allowance.look()
        rest = allowance.rest()
        return rest.reason if rest else ""

    assert reason(idle_only=False) == "" and reason(idle_only=True) == "battery"
    assert reason(idle_only=True, looks=False) == ""
    assert reason(idle_only=True, looks=False, working=False) == "busy"  # its quiet minute first
    StateFolder(tmp_path).pause(True)
    assert reason(idle_only=True) == "paused"
