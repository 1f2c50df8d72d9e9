"""The archive beside a bootstrap: its service, its tick, and its stages under new rules."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hivemind.p2p import P2P

from dilocox.dht.manifest_revisions import in_state
from dilocox.dht.records import ClaimRecord, claim_key
from dilocox.dht.rpc import chunk_of, facts_of, request_of
from dilocox.peer.chain import archive_keeper
from dilocox.peer.chain.archive_keeper import Archive, ArchiveService, Keeper
from dilocox.peer.chain.record_check import RecordCheck
from dilocox.peer.chain.uploads import Source
from tests.dht.processes import wait_until
from tests.peer.chain.archives import MANIFEST, ME, Kept
from tests.peer.kept_chains import RUN, ChainMaker


def test_the_service_answers_as_an_averager_does(donor: ChainMaker, tmp_path: Path) -> None:
    donor.train(0)
    donor.train(1)
    donor.snapshot()
    kept = Kept(tmp_path / "kept", donor)
    kept.look(donor)

    async def find(want: dict[str, Any]) -> Source | None:
        return kept.archive.find(want)

    served, refused = Counter[str](), Counter[str]()

    async def asked(want: dict[str, Any]) -> list[Any]:
        service = ArchiveService(find, served, refused)
        peer: Any = SimpleNamespace(remote_id=donor.peer)
        return [each async for each in service.rpc_get(request_of(want), peer)]

    digest = donor.log.head().digest
    facts, *chunks = asyncio.run(asked({"what": "record", "digest": digest}))
    data = b"".join(chunk_of(chunk) for chunk in chunks)
    assert data == donor.log.read_bytes(1)
    assert (served, refused) == ({"record": len(data)}, {})
    assert facts_of(facts) == {"bytes": len(data)}
    for nonsense in ({}, {"what": "record", "digest": "f" * 64}, {"what": "vote"}):
        (answer,) = asyncio.run(asked(nonsense))
        assert facts_of(answer) == {}
    assert refused == {"question": 1}  # what is not kept is no fault of who asks
    assert [name for name in dir(ArchiveService) if name.startswith("rpc_")] == ["rpc_get"]


def test_no_fault_of_the_archive_leaves_its_tick(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> Any:
        raise TimeoutError

    def of_bootstrap() -> Archive:
        return Archive(
            dht=cast("Any", SimpleNamespace(run_coroutine=gone, bootstraps=())),
            swarm=cast("Any", None),
            run=RUN,
            me=ME,
            witness=ME,
            manifest=MANIFEST,
            folder=tmp_path,
        )

    kept = of_bootstrap()
    kept.tick()
    assert "p2pd cannot be reached" in caplog.text
    caplog.clear()
    kept.tick()
    assert not caplog.text  # it waits before it tries again
    monkeypatch.setattr(archive_keeper, "daemon_address", lambda *_: f"/unix/{os.devnull}")
    kept = of_bootstrap()
    kept.tick()
    assert "did not start" in caplog.text
    kept.close()


def test_an_archive_tells_its_newest_round_and_hears_whether_the_run_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_keeper, "LOOK_S", 0.0)
    trained = list[bool]()
    claim = ClaimRecord(round=17, digest="d", chain_tokens=1, record_bytes=1)
    keeper = SimpleNamespace(
        running=True,
        claims={0: claim, 1: replace(claim, round=27)},
        start=lambda _: None,
        hear=lambda _, trains: trained.append(trains),
        close=lambda: None,
    )
    monkeypatch.setattr(archive_keeper, "daemon_address", lambda *_: "")
    monkeypatch.setattr(archive_keeper, "Keeper", lambda *_, **__: keeper)
    told: dict[str, ClaimRecord] = {}
    swarm = SimpleNamespace(
        read_many=lambda keys, _: dict.fromkeys(keys),
        publish=lambda key, claim, *_: told.setdefault(key, claim),
    )
    kept = Archive(
        dht=cast("Any", SimpleNamespace(bootstraps=())),
        swarm=cast("Any", swarm),
        run=RUN,
        me=ME,
        witness=ME,
        manifest=MANIFEST,
        folder=tmp_path,
    )
    kept.tick()
    assert told[claim_key(RUN, 0)].run_round == 27
    assert told[claim_key(RUN, 1)].run_round == -1
    for state in ("paused", "ended", "running"):
        kept.revise(in_state(MANIFEST, state))
        kept.tick()
    keeper.claims = {0: replace(claim, chain_tokens=MANIFEST.end_tokens)}
    kept.tick()
    assert trained == [True, False, False, True, False]
    kept.close()


class OpenedStages:
    """In place of the stages' archives: under which rules each was opened, who has been closed."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, int | None]] = []  # stage, the rules' end of the run
        self.closed: list[int] = []
        self.may_open = threading.Event()
        self.may_open.set()

    def open(self, folder: Path, *, check: RecordCheck, **_: object) -> Any:
        self.opened.append((check.stage, check.manifest.end_tokens))
        assert self.may_open.wait(10)

        async def tend(claims: object, *, trains: bool) -> None:
            pass

        async def close() -> None:
            self.closed.append(check.stage)
            if check.stage == 0:
                raise RuntimeError("of closing")

        return SimpleNamespace(tend=tend, close=close, claim=None, round=7)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> OpenedStages:
    stages = OpenedStages()
    monkeypatch.setattr(archive_keeper, "StageArchive", stages.open)
    return stages


def while_it_keeps(folder: Path, test: Callable[[Keeper], None]) -> None:
    """Run the test beside a keeper of two stages that are on the disk, with a p2pd of its own."""
    for stage in range(2):
        (folder / f"stage{stage}").mkdir()
    keeper = Keeper(RUN, ME, ME, replace(MANIFEST, stages=2), folder)

    async def run() -> None:
        p2p = await P2P.create(startup_timeout=60)
        try:
            await asyncio.to_thread(keeper.start, p2p.daemon_listen_maddr)
            await asyncio.to_thread(test, keeper)
        finally:
            await asyncio.to_thread(keeper.close)
            await p2p.shutdown()

    asyncio.run(run())


def test_new_rules_move_no_folder_in_which_a_thread_still_works(
    tmp_path: Path, stages: OpenedStages
) -> None:
    before, after = [(0, 1000), (1, 1000)], [(0, 1), (1, 1)]

    def revised(keeper: Keeper) -> None:
        wait_until(lambda: sorted(stages.opened) == before, 20.0)
        keeper.revise(replace(MANIFEST, stages=2, end_tokens=1))
        time.sleep(0.2)
        assert sorted(stages.opened) == before, "both are still being opened under the old rules"
        stages.may_open.set()
        wait_until(lambda: sorted(stages.opened[2:]) == after, 20.0)

    stages.may_open.clear()
    while_it_keeps(tmp_path, revised)


def test_a_stage_that_cannot_be_put_down_holds_up_no_new_rules(
    tmp_path: Path, stages: OpenedStages, caplog: pytest.LogCaptureFixture
) -> None:
    def revised(keeper: Keeper) -> None:
        wait_until(lambda: keeper.rounds == {0: 7, 1: 7}, 20.0)
        for end_tokens in (1, 2):
            keeper.revise(replace(MANIFEST, stages=2, end_tokens=end_tokens))
        wait_until(lambda: sorted(stages.opened[-2:]) == [(0, 2), (1, 2)], 20.0)

    while_it_keeps(tmp_path, revised)
    assert {0, 1} <= set(stages.closed)
    assert "archive of stage 0: " in caplog.text and "of closing" in caplog.text
