"""The bootstrap's archive: it follows, proves, replaces and serves what peers of a stage have."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dilocox.dht import bootstrap_node
from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.identity import Identity
from dilocox.dht.records import ClaimRecord
from dilocox.dht.rpc import Client, PeerBusy, chunk_of, pack, unpack
from dilocox.peer.averaging.averager import StageAverager
from dilocox.peer.chain import archive, archive_keeper, catchup
from dilocox.peer.chain.archive import Generation, StageArchive
from dilocox.peer.chain.archive_keeper import Archive, ArchiveService, Keeper
from dilocox.peer.chain.replay import Replayed, replay
from dilocox.peer.chain.store import RoundLog, kept_run
from dilocox.peer.rounds.outer_step import OuterStep, anchor_sha256
from tests.peer.donors import LAYOUT, MANIFEST, RUN, Donor, Wire

ME = "QmArchive"
OUTER = OuterStep(MANIFEST.outer.learning_rate, MANIFEST.outer.momentum)
CHECK = catchup.RecordCheck.of(RUN, 0, MANIFEST, LAYOUT)


@dataclass
class Desk:
    """An archive and the donors that it can reach."""

    folder: Path
    donors: dict[str, Any]
    archive: StageArchive

    @classmethod
    def opened(
        cls,
        folder: Path,
        *donors: Donor,
        record_lifetime_s: float = 60.0,
        keep_bytes: int = 1 << 30,
    ) -> Desk:
        by_peer: dict[str, Any] = {donor.peer: donor for donor in donors}
        kept = StageArchive(
            folder,
            me=ME,
            check=CHECK,
            record_lifetime_s=record_lifetime_s,
            keep_bytes=keep_bytes,
            client=cast("Client", Wire(by_peer)),
            compute=asyncio.to_thread,
        )
        return cls(folder, by_peer, kept)

    def look(self, *donors: Donor, times: int = 1, **more: ClaimRecord) -> ClaimRecord | None:
        """Let it see what these claim; what it claims then."""
        claims = {donor.peer: donor.claim() for donor in donors} | more

        async def tend() -> None:
            for _ in range(times):
                await self.archive.tend(claims)
                building = self.archive._building
                if building is not None:
                    await asyncio.wait([building], timeout=20)
                await self.archive.tend(claims)
            await self.archive.close()  # the next look has another event loop

        asyncio.run(tend())
        return self.archive.claim

    @property
    def generations(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.name.isdigit())

    @property
    def state_round(self) -> int:
        return self.archive._current.state_round

    def joiner_gets(self, folder: Path, claim: ClaimRecord) -> Tensor:
        """The anchor that a peer has which takes all from the archive, by its own code."""
        client = cast("Client", Wire({ME: cast("Donor", self.archive)}))
        anchor, momentum = torch.zeros(LAYOUT.numel), torch.zeros(LAYOUT.numel)
        log = RoundLog(folder / "joined", manifest_digest=MANIFEST.digest, codec=CHECK.codec)

        async def take() -> tuple[int, ...]:
            try:
                state = await catchup.fetch_state(
                    client,
                    ME,
                    check=CHECK,
                    compute=asyncio.to_thread,
                    after_round=-1,
                    folder=folder,
                    anchor=anchor,
                    momentum=momentum,
                )
                log.start_from(state.record, state.certificate)
            except ConnectionError:
                anchor.copy_(Donor(IDENTITY[0], folder / "start").anchor)
            reach = await catchup.catch_up(
                client, log, ME, claim.digest, check=CHECK, compute=asyncio.to_thread
            )
            return reach.appended

        for number in asyncio.run(take()):
            record = log.read(number)
            assert record is not None
            OUTER.apply(anchor, momentum, record.average(CHECK.codec), anchor, momentum)
        assert log.head().digest == claim.digest
        return anchor


IDENTITY: list[Identity] = []


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch, identities: list[Identity]) -> Iterator[None]:
    """States are looked for after two records already, and at once."""
    monkeypatch.setattr(archive, "RECORDS_AFTER_STATE", 2)
    monkeypatch.setattr(archive, "PAUSE_S", 0.0)
    IDENTITY[:] = identities
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def donor(identities: list[Identity], tmp_path: Path) -> Donor:
    return Donor(identities[0], tmp_path / "donor")


def test_few_records_are_kept_without_a_state_and_lead_a_joiner_to_the_anchor(
    donor: Donor, tmp_path: Path
) -> None:
    desk = Desk.opened(tmp_path / "kept", donor)
    assert desk.look(donor) is None  # there is no record yet
    for round_number in (0, 2):
        donor.train(round_number)
        assert desk.look(donor) == replace(donor.claim(), record_bytes=_size(donor))
    assert desk.state_round == -1
    claim = donor.claim()
    desk.donors.clear()  # all peers of the stage are gone
    assert desk.look() == replace(claim, record_bytes=_size(donor))
    assert torch.equal(desk.joiner_gets(tmp_path, claim), donor.anchor)


def test_a_newer_state_takes_over_when_two_records_have_proved_it(
    donor: Donor, tmp_path: Path
) -> None:
    desk = Desk.opened(tmp_path / "kept", donor)
    for round_number in range(3):
        donor.train(round_number)
    donor.snapshot()
    for round_number in (3, 4):
        desk.look(donor)
        assert (desk.state_round, desk.generations) == (-1, ["00000000", "00000001"])
        donor.train(round_number)
    claim = desk.look(donor)
    assert claim is not None and claim.digest == donor.claim().digest
    assert (desk.state_round, desk.generations) == (2, ["00000001"])
    assert torch.equal(desk.joiner_gets(tmp_path, claim), donor.anchor)


@pytest.mark.parametrize("wrong", ["anchor", "momentum"])
def test_a_state_that_its_records_do_not_fit_is_never_served(
    donor: Donor, tmp_path: Path, wrong: str
) -> None:
    desk = Desk.opened(tmp_path / "kept", donor)
    for round_number in range(3):
        donor.train(round_number)
    lie(donor, wrong)
    for round_number in (3, 4):
        desk.look(donor)
        assert desk.generations == ["00000000", "00000001"]
        donor.train(round_number)
    claim = desk.look(donor)
    assert (desk.state_round, desk.generations) == (-1, ["00000000"])
    assert claim is not None
    assert torch.equal(desk.joiner_gets(tmp_path, claim), donor.anchor)
    desk.look(donor)
    assert desk.generations == ["00000000"]  # nothing more is taken from such a peer


def lie(donor: Donor, wrong: str) -> None:
    """Let it serve a state that is off by a little."""
    values = getattr(donor, wrong)
    right = values.clone()
    values[7] += 1e-3
    donor.snapshot()
    values.copy_(right)


def test_where_logs_do_not_reach_back_a_state_is_taken_at_once(
    donor: Donor, tmp_path: Path
) -> None:
    for round_number in range(6):
        donor.train(round_number)
        if round_number == 3:
            donor.snapshot()
    donor.log.prune(keep=3)
    desk = Desk.opened(tmp_path / "kept", donor)
    claim = desk.look(donor)
    assert desk.state_round == 3
    assert claim is not None
    assert torch.equal(desk.joiner_gets(tmp_path, claim), donor.anchor)


def test_a_state_taken_at_once_that_proves_wrong_is_thrown_away(
    donor: Donor, tmp_path: Path
) -> None:
    for round_number in range(4):
        donor.train(round_number)
    lie(donor, "anchor")
    donor.log.prune(keep=1)
    desk = Desk.opened(tmp_path / "kept", donor)
    assert desk.look(donor) is not None  # nothing better is known yet
    for round_number in (4, 5):
        donor.train(round_number)
    assert desk.look(donor) is None
    assert desk.look(donor, times=2) is None  # and it is not taken from the same peer again


def test_a_chain_with_more_tokens_wins_and_one_that_lost_is_not_told(
    identities: list[Identity], tmp_path: Path
) -> None:
    ours, theirs = (Donor(each, tmp_path / each.peer_id) for each in identities[:2])
    for round_number in range(2):
        ours.train(round_number)
    for round_number in range(3):
        theirs.train(round_number)
    desk = Desk.opened(tmp_path / "kept", ours, theirs)
    desk.look(ours)
    theirs_claim = theirs.claim()
    del desk.donors[theirs.peer]
    known: dict[str, Any] = {theirs.peer: theirs_claim}
    assert desk.look(ours, **known) is None  # out of reach, but known
    desk.donors[theirs.peer] = theirs
    fresh = Desk.opened(tmp_path / "other", ours, theirs)
    fresh.look(ours)
    claim = fresh.look(ours, theirs)
    assert claim is not None and claim.digest == theirs.claim().digest
    assert torch.equal(fresh.joiner_gets(tmp_path, claim), theirs.anchor)
    back = fresh.look(ours, theirs)
    assert back is not None and back.digest == theirs.claim().digest


def test_a_claim_that_nobody_can_prove_hides_neither_the_others_nor_ours_for_long(
    donor: Donor, tmp_path: Path
) -> None:
    desk = Desk.opened(tmp_path / "kept", donor, record_lifetime_s=0.0)
    donor.train(0)
    lie = replace(donor.claim(), round=99, chain_tokens=10**9, digest="f" * 64)
    claims = [desk.look(donor, QmLiar=lie) for _ in range(3)]
    assert [claim and claim.digest for claim in claims][-1] == donor.claim().digest
    assert desk.archive._current.head.digest == donor.claim().digest


def test_a_peer_that_is_busy_is_asked_again_but_not_for_ever(
    donor: Donor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, busy = [0.0], [True]
    monkeypatch.setattr(archive, "time", SimpleNamespace(monotonic=lambda: now[0]))
    find = donor.find

    def find_when_free(want: dict[str, Any]) -> catchup.Source | None:
        if busy[0] and want["what"] == "record" and not want.get("header"):
            raise PeerBusy("8 downloads are served at once")
        return find(want)

    monkeypatch.setattr(donor, "find", find_when_free)
    desk = Desk.opened(tmp_path / "kept", donor, record_lifetime_s=60.0)
    donor.train(0)
    for _ in range(3):
        assert desk.look(donor) is None
        now[0] += 61.0
    busy[0] = False
    first = desk.look(donor)
    assert first is not None and first.digest == donor.claim().digest
    busy[0] = True
    donor.train(1)
    assert desk.look(donor) is None  # somebody is ahead
    now[0] += 601.0
    assert desk.look(donor) == first


def test_what_is_kept_outlives_a_restart_and_what_is_damaged_does_not(
    donor: Donor, tmp_path: Path
) -> None:
    desk = Desk.opened(tmp_path / "kept", donor)
    for round_number in range(6):
        donor.train(round_number)
        if round_number == 2:
            donor.snapshot()
        desk.look(donor)
    assert desk.state_round == 2
    again = Desk.opened(tmp_path / "kept")
    claim = again.look()
    assert claim is not None and claim == desk.archive.claim
    assert torch.equal(again.joiner_gets(tmp_path, claim), donor.anchor)
    with again.archive._current.state_file.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff")
    damaged = Desk.opened(tmp_path / "kept", donor)
    assert damaged.look() is None
    claim = damaged.look(donor)
    assert claim is not None and claim.digest == donor.claim().digest


def test_a_half_made_generation_is_cleared_away(donor: Donor, tmp_path: Path) -> None:
    donor.train(0)
    Desk.opened(tmp_path / "kept", donor).look(donor)
    (tmp_path / "kept" / "00000001.partial" / "log").mkdir(parents=True)
    again = Desk.opened(tmp_path / "kept")
    assert again.look() is not None
    assert not list((tmp_path / "kept").glob("*.partial"))


def test_a_full_disk_is_said_and_costs_nothing_of_what_is_kept(
    donor: Donor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk.opened(tmp_path / "kept", donor)
    for round_number in range(3):
        donor.train(round_number)
    desk.look(donor)
    donor.snapshot()

    def full(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(catchup, "sha256_of_file", full)
        with pytest.raises(EnvironmentFault, match="no space left"):
            desk.look(donor)
    assert not list((tmp_path / "kept" / "incoming").iterdir())
    claim = desk.look(donor)
    assert claim is not None
    assert torch.equal(desk.joiner_gets(tmp_path, claim), donor.anchor)


def test_a_broken_download_goes_on_where_it_was(
    donor: Donor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for round_number in range(4):
        donor.train(round_number)
    donor.snapshot()
    donor.log.prune(keep=1)
    desk = Desk.opened(tmp_path / "kept", donor)
    offsets: list[int] = []
    original = Wire.fetch

    async def breaking(self: Wire, peer: str, want: dict[str, Any], **options: Any) -> Any:
        if "sha256" not in want:
            return await original(self, peer, want, **options)
        offsets.append(want["offset"])
        if len(offsets) == 1:
            data = donor.find(want)
            assert data is not None
            options["sink"](data.file.read(1000))
            raise ConnectionError("broken")
        return await original(self, peer, want, **options)

    monkeypatch.setattr(Wire, "fetch", breaking)
    assert desk.look(donor) is None
    assert desk.look(donor) is not None
    assert offsets == [0, 1000]


# ---- the history ---------------------------------------------------------------------------------
def of_run(folder: Path) -> Path:
    """The folder of stage 0 in a bootstrap's state folder."""
    return folder / f"{'0' * 32}-archive-{'a' * 16}" / "stage0"


def history(folder: Path) -> Replayed:
    """What a replay of all that is kept finds."""
    chain = kept_run(folder).stages[0]
    return replay(MANIFEST, RUN, 0, chain.records, chain.states)


def through_generations(desk: Desk, donor: Donor, *rounds: int) -> None:
    """Train and let the archive follow; the donor writes a snapshot every other round."""
    for number in rounds:
        donor.train(number)
        if number % 2:
            donor.snapshot()
        desk.look(donor)


def test_the_whole_run_can_be_replayed_after_many_generations_and_restarts(
    donor: Donor, tmp_path: Path
) -> None:
    desk = Desk.opened(of_run(tmp_path), donor)
    through_generations(desk, donor, *range(8))
    assert desk.state_round > 2
    desk = Desk.opened(of_run(tmp_path), donor)
    through_generations(desk, donor, *range(8, 12))
    assert desk.generations[0] > "00000002"
    found = history(tmp_path)
    assert (found.flaws, found.replayed) == ((), tuple(range(12)))
    assert found.anchor_sha256 == anchor_sha256(donor.anchor)
    assert found.confirmed


def test_older_records_are_given_to_who_asks_for_them_and_to_nobody_else(
    donor: Donor, tmp_path: Path
) -> None:
    desk = Desk.opened(of_run(tmp_path), donor)
    through_generations(desk, donor, *range(8))
    digest = donor.log.entries()[0].digest
    for what, due in (
        ("record", donor.log.read_bytes(0)),
        ("certificate", donor.log.certificate(0)),
    ):
        want = {"what": what, "digest": digest}
        assert desk.archive.find(want) is None  # a peer that is so far behind takes the state
        found = desk.archive.find(want | {"older": True})
        assert found is not None and found.file.read() == due


def test_older_records_make_room_when_they_are_too_many(donor: Donor, tmp_path: Path) -> None:
    desk = Desk.opened(of_run(tmp_path), donor, keep_bytes=1)
    through_generations(desk, donor, *range(12))
    found = history(tmp_path)
    state = desk.state_round
    assert found.flaws == ()
    assert found.checked == tuple(range(state - 4, 12))
    assert found.replayed == tuple(range(state + 1, 12))


def test_a_chain_that_lost_leaves_nothing_in_the_history(
    identities: list[Identity], tmp_path: Path
) -> None:
    ours, theirs = (Donor(each, tmp_path / each.peer_id) for each in identities[:2])
    desk = Desk.opened(of_run(tmp_path), ours, theirs)
    through_generations(desk, ours, *range(6))
    assert desk.state_round > 0
    for number in range(0, 20, 2):
        theirs.train(number)
    desk.look(theirs, times=2)
    found = history(tmp_path)
    assert (found.flaws, found.replayed) == ((), tuple(range(0, 20, 2)))
    assert found.anchor_sha256 == anchor_sha256(theirs.anchor)


def test_the_history_outlives_a_state_that_proves_wrong(donor: Donor, tmp_path: Path) -> None:
    desk = Desk.opened(of_run(tmp_path), donor)
    through_generations(desk, donor, *range(6))
    desk.archive._start_over()
    donor.log.prune(keep=1)
    through_generations(desk, donor, *range(6, 10))
    found = history(tmp_path)
    assert (found.flaws, found.replayed) == ((), tuple(range(10)))


def test_a_history_that_does_not_lead_to_what_a_restart_finds_is_emptied(
    donor: Donor, tmp_path: Path
) -> None:
    desk = Desk.opened(of_run(tmp_path), donor)
    number = 0
    while number < 6 or len(desk.generations) < 2:
        through_generations(desk, donor, number)
        number += 1
    shutil.rmtree(of_run(tmp_path) / desk.generations[0])
    Desk.opened(of_run(tmp_path), donor)
    found = history(tmp_path)
    assert (found.flaws, found.checked[-1]) == ((), number - 1)
    assert found.replayed == found.checked[1:]


def test_where_records_are_missing_in_between_the_history_begins_anew(
    donor: Donor, tmp_path: Path
) -> None:
    desk = Desk.opened(of_run(tmp_path), donor)
    through_generations(desk, donor, *range(6))
    for number in range(6, 12):
        donor.train(number)
    donor.snapshot()
    donor.train(12)
    donor.log.prune(keep=2)
    desk.look(donor, times=2)
    found = history(tmp_path)
    assert (found.flaws, found.checked, found.replayed) == ((), (11, 12), (12,))


def test_a_crash_while_records_move_to_the_history_costs_none(
    donor: Donor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk.opened(of_run(tmp_path), donor)
    through_generations(desk, donor, *range(4))

    def crash(_: Generation) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Generation, "remove", crash)
        with pytest.raises(KeyboardInterrupt):
            through_generations(desk, donor, *range(4, 8))
    assert len(desk.generations) == 2
    assert history(tmp_path).flaws == ()
    again = Desk.opened(of_run(tmp_path), donor)
    through_generations(again, donor, 8, 9)
    found = history(tmp_path)
    assert (found.flaws, found.replayed) == ((), found.checked)
    assert found.checked[0] == 0
    assert found.anchor_sha256 == anchor_sha256(donor.anchor)


@pytest.mark.parametrize(
    "want", [{}, {"what": "mean"}, {"what": "state", "offset": "x"}, {"what": "record"}]
)
def test_questions_that_make_no_sense_find_nothing(
    donor: Donor, tmp_path: Path, want: Mapping[str, Any]
) -> None:
    desk = Desk.opened(tmp_path / "kept", donor)
    with contextlib.suppress(ValueError, KeyError, TypeError):  # the service takes those so too
        assert desk.archive.find(want) is None


def test_the_service_answers_as_an_averager_does(donor: Donor, tmp_path: Path) -> None:
    donor.train(0)
    donor.train(1)
    donor.snapshot()
    desk = Desk.opened(tmp_path / "kept", donor)
    desk.look(donor)

    async def find(want: dict[str, Any]) -> catchup.Source | None:
        return desk.archive.find(want)

    served, refused = Counter[str](), Counter[str]()

    async def asked(want: dict[str, Any]) -> list[Any]:
        service = ArchiveService(find, served, refused)
        peer: Any = SimpleNamespace(remote_id=donor.peer)
        return [each async for each in service.rpc_get(pack(want), peer)]

    digest = donor.log.head().digest
    facts, *chunks = asyncio.run(asked({"what": "record", "digest": digest}))
    data = b"".join(chunk_of(chunk) for chunk in chunks)
    assert data == donor.log.read_bytes(1)
    assert (served, refused) == ({"record": len(data)}, {})
    assert unpack(facts) == {"bytes": len(data)}
    for nonsense in ({}, {"what": "record", "digest": "f" * 64}, {"what": "vote"}):
        (answer,) = asyncio.run(asked(nonsense))
        assert unpack(answer) == {}
    assert refused == {"nonsense": 1}  # what is not kept is no fault of who asks
    calls = [name for name in dir(ArchiveService) if name.startswith("rpc_")]
    assert calls == ["rpc_get"]
    names = (each._get_handle_name("run", "rpc_get") for each in (ArchiveService, StageAverager))
    assert len(set(names)) == 1


def test_the_bootstrap_ticks_what_runs_beside_it_and_closes_it_before_its_node(
    monkeypatch: pytest.MonkeyPatch, identities: list[Identity]
) -> None:
    done: list[str] = []
    stop = threading.Event()

    class Beside:
        def tick(self) -> None:
            done.append("tick")
            if len(done) == 3:
                stop.set()

        def close(self) -> None:
            done.append("closed")

    node = SimpleNamespace(
        running=True,
        visible_addresses=lambda: [f"/ip4/127.0.0.1/tcp/1/p2p/{identities[0].peer_id}"],
        close=lambda: done.append("node closed"),
    )
    monkeypatch.setattr(bootstrap_node, "open_dht", lambda **_: node)
    keeper = SimpleNamespace(run="0" * 32, own=True, due=False, publish=lambda _: True)
    bootstrap_node.run_bootstrap(
        keeper=cast("Any", keeper),
        identity=identities[0],
        listen=(),
        announce=(),
        others=(),
        alone=True,
        stop_event=stop,
        on_ready=lambda _: done.clear(),
        beside=lambda *_: Beside(),
        look_s=0.001,
    )
    assert done == ["tick", "tick", "tick", "closed", "node closed"]


def test_no_fault_of_the_archive_leaves_its_tick(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> Any:
        raise TimeoutError

    kept = Archive(
        dht=cast("Any", SimpleNamespace(run_coroutine=gone)),
        swarm=cast("Any", None),
        run=RUN,
        me=ME,
        manifest=MANIFEST,
        folder=tmp_path,
    )
    kept.tick()
    assert "p2pd is not to be had" in caplog.text
    caplog.clear()
    kept.tick()
    assert not caplog.text  # it waits before it tries again
    kept._start_at = 0.0
    monkeypatch.setattr(archive_keeper, "daemon_address", lambda *_: f"/unix/{os.devnull}")
    kept.tick()
    assert "did not start" in caplog.text
    kept.close()


def test_new_rules_move_no_folder_in_which_a_thread_still_works(tmp_path: Path) -> None:
    keeper = Keeper(RUN, ME, MANIFEST, tmp_path)
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(10)

    async def revised() -> None:
        keeper._jobs[0] = job = asyncio.create_task(keeper._compute(work))
        await asyncio.to_thread(begun.wait, 10)
        adopting = asyncio.create_task(keeper._adopt(replace(MANIFEST, end_tokens=1), None))
        await asyncio.wait([adopting], timeout=0.2)
        assert job.cancelled()
        assert keeper._manifest == MANIFEST, "nothing is opened under the new rules yet"
        go_on.set()
        await asyncio.wait_for(adopting, 10)
        assert keeper._manifest.end_tokens == 1

    asyncio.run(revised())
    keeper._pool.shutdown()
    keeper._loop.close()


def test_a_stage_that_cannot_be_put_down_holds_up_no_new_rules(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper, closed = Keeper(RUN, ME, MANIFEST, tmp_path), list[int]()

    async def fails() -> None:
        raise RuntimeError("of closing")

    async def closes() -> None:
        closed.append(1)

    async def revised() -> None:
        keeper._stages = cast("Any", {0: SimpleNamespace(close=fails)})
        keeper._stages[1] = cast("Any", SimpleNamespace(close=closes))
        first = asyncio.create_task(keeper._adopt(replace(MANIFEST, end_tokens=1), None))
        await asyncio.wait_for(keeper._adopt(replace(MANIFEST, end_tokens=2), first), 10)

    asyncio.run(revised())
    keeper._pool.shutdown()
    keeper._loop.close()
    assert keeper._manifest.end_tokens == 2
    assert closed == [1] and not keeper._stages
    assert "archive of stage 0: " in caplog.text and "of closing" in caplog.text


def _size(donor: Donor) -> int:
    return donor.log.head().record_bytes
