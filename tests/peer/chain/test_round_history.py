"""The history of a run that its bootstraps keep: the file, what is given and believed of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import P2P

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.identity import Identity
from dilocox.dht.manifest_revisions import back_to
from dilocox.dht.records import averaging_prefix
from dilocox.dht.rpc import Blob, CallRefused, Client
from dilocox.peer.chain import archive_keeper, round_history
from dilocox.peer.chain.archive_keeper import Keeper
from dilocox.peer.chain.history_keeper import OPEN_ROUNDS, HistoryKeeper
from dilocox.peer.chain.round_history import (
    FIRST,
    MAX_LETTERS,
    MAX_PAGE_BYTES,
    HistoryRow,
    ModelSample,
    NamedPeer,
    RoundHistory,
    ToldHistory,
    ask_history,
    checked_page,
    merge,
    parsed_row,
    signed_page,
)
from dilocox.peer.chain.stated_facts import LIVE_ROUNDS
from dilocox.peer.chain.summary import ChainRound
from dilocox.peer.chain.uploads import Source
from tests.peer.fabricated import (
    NOW,
    RUN,
    chain_round,
    claim_record,
    digest,
    manifest_of,
    peer_id,
    replica_record,
    stage_record,
)
from tests.peer.memory_swarm import MemorySwarm

MANIFEST = manifest_of(2)


def row(number: int, **known: Any) -> HistoryRow:
    made = HistoryRow(number, 0, digest(0, number)[:16], NOW + 10 * number, 1000 * (number + 1))
    return made._replace(**known)


def committed(
    number: int, tokens: int = 0, branch: str = "", peers: Sequence[str] = ()
) -> ChainRound:
    made = chain_round(0, number, dict.fromkeys(peers, 10), branch=branch, chain_tokens=tokens)
    return replace(made, record_bytes=1000)


def history(folder: Path) -> RoundHistory:
    return RoundHistory(folder / "history.jsonl", MANIFEST)


def blob(given: RoundHistory, identity: Identity) -> Blob:
    """A page as it arrives."""
    source = signed_page(given, identity, RUN, FIRST)
    return Blob(facts=source.facts, data=source.file.read())


def given(kept: RoundHistory, identity: Identity) -> Callable[[dict[str, Any]], Source]:
    """How a bootstrap answers."""
    return lambda want: signed_page(kept, identity, RUN, int(want["after"]))


# ---- the file ------------------------------------------------------------------------------------
def test_of_several_lines_of_a_round_the_last_counts_also_after_a_restart(tmp_path: Path) -> None:
    kept = history(tmp_path)
    for number in range(3):
        kept.add(row(number))
    kept.add(row(1, validation=2.5))
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 4
    for each in (kept, history(tmp_path)):
        assert each.newest(9) == [row(0), row(1, validation=2.5), row(2)]


@pytest.mark.parametrize("damage", [b'[3,0,"', b"[3", b"\xff\n", b'{"round": 3}\n', b"[3,0]\n"])
def test_a_line_that_was_cut_is_dropped_at_a_start_and_spoils_no_other(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    history(tmp_path).add(row(0))
    with (tmp_path / "history.jsonl").open("ab") as file:
        file.write(damage)
    again = history(tmp_path)
    assert again.newest(9) == [row(0)] and "1 damaged lines are left out" in caplog.text
    again.add(row(1))
    caplog.clear()
    assert history(tmp_path).newest(9) == [row(0), row(1)] and not caplog.text


def test_a_disk_that_was_full_for_a_while_leaves_no_half_line(tmp_path: Path) -> None:
    kept = history(tmp_path / "archive")
    (tmp_path / "archive").write_text("in the way")  # of the folder
    with pytest.raises(EnvironmentFault):
        kept.add(row(0))
    (tmp_path / "archive").unlink()
    (tmp_path / "archive").mkdir()
    kept.add(row(1))
    assert history(tmp_path / "archive").newest(9) == [row(0), row(1)]


def test_rounds_that_are_set_aside_stay_in_the_file_and_count_no_more(tmp_path: Path) -> None:
    kept = history(tmp_path)
    for number in range(5):
        kept.add(row(number))
    later = back_to(MANIFEST, 1, [digest(0, 1), digest(1, 1)])
    kept.revise(later)
    rules = later.operation.rules
    kept.add(row(2, rules=rules, digest="ab" * 8))
    kept.add(row(5, rules=rules))
    numbers = [each.round for each in kept.newest(9)]
    assert numbers == [0, 1, 2, 5] and kept.newest(2)[0].digest == "ab" * 8
    again = RoundHistory(tmp_path / "history.jsonl", later)
    assert again.rows() == kept.rows()
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 7


def test_rounds_of_a_chain_that_was_given_up_are_gone(tmp_path: Path) -> None:
    kept = history(tmp_path)
    for number in range(5):
        kept.add(row(number))
    kept.add(row(2, digest="cd" * 8))
    for each in (kept, history(tmp_path)):
        assert [each.round for each in each.newest(9)] == [0, 1, 2]


def test_it_stays_bounded_from_the_first_round_to_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_history, "MAX_ROWS", 100)
    monkeypatch.setattr(round_history, "SPARE_LINES", 10)
    kept = history(tmp_path)
    for number in range(1000):
        kept.add(row(number))
        kept.add(row(number, train=1.0))
    found = [each.round for each in history(tmp_path).newest(1000)]
    assert len(found) <= 100 and (found[0], found[-1]) == (0, 999)
    assert len((tmp_path / "history.jsonl").read_bytes().splitlines()) <= 4 * 100 + 11


# ---- what is given of it -------------------------------------------------------------------------
def test_pages_are_small_and_together_all_of_it(
    tmp_path: Path, identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, counts = (-1e4 / 3, 1e4 / 3), [2**53] * 4
    longest = HistoryRow._make(
        [*counts[:2], "f" * 16, 1e12 / 3, counts[0], *losses, 1e12 / 3, *counts, *losses]
    )
    record = stage_record(name="\U0001f98a" * 99, team='"' * 99)
    named = len(json.dumps(NamedPeer.of("1" * 64, record), ensure_ascii=False).encode()) + 1
    rows = len(json.dumps(longest)) * round_history.PAGE_ROWS
    samples = round_history.MAX_SAMPLES * 4 * (MAX_LETTERS + 512)  # text and prompt, in UTF-8
    assert rows + named * round_history.MAX_NAMED + samples < MAX_PAGE_BYTES
    monkeypatch.setattr(round_history, "PAGE_ROWS", 4)
    me, kept = identities[0].peer_id, history(tmp_path)
    for number in range(10):
        kept.add(row(number))
    swarm = MemorySwarm(**{me: given(kept, identities[0])})
    asked = ask_history(swarm.client(), [me], RUN, MANIFEST)
    assert asyncio.run(asked) == ToldHistory([row(number) for number in range(10)], {})
    assert [want["after"] for _, want in swarm.asked] == [FIRST, 3, 7]


def test_that_a_bootstrap_gives_no_history_is_said_once_and_once_that_it_does(
    tmp_path: Path, identities: list[Identity], caplog: pytest.LogCaptureFixture
) -> None:
    me, kept = identities[0].peer_id, history(tmp_path)
    kept.add(row(0))

    gives = {me: given(kept, identities[0])}
    silent = set[str]()
    with caplog.at_level("INFO", logger="dilocox.peer.chain.round_history"):
        for finds in ({}, {}, {}, gives, gives):
            client = MemorySwarm(**finds).client()
            asyncio.run(ask_history(client, [me], RUN, MANIFEST, silent=silent))
    assert [record.getMessage() for record in caplog.records] == [
        f"no history from bootstrap {me[-6:]} yet: it is gone",
        f"bootstrap {me[-6:]} gives its history now",
    ]


def test_a_bootstrap_of_an_older_version_and_one_that_is_gone_are_passed_over(
    tmp_path: Path, identities: list[Identity]
) -> None:
    me, kept = identities[0].peer_id, history(tmp_path)
    kept.add(row(0))

    def gone(_want: object) -> Any:
        raise ConnectionError("gone")

    swarm = MemorySwarm(**{"old": lambda want: None, "gone": gone, me: given(kept, identities[0])})
    peers = ["old", "gone", me]
    assert asyncio.run(ask_history(swarm.client(), peers, RUN, MANIFEST)) == ToldHistory(
        [row(0)], {}
    )
    assert asyncio.run(ask_history(swarm.client(), peers[:2], RUN, MANIFEST)) == ToldHistory([], {})


def test_what_another_key_signed_or_what_was_changed_is_refused(
    tmp_path: Path, identities: list[Identity]
) -> None:
    kept = history(tmp_path)
    kept.add(row(0, validation=2.5))
    told, me = blob(kept, identities[0]), identities[0].peer_id
    assert checked_page(told, me, RUN, FIRST) == (ToldHistory([row(0, validation=2.5)], {}), False)
    changed = Blob(facts=told.facts, data=told.data.replace(b"2.5", b"1.5"))
    for other, peer in (
        (told, identities[1].peer_id),
        (changed, me),
        (Blob(facts={}, data=told.data), me),
        (Blob(facts={"signature": "text"}, data=told.data), me),
    ):
        with pytest.raises(CallRefused, match="not signed"):
            checked_page(other, peer, RUN, FIRST)
    for run, after in (("f" * 32, FIRST), (RUN, 7)):  # of another run, to another question
        with pytest.raises(CallRefused, match="no answer"):
            checked_page(told, me, run, after)


def test_what_the_model_wrote_goes_with_the_page_the_newest_in_any_case(
    tmp_path: Path, identities: list[Identity]
) -> None:
    kept, me = history(tmp_path), identities[0].peer_id
    made = {n: ModelSample(n, 0, 100 * n, NOW, "Once", f" upon {n}") for n in (2, 5)}
    for number in range(9):
        kept.add(row(number))
    for each in made.values():
        kept.keep_sample(each)
    answers = MemorySwarm(**{me: given(kept, identities[0])})

    def told(after: int) -> ToldHistory:
        asked = ask_history(answers.client(), [me], RUN, MANIFEST, after, witness=me)
        return asyncio.run(asked)

    other = asyncio.run(ask_history(answers.client(), [me], RUN, MANIFEST, witness="another"))
    assert other.samples == {}, "the operator's bootstrap alone asks the model"
    assert (told(FIRST).samples, told(3).samples, told(8).samples) == (
        made,
        {5: made[5]},
        {5: made[5]},
    )
    assert history(tmp_path).samples() == list(made.values()), "a new start has them"


def test_a_keeper_says_how_large_the_model_is_and_what_it_writes_now(
    tmp_path: Path, identities: list[Identity]
) -> None:
    kept, me = history(tmp_path), identities[0].peer_id
    keeper = HistoryKeeper(kept, identities[0], RUN, 2, lambda: NOW)
    assert keeper.written("Once") == ""
    kept.add(row(0))
    kept.keep_sample(ModelSample(0, 0, 100, NOW, "Once", " upon\na \x1b[31mtime " + "x" * 200))
    written = keeper.written("Once")
    assert written.startswith('"Once" with "upon a [31mtime xxx') and len(written) < 120
    assert keeper.written("Another") == "", "the operator has changed the prompt"
    foxes = "\U0001f98a" * 200  # four bytes each: the claim still fits
    kept.keep_sample(ModelSample(1, 0, 2**53, NOW, foxes, foxes))
    claim = replace(claim_record(2**53, "a" * 64, 2**53), record_bytes=2**53)
    replace(claim, rules=2**53, revision=2**53, written=keeper.written(foxes)).encode()
    numbers: list[int | None] = []
    for stage in range(2):
        keeper.parameters[stage] = 7
        source = keeper.page(FIRST)
        page = Blob(facts=source.facts, data=source.file.read())
        numbers.append(checked_page(page, me, RUN, FIRST)[0].parameters)
    assert numbers == [None, 14], "while a stage is not open it is not known"


@pytest.mark.parametrize(
    "rows",
    [
        "7",
        '[["x"]]',
        '[[0,0,"",NaN,1]]',
        '[[0,0,"",1e400,1]]',
        '[[0,0,"nohex",1,1]]',
        '[[0,0,"",1,1,1e5]]',
        '[[0,0,"",1,1,2.0,null,null,null,null,null,null,2.1,2.2]]',  # no range of that
        '[], "names": 7',
        '[], "names": [["../x", "Ada", ""]]',
        '[], "names": [["QmA", 7, ""]]',
        "[" * 5000 + "]" * 5000,
        f"[{json.dumps(row(1))},{json.dumps(row(0))}]",
        f"[{json.dumps(row(1))},{json.dumps(row(1))}]",
    ],
)
def test_nonsense_is_refused_even_where_it_is_signed(identities: list[Identity], rows: str) -> None:
    data = f'{{"run": "{RUN}", "after": -2, "more": false, "rows": {rows}}}'.encode()
    signature = identities[0].sign(round_history.PURPOSE + data)
    with pytest.raises(CallRefused):
        checked_page(Blob({"signature": signature}, data), identities[0].peer_id, RUN, FIRST)


def test_columns_of_a_newer_version_are_passed_over() -> None:
    assert parsed_row([*row(3), "more", {}]) == row(3)


def test_others_fill_what_the_first_has_not_seen_and_contradict_it_nowhere() -> None:
    found: dict[int, HistoryRow] = {}
    merge(found, [row(0), row(1, at=None), row(3, validation=2.0)], MANIFEST)
    other = row(3, validation=9.0, digest="ab" * 8, train=1.0)
    merge(found, [row(1, validation=2.5), row(2), other, row(4)], MANIFEST)
    assert list(found.values()) == [
        row(0),
        row(1, validation=2.5),
        row(3, validation=2.0),
        row(2),
    ]


# ---- what a bootstrap writes ---------------------------------------------------------------------
class Bootstrap:
    """A keeper that is told of rounds and of what peers state."""

    def __init__(self, folder: Path, identity: Identity):
        self.now = NOW
        self.chain: list[ChainRound] = []
        self.hosts = [{peer_id(100 * stage): stage_record()} for stage in range(2)]
        self.folder, self.identity = folder, identity
        self.start()

    def start(self) -> None:
        self.history = history(self.folder)
        self.keeper = HistoryKeeper(self.history, self.identity, RUN, 2, lambda: self.now)

    def hear(self, **stated: Any) -> None:
        told = replica_record(members=(peer_id(0), peer_id(100)), **stated)
        claims = {
            stage: claim_record(last.round, last.digest)
            for stage in range(2)
            for last in self.chain[-1:]
        }
        self.keeper.hear(self.hosts, {peer_id(0): told}, claims)

    def commit(self, number: int, after_s: float = 10.0, *, branch: str = "") -> None:
        self.now += after_s
        self.chain.append(committed(number, 1000 * (number + 1), branch, [peer_id(0)]))
        self.keeper.credit(0, self.since)
        self.keeper.take(self.since)

    def since(self, known: Collection[str], most: int) -> list[ChainRound]:
        found: list[ChainRound] = []
        for each in reversed(self.chain):
            if len(found) == most or any(name and each.digest.startswith(name) for name in known):
                break
            found.insert(0, each)
        return found

    def rows(self) -> list[HistoryRow]:
        return self.history.newest(99)


@pytest.fixture
def bootstrap(tmp_path: Path, identities: list[Identity]) -> Bootstrap:
    return Bootstrap(tmp_path, identities[0])


def test_a_row_says_when_a_round_came_and_what_was_stated_of_it(bootstrap: Bootstrap) -> None:
    for number in range(3):
        bootstrap.hear(round=number, train_loss=3.0 - number / 10, val_round=number - 1)
        bootstrap.commit(number)
        bootstrap.hear(round=number + 1, val_round=number - 1, train_loss=9.0)
    bootstrap.hear(round=3, train_loss=9.0, val_round=2, val_loss=2.25)
    initial, _, second, third = bootstrap.rows()
    assert (initial.round, initial.tokens, initial.validation) == (-1, 0, 2.4)
    assert (second.at, second.tokens, second.tokens_per_s) == (NOW + 20, 2000, 100.0)
    assert (second.peers, second.replicas, second.record_bytes, second.voids) == (2, 1, 2000, 0)
    assert (third.train, third.validation) == (2.8, 2.25)


def test_what_others_than_members_state_is_in_no_row(bootstrap: Bootstrap) -> None:
    stated = replica_record(members=(), round=1, val_round=0, val_loss=0.1, train_loss=0.1)
    told = {each: replace(stated, members=(each,)) for each in map(peer_id, (1, 2, 3))}
    bootstrap.hosts[0] |= dict.fromkeys(told, stage_record())
    bootstrap.commit(0)
    bootstrap.keeper.hear(bootstrap.hosts, told, {})
    bootstrap.hear(round=1, train_loss=3.0, val_round=0, val_loss=2.5)
    bootstrap.commit(1)
    first, second = bootstrap.rows()
    assert (first.validation, second.train) == (2.5, 3.0)


def test_a_row_has_the_range_of_its_heads_train_losses_but_for_absurd_ones(
    bootstrap: Bootstrap,
) -> None:
    heads = {peer_id(n): loss for n, loss in enumerate((2.0, 2.25, 2.5, 9000.0))}
    bootstrap.hosts[0] = {head: stage_record() for head in heads}

    def hear(**heads: float) -> None:
        told = {
            peer: replica_record(members=(peer,), round=0, train_loss=loss)
            for peer, loss in heads.items()
        }
        bootstrap.keeper.hear(bootstrap.hosts, told, {})

    hear(**heads)
    hear(**{peer_id(3): 9000.0})  # the others are in the next round already
    bootstrap.commit(0)
    found = bootstrap.rows()[-1]
    assert (found.train_low, found.train, found.train_high) == (2.0, 2.25, 2.5)
    assert parsed_row(json.loads(json.dumps(found))) == found


def test_absurd_numbers_of_peers_are_no_part_of_it(bootstrap: Bootstrap) -> None:
    for loss in (1e300, -1e9):
        bootstrap.hear(round=0, train_loss=loss, val_loss=loss, val_round=-1)
    bootstrap.hear(round=2**53, val_round=2**53, train_loss=1.0, val_loss=1.0)
    bootstrap.hosts[0]["stranger"] = stage_record(voids=2**53)
    bootstrap.keeper.hear(bootstrap.hosts, {"stranger": replica_record(members=(peer_id(0),))}, {})
    bootstrap.commit(0)
    (found,) = bootstrap.rows()
    assert (found.train, found.validation, found.voids, found.replicas) == (None, None, 0, 0)


def test_voids_are_those_since_the_round_before(bootstrap: Bootstrap) -> None:
    bootstrap.hear()
    bootstrap.commit(0)
    for voids in (1, 2):
        bootstrap.hosts[0] = {peer_id(0): stage_record(voids=voids)}
        bootstrap.hear()
    bootstrap.commit(1)
    bootstrap.commit(2)
    assert [each.voids for each in bootstrap.rows() if each.round >= 0] == [0, 2, 0]


def test_rounds_that_came_while_it_was_away_have_no_time(bootstrap: Bootstrap) -> None:
    bootstrap.commit(0)
    bootstrap.start()
    bootstrap.keeper.take(bootstrap.since, claimed=False)  # what is on its disk
    bootstrap.chain += [committed(n, 1000 * (n + 1)) for n in (1, 2)]
    bootstrap.commit(3)
    bootstrap.commit(4)
    bootstrap.commit(5, after_s=5.0)
    found = bootstrap.rows()
    assert [each.round for each in found] == list(range(6))
    assert [each.round for each in found if each.at is None] == [1, 2, 3]
    assert [each.tokens_per_s for each in found[-2:]] == [None, 200.0]


def test_rounds_that_are_found_together_have_no_throughput(bootstrap: Bootstrap) -> None:
    bootstrap.chain.append(committed(0, 1000))
    bootstrap.commit(1)
    bootstrap.commit(2, after_s=0.1)
    assert [each.tokens_per_s for each in bootstrap.rows()] == [None, None, None]
    assert all(each.at is not None for each in bootstrap.rows())


def test_the_throughput_of_rounds_that_are_found_together_is_that_of_all(
    bootstrap: Bootstrap,
) -> None:
    bootstrap.commit(0)
    bootstrap.chain += [committed(n, 1000 * (n + 1)) for n in (1, 2)]
    bootstrap.commit(3, after_s=10.0)
    assert [each.tokens_per_s for each in bootstrap.rows()] == [None, 300.0, 300.0, 300.0]


@pytest.mark.parametrize(("after_s", "followed"), [(10.0, True), (3600.0, False)])
def test_many_rounds_at_once_were_not_followed_either_if_the_last_one_is_long_ago(
    bootstrap: Bootstrap, after_s: float, followed: bool
) -> None:
    bootstrap.commit(0)
    bootstrap.chain += [committed(n) for n in range(1, LIVE_ROUNDS + 1)]
    bootstrap.commit(LIVE_ROUNDS + 1, after_s=after_s)
    assert [each.at is not None for each in bootstrap.rows()[1:]] == [followed] * (LIVE_ROUNDS + 1)


def test_a_round_takes_few_lines_whatever_heads_say_again_and_again(bootstrap: Bootstrap) -> None:
    for number in range(2 * OPEN_ROUNDS):
        bootstrap.hear(round=number, val_round=number - 1, val_loss=2.49)
        bootstrap.commit(number)
        for step in range(50):
            bootstrap.hear(round=number, val_round=number, val_loss=2.0 + step / 100)
    lines = (bootstrap.folder / "history.jsonl").read_text().splitlines()
    assert len(lines) <= 3 * 2 * OPEN_ROUNDS + 2
    assert all(each.validation is not None for each in bootstrap.rows())


def test_after_a_rollback_nothing_of_the_rounds_before_it_comes_in_again(
    bootstrap: Bootstrap,
) -> None:
    for number in range(4):
        bootstrap.hear(round=number, train_loss=2.0)
        bootstrap.commit(number)
    later = back_to(MANIFEST, 1, [digest(0, 1), digest(1, 1)])
    bootstrap.keeper.revise(later)
    bootstrap.keeper.take(bootstrap.since)  # the archive has not gone back yet
    assert [each.round for each in bootstrap.rows()] == [0, 1]
    rules = later.operation.rules
    after = replace(committed(4, 3000), rules=rules)
    bootstrap.keeper.take(lambda *_: [after])
    newest = bootstrap.rows()[-1]
    assert (newest.round, newest.rules, newest.tokens) == (4, rules, 3000)
    assert newest.train is None


# ---- names ---------------------------------------------------------------------------------------
def test_names_of_those_in_records_are_kept_when_their_peers_are_gone(bootstrap: Bootstrap) -> None:
    one, stranger = peer_id(0), peer_id(7)
    bootstrap.hosts[0] |= {
        one: stage_record(name="Ada\n", team="F" * 99),
        stranger: stage_record(name="Ada", team="Foxes"),
    }
    bootstrap.hear()
    assert bootstrap.history.names() == []  # nobody is in a record yet
    bootstrap.commit(0)
    bootstrap.hear()
    kept = [NamedPeer(one, "Ada", 23 * "F" + "…")]
    assert bootstrap.history.names() == kept
    bootstrap.hosts = [{}, {}]
    bootstrap.hear()
    bootstrap.start()  # after a kill
    assert bootstrap.history.names() == kept
    # it moved, and its old record says an old name still
    bootstrap.hosts = [
        {one: stage_record(name="Old", state="left")},
        {one: stage_record(name="New")},
    ]
    for _ in range(2):
        bootstrap.hear()
    assert bootstrap.history.names() == [NamedPeer(one, "New")]
    lines = (bootstrap.folder / "history.jsonl").read_text().splitlines()
    assert sum(line.startswith('["') for line in lines) == 2
    bootstrap.hosts[1][one] = stage_record()
    bootstrap.hear()
    assert bootstrap.history.names() == [] == history(bootstrap.folder).names()


def test_those_of_all_stages_have_names_also_of_rounds_that_came_together(
    bootstrap: Bootstrap,
) -> None:
    bootstrap.hosts[1] = {peer_id(n): stage_record(name=f"peer {n}") for n in range(100, 105)}
    chain = [committed(n, peers=[peer_id(100 + n)]) for n in range(2)]
    bootstrap.keeper.credit(1, lambda known, most: chain[-most:])
    chain += [committed(n, peers=[peer_id(100 + n)]) for n in range(2, 4)]
    bootstrap.keeper.credit(1, lambda known, most: chain[2:] if chain[1].digest in known else [])
    bootstrap.hear()
    assert {each.name for each in bootstrap.history.names()} == {
        f"peer {n}" for n in range(100, 104)
    }


def test_of_too_many_names_those_go_whose_last_record_is_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_history, "MAX_NAMED", 3)
    monkeypatch.setattr(round_history, "SPARE_LINES", 10)
    kept, peers = history(tmp_path), [peer_id(number) for number in range(5)]
    kept.credit(peers[:3])
    kept.credit(peers[:1])
    kept.credit(peers[3:4])
    for number in range(99):
        kept.hear({peer: stage_record(name=f"{number}") for peer in peers})
    named = {peers[0], peers[2], peers[3]}
    assert {each.peer for each in kept.names()} == named
    assert len((tmp_path / "history.jsonl").read_bytes().splitlines()) <= 4 * 3 + 11
    assert {each.peer for each in history(tmp_path).names()} == named


def test_the_witness_names_peers_and_others_only_those_that_it_does_not(
    tmp_path: Path, identities: list[Identity]
) -> None:
    finds = dict[str, Callable[[dict[str, Any]], Source]]()
    one, other = peer_id(1), peer_id(2)
    for identity, names in zip(
        identities, ({one: "Ada"}, {one: "Eve", other: "Bob"}), strict=False
    ):
        kept = history(tmp_path / identity.peer_id)
        kept.credit(names)
        kept.hear({peer: stage_record(name=name) for peer, name in names.items()})
        finds[identity.peer_id] = given(kept, identity)
    client, peers = MemorySwarm(**finds).client(), list(finds)
    found = asyncio.run(ask_history(client, peers, RUN, MANIFEST))
    assert found == ToldHistory([], {one: NamedPeer(one, "Ada"), other: NamedPeer(other, "Bob")})
    assert asyncio.run(ask_history(client, peers, RUN, MANIFEST, after=3)).names == {}


def test_an_answer_of_a_version_without_names_is_read(identities: list[Identity]) -> None:
    data = f'{{"run": "{RUN}", "after": -2, "more": false, "rows": [[0,0,"",1,1]]}}'.encode()
    signature = identities[0].sign(round_history.PURPOSE + data)
    found, _ = checked_page(Blob({"signature": signature}, data), identities[0].peer_id, RUN, FIRST)
    assert found == ToldHistory([HistoryRow(0, 0, "", 1.0, 1)], {})


# ---- over a real connection ----------------------------------------------------------------------
def test_a_keeper_gives_its_history_to_whoever_asks_over_the_network(
    tmp_path: Path, identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive is one that is told; all else is what a bootstrap runs."""
    identity, chain = identities[0], [committed(0, 1000)]

    async def done(*_: object, **__: object) -> None:
        pass

    archive = SimpleNamespace(
        tend=done,
        close=done,
        claim=chain[0],
        round=0,
        rounds_since=lambda *_: chain,
        knows=lambda _: False,
    )
    monkeypatch.setattr(archive_keeper, "StageArchive", lambda *_, **__: archive)
    kept = HistoryKeeper(history(tmp_path), identity, RUN, 1, lambda: NOW)
    manifest = manifest_of(1)
    keeper = Keeper(RUN, identity.peer_id, identity.peer_id, manifest, tmp_path, kept)
    (tmp_path / "stage0").mkdir()

    async def run() -> ToldHistory:
        own = await P2P.create(identity_path=str(identity.path), startup_timeout=60)
        other = await P2P.create(initial_peers=await own.get_visible_maddrs(), startup_timeout=60)
        try:
            await asyncio.to_thread(keeper.start, own.daemon_listen_maddr)
            client = Client(
                p2p=other,
                namespace=averaging_prefix(RUN, 0),
                record_bytes=0,
            )
            deadline = time.monotonic() + 60
            found = ToldHistory([], {})
            while not found.rows and time.monotonic() < deadline:
                found = await ask_history(client, [identity.peer_id], RUN, manifest)
            return found
        finally:
            await asyncio.to_thread(keeper.close)
            await other.shutdown()
            await own.shutdown()

    found = asyncio.run(run()).rows
    assert [(each.round, each.tokens, each.at) for each in found] == [(0, 1000, NOW)]
    assert keeper.served["record"] > 100
