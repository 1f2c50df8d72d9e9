"""What the doctor says of a machine, the network and a run: each line where all is well, and where
it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dilocox.dht.addresses import Reachability
from dilocox.dht.errors import DilocoxError, EnvironmentFault, InvalidInput, NotAdmitted
from dilocox.dht.identity import Identity
from dilocox.dht.manifest import Manifest
from dilocox.dht.manifest_revisions import in_state
from dilocox.dht.records import ClaimRecord, stage_key
from dilocox.peer.commands.doctor_checks import (
    BandwidthFacts,
    DeviceFacts,
    Library,
    SpeedFacts,
    admission_check,
    bandwidth_check,
    bootstrap_checks,
    clock_check,
    device_check,
    fault,
    folder_check,
    key_check,
    libraries,
    libraries_check,
    memory_check,
    port_check,
    python_check,
    reach_check,
    run_check,
    speed_check,
    stage_check,
    version_check,
)
from dilocox.peer.commands.doctor_swarm import SwarmFacts
from dilocox.peer.memory_and_disk import Check, DiskNeeds, disk_check, size
from dilocox.peer.state_folder import StateFolder
from tests.peer import fabricated
from tests.peer.fabricated import claim_record, stage_record
from tests.peer.memory_swarm import MemorySwarm

GB, MB = 10**9, 2**20
PEER = "12D3KooWEXWcUQWJ6amCxHKtPFrcNxgepcmy7YXo7tirWjgiJ9Fr"
FIRST = f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}"
SECOND = f"/dns4/run.example/tcp/443/p2p/{PEER}"
RUN = Manifest.from_dict({"name": "words", "model": "tiny", "stages": 3, "end_tokens": 1000})
TAKEN = EnvironmentFault("port 7 of 0.0.0.0 is in use by another program: choose another one")
LINK = BandwidthFacts(
    stage=1, payload_bytes=60_000_000, down=8e6, link_up=2e6, up=2e6, limit_s=60.0
)
NEEDS = DiskNeeds(more_bytes=3 * GB, snapshot_bytes=GB)


def library(version: str, needed: str = "", fault: str = "") -> Check:
    found = Library(name="thing", version=version, needed=needed, fault=fault)
    return libraries_check([Library(name="torch", version="2.7"), found])


def unreached(*announce: str, port: int = 31338) -> Check:
    return reach_check(Reachability(kind="dial_out", seen=("198.51.100.5",)), announce, port)


def memory(free: int, limit: float | None, plans: list[int] | None, stage: int | None = 0) -> Check:
    return memory_check("memory", free, 8 * GB, limit, plans, stage)


OK = [
    (python_check((3, 10, 0), "Linux", "x86_64"), "3.10.0, Linux on x86_64"),
    (python_check((3, 13, 9), "Linux", "x86_64"), "3.13.9"),
    (library("2.13.0+cpu", ">=2.6"), "torch 2.7, thing 2.13.0+cpu"),
    (disk_check("here", 0, None), "0 bytes free for here"),
    (disk_check("here", 3 * GB, NEEDS), "3.0 GB needed"),
    (memory(8 * GB, None, [GB, 2 * GB, 9 * GB], 1), "2.0 GB needed for stage 1"),
    (memory(8 * GB, None, [GB, 2 * GB, 9 * GB], 1), "of 3 stages 0, 1 fit"),
    (memory(8 * GB, 2.5e9, [2 * GB]), "2.5 GB allowed by --memory-limit"),
    (memory(GB, None, [9 * GB // 10]), "1.0 GB free"),
    (memory(GB, 9e9, [GB // 2]), "1.0 GB free"),
    (memory(GB, None, None, None), "1.0 GB free"),  # without the run
    (memory(GB, None, [9 * GB], None), "1.0 GB free"),  # beside a peer that runs
    (device_check("cpu", DeviceFacts(threads=1)), "CPU, 1 thread"),
    (device_check("auto", DeviceFacts(threads=2)), "CPU, 2 threads; no GPU that torch can use"),
    (admission_check("12D3", None), "has admitted"),
    (
        device_check("auto", DeviceFacts(kind="cuda", name="NVIDIA H200", free_bytes=139 * GB)),
        "NVIDIA H200, 139 GB free",
    ),
    (bootstrap_checks({FIRST: None})[0], "203.0.113.7 port 31337 accepts connections"),
    (bootstrap_checks({FIRST: "refused", SECOND: None})[1], "run.example port 443 accepts"),
    (run_check(RUN, 1_200_000_000, 250), "words: 3 stages, llama, 1.2 billion parameters, 25 %"),
    (run_check(replace(RUN, stages=1), 12_340_000, 0), "1 stage, llama, 12.3 million parameters"),
    (version_check("0.2.0", 2, {}), "0.2.0 with protocol 2, as the run"),
    (version_check("0.2.0", 2, {"0.2.0": 3}), "as the run and its peers"),
    (version_check("0.2.0", 2, {"0.2.0": 3, "0.1.0": 1}), "its peers: 3 of 0.2.0, 1 of 0.1.0"),
    (clock_check(0.0, None), "as the bootstraps'"),
    (clock_check(1.5, 0.2), "1.5 s behind the bootstraps"),
    (clock_check(-1.5, 0.2), "1.5 s ahead of the bootstraps"),
    (
        reach_check(Reachability(kind="mapped", addresses=("/ip4/198.51.100.5/tcp/9",)), (), 0),
        "others reach this machine at /ip4/198.51.100.5/tcp/9",
    ),
    (port_check("port", "0.0.0.0", 0, None, own_peer=False), "any free one"),
    (port_check("port", "0.0.0.0", 7, None, own_peer=False), "7 of 0.0.0.0 is free"),
    (port_check("metrics", "0.0.0.0", 7, TAKEN, own_peer=True), "by this folder's peer"),
    (bandwidth_check(LINK), "8.0 MB/s down, 2.0 MB/s up"),  # 30 s at 2 MB/s
    (stage_check("auto", 1, {0: 2, 1: 1, 2: 2}, 3, None), "stage 1, which has 1 other peer"),
    (stage_check("auto", 1, {0: 2, 1: 1, 2: 2}, 3, None), "peers by stage: 2, 1, 2"),
    (stage_check("auto", 1, {0: 2, 1: 3, 2: 2}, 3, 1), "3 other peers; it had it before"),
    # of stages that did not answer nothing is claimed
    (
        stage_check("auto", 1, {0: 2}, 3, None),
        "of which nobody knows who has it; peers by",
    ),
    (stage_check("auto", 1, {0: 2}, 3, None), "2, ?, ?"),
    (
        speed_check(1, SpeedFacts(tokens_per_s=3_234.0), 4.04),
        "about 3,200 tokens/s in stage 1; 4.0 s an exchange",
    ),
    (speed_check(1, SpeedFacts(tokens_per_s=9.0, measured=False), None), "estimated"),
    (speed_check(1, SpeedFacts(tokens_per_s=9.0, shared=True), None), "beside the peer that runs"),
    (
        speed_check(0, SpeedFacts(tokens_per_s=50_000.0, link_tokens_per_s=800.0), None),
        "about 800 tokens/s in stage 0, bound by the link (it computes 50,000)",
    ),
]
WARNINGS = [
    (python_check((3, 11, 7), "Linux", "aarch64"), "nobody has tried", "Linux on x86-64"),
    (device_check("auto", DeviceFacts(threads=2, driver=True)), "no GPU", "nvidia-smi must show"),
    (admission_check("", None), "one by one", "start the peer once"),
    (disk_check("here", GB, NEEDS), "1.0 GB free for here, 3.0 GB needed", "--state"),
    (memory(8 * GB, None, [7 * GB]), "a peer here may take 8.0 GB", "close other programs"),
    (memory(8 * GB, 2.0e9, [2 * GB]), "allowed by --memory-limit", "raise --memory-limit"),
    # what a peer starts with the doctor does not forbid
    (memory(2 * GB, None, [3 * GB, GB]), "of 2 stages 1 fits", "host stage 1 with `--stage 1`"),
    (memory(GB, 4e9, [3 * GB]), "1.0 GB free, 3.0 GB needed", "close other programs"),
    (bootstrap_checks({FIRST: "refused", SECOND: None})[0], "refused", "tell the operator"),
    (run_check(in_state(RUN, "paused"), 0, 500), "its operator has paused it", "no need"),
    (
        version_check("0.1.0", 2, {"0.2.0": 3, "0.1.0": 1}),
        "3 of 0.2.0, 1 of 0.1.0",
        "install 0.2.0",
    ),
    (version_check("1", 2, {f"0.{n}": 9 - n for n in range(9)}), "4 of 0.5, ...", "install 0.0"),
    (clock_check(300.0, 0.1), "300.0 s behind", "timedatectl"),
    (clock_check(-300.0, None), "300.0 s ahead of", "timedatectl"),
    (clock_check(0.0, -4.0), "4.0 s apart", "operator"),
    # it takes part all the same
    (unreached(), "would only dial out", "let TCP port 31338 through firewall and router"),
    (unreached(port=0), "dial", "--port 31337 --announce /ip4/198.51.100.5/tcp/31337"),
    (
        unreached("/dns4/a.example/tcp/9"),
        "dial",
        "see that /dns4/a.example/tcp/9 leads to port",
    ),
    (reach_check(Reachability(kind="unknown"), (), 0), "not known", "more peers"),
    (
        stage_check("auto", 1, {0: 2, 1: 0, 2: 0, 3: 0}, 4, None),
        "stage 1, which has nobody else; peers by stage: 2, 0, 0, 0; stage 2, 3 would still have",
        "volunteers",
    ),
    (speed_check(0, SpeedFacts(fault="out of memory"), None), "out of memory", "--log-level"),
]
FAILURES = [
    (python_check((3, 9, 18), "Linux", "x86_64"), "3.9.18", "3.10 to 3.13"),
    (python_check((3, 14, 0), "Linux", "x86_64"), "3.14.0", "3.10 to 3.13"),
    (library("", "==1.1.12"), "missing: thing", "python -m pip install 'thing==1.1.12'"),
    (library("1.1.11", "==1.1.12"), "thing 1.1.11, not ==1.1.12", "install 'thing==1.1.12'"),
    (library("2.10.0", ">=2.11"), "thing 2.10.0, not >=2.11", "install 'thing>=2.11'"),
    (library("2.1", fault="libcudart.so: not found"), "libcudart.so: not", "--force-reinstall"),
    (disk_check("here", GB - 1, NEEDS), "a snapshot takes 1.0 GB", "--state"),
    (memory(2 * GB, None, [9 * GB, GB]), "of 2 stages 1 fits", "host stage 1 with `--stage 1`"),
    (memory(GB, None, [9 * GB, 2 * GB]), "no stage fits", "use a larger machine"),
    (memory(8 * GB, 1.5e9, [2 * GB]), "allowed by --memory-limit", "raise --memory-limit"),
    (device_check("cuda:3", DeviceFacts(fault="no such")), "cuda:3: no such", "choose cpu or auto"),
    (admission_check("12D3", NotAdmitted("not among them: ask")), "not among them", "ask"),
    (run_check(RUN, 0, 1000), "it has ended", "another run"),
    (run_check(in_state(RUN, "ended"), 0, 500), "it has ended", "another run"),
    (port_check("metrics", "0.0.0.0", 7, TAKEN, own_peer=False), "in use", "choose another one"),
    (bandwidth_check(replace(LINK, up=0.5e6)), "take 120 s, it may take 60 s", "--max-upload"),
    *(
        (bootstrap_checks({FIRST: why})[0], why, remedy)
        for why, remedy in {
            "Connection refused": "ask the operator whether the bootstrap runs",
            "timed out": "may dial out to TCP port 31337",
            "Network is unreachable": "check that this machine is online",
            "Name or service not known": "the name in the invite",
            "No address associated with hostname": "the name in the invite",
            "Temporary failure in name resolution": "check that this machine is online",
        }.items()
    ),
]


@pytest.mark.parametrize(("check", "words"), OK)
def test_what_is_well_is_told_and_asks_for_nothing(check: Check, words: str) -> None:
    assert (check.status, check.remedy) == ("ok", "") and words in check.text


@pytest.mark.parametrize(
    ("status", "check", "words", "remedy"),
    [("warning", *each) for each in WARNINGS] + [("failed", *each) for each in FAILURES],
)
def test_what_is_not_names_its_remedy(status: str, check: Check, words: str, remedy: str) -> None:
    assert check.status == status and words in check.text and remedy in check.remedy


@pytest.mark.parametrize(
    ("error", "text", "remedy"),
    [
        (InvalidInput("key file k has mode 0644: run `chmod 600 k`"), "0644", "run `chmod 600 k`"),
        (EnvironmentFault("no bootstrap: a, b; check the invite"), "a, b", "check the invite"),
        (EnvironmentFault("it rains"), "it rains", "see more with --log-level debug"),
    ],
)
def test_an_error_becomes_its_text_and_its_remedy(
    error: DilocoxError, text: str, remedy: str
) -> None:
    check = fault("x", error)
    assert (check.status, check.remedy) == ("failed", remedy) and check.text.endswith(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(12, "12 bytes"), (1_500, "1.5 kB"), (64 * MB, "67.1 MB"), (139 * GB, "139 GB")],
)
def test_sizes_are_for_people(count: int, text: str) -> None:
    assert size(count) == text


# ---- this machine --------------------------------------------------------------------------------
def test_the_libraries_of_this_machine_are_found_with_what_is_needed() -> None:
    found = {each.name: each for each in libraries()}
    assert found["hivemind"].version == "1.1.12" and found["hivemind"].needed == "==1.1.12"
    assert found["torch"].needed.startswith(">=") and not found["torch"].fault


def test_a_folder_that_is_not_there_yet_stays_so(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "a" / "b")
    assert folder_check(folder, in_use=folder.in_use) == Check("folder", "ok", str(folder.path))
    assert key_check(folder) == (Check("key", "ok", "none yet; the first start makes one"), "")
    assert not (tmp_path / "a").exists()


def test_a_folder_with_a_running_peer_is_seen_and_not_disturbed(tmp_path: Path) -> None:
    folder, looks = StateFolder(tmp_path), StateFolder(tmp_path)
    assert not looks.in_use
    with folder.locked():
        assert looks.in_use
        check = folder_check(looks, in_use=True)
        assert (check.status, "--port" in check.remedy) == ("warning", True)
    assert not looks.in_use
    with folder.locked():  # what was looked at is free again
        pass


def test_a_paused_peer_is_said_with_the_command_that_ends_it(tmp_path: Path) -> None:
    (tmp_path / "paused").touch()
    check = folder_check(StateFolder(tmp_path), in_use=False)
    assert (check.status, f"dilocox resume --state {tmp_path}" in check.remedy) == ("warning", True)


def test_a_folder_that_cannot_be_written_is_a_failure() -> None:
    check = folder_check(StateFolder(Path("/proc/1/here")), in_use=False)
    assert (check.status, "--state" in check.remedy) == ("failed", True)


def test_a_key_is_the_peers_id_and_one_that_others_can_read_is_a_failure(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    peer = Identity.load_or_create(folder.identity).peer_id
    assert key_check(folder) == (Check("key", "ok", f"peer {peer}"), peer)
    folder.identity.chmod(0o644)
    check, peer = key_check(folder)
    assert (check.status, "chmod 600" in check.remedy, peer) == ("failed", True, "")


# ---- how far the run is --------------------------------------------------------------------------
def share_trained(
    claims: Mapping[str, ClaimRecord], manifest: Manifest, *, hosts: tuple[str, ...], witness: str
) -> float:
    place: Any = MemorySwarm().place(manifest, lambda _: claims)
    place.witness = witness
    hosted = {stage_key(fabricated.RUN, 0): {host: stage_record() for host in hosts}}
    place.swarm.read_many = lambda keys, _: {key: hosted.get(key, {}) for key in keys}
    invite: Any = type("Invite", (), {"peer_ids": ()})
    return SwarmFacts(place, invite, "").trained / manifest.end_tokens


def test_a_strangers_claim_ends_no_run() -> None:
    manifest = fabricated.manifest_of(1)
    whole = manifest.end_tokens
    claims = {f"peer{number}": claim_record(4, "four", whole // 4) for number in range(3)}
    claims["stranger"] = claim_record(900, "nine", 2 * whole)
    hosts = ("peer0", "peer1", "peer2")
    assert share_trained(claims, manifest, hosts=hosts, witness="boot") == 0.25
    assert share_trained(claims, manifest, hosts=(*hosts, "stranger"), witness="boot") == 0.25
    claims["boot"] = claim_record(5, "five", whole // 2)
    assert share_trained(claims, manifest, hosts=("stranger",), witness="boot") == 0.5
    assert share_trained({}, manifest, hosts=hosts, witness="boot") == 0.0


def test_a_claim_from_before_a_rollback_ends_no_run() -> None:
    manifest = fabricated.manifest_of(1)
    went_back = replace(manifest.operation, revision=2, rules=2, rollbacks=((2, 3),))
    claims = {"old": claim_record(9, "nine", manifest.end_tokens)}
    assert share_trained(claims, manifest, hosts=("old",), witness="") == 1.0
    manifest = replace(manifest, operation=went_back)
    assert share_trained(claims, manifest, hosts=("old",), witness="") == 0.0
