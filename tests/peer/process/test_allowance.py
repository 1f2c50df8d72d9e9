"""When a peer rests: paused, outside its hours, over the month's traffic; and until when."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.peer.hours import Hours, next_month
from dilocox.peer.options import GB, PeerOptions
from dilocox.peer.process.resting import Allowance, Rest, month_of
from tests.peer.local_peers import INVITE

EAST = timezone(timedelta(hours=5, minutes=30))  # whose hours do not begin with those of UTC


def local(at: float) -> datetime:
    return datetime.fromtimestamp(at, EAST)


def at(text: str) -> float:
    """Seconds since the epoch of a local time."""
    return datetime.fromisoformat(text).replace(tzinfo=EAST).timestamp()


def utc(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc).timestamp()


def hours(*spans: str) -> Hours:
    parsed = Hours.parse(spans)
    assert parsed is not None
    return parsed


# ---- hours ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spans", "allowed"),
    [
        (["9-17"], range(9, 17)),
        (["22-6"], [*range(22, 24), *range(6)]),
        (["0-24"], range(24)),
        (["22-24"], [22, 23]),
        (["23-0"], [23]),
        (["9-12", "11-14", "20-21"], [*range(9, 14), 20]),
        (["22-6", "5-8"], [22, 23, *range(8)]),
    ],
)
def test_spans_are_hours_of_the_day_across_midnight_and_overlapping(
    spans: list[str], allowed: list[int]
) -> None:
    assert hours(*spans).allowed == set(allowed)
    assert Hours.parse([]) is None, "without spans all hours will do"


@pytest.mark.parametrize("span", ["", "9", "9-", "9-25", "24-6", "9-9", "-1-5", "22:30-6", "a-b"])
def test_a_span_that_is_none_is_named_with_what_to_give(span: str) -> None:
    with pytest.raises(InvalidInput, match=rf"--hours {span}: .*22-6") as caught:
        Hours.parse(["9-17", span])
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("now", "start"),
    [
        ("2026-11-20 22:00:00", None),
        ("2026-11-20 23:59:59.9", None),
        ("2026-11-21 05:59:59", None),
        ("2026-11-21 06:00:00", "2026-11-21 22:00"),
        ("2026-11-20 21:59:59.5", "2026-11-20 22:00"),
        ("2026-11-20 12:34:56.789", "2026-11-20 22:00"),
        ("2026-12-31 12:00:00", "2026-12-31 22:00"),
    ],
)
def test_the_next_start_is_the_hour_itself(now: str, start: str | None) -> None:
    found = hours("22-6").next_start(at(now), local)
    assert found == (None if start is None else at(start))


def test_on_a_day_that_leaves_the_only_hour_out_it_is_the_next_days() -> None:
    """In spring the clock goes from 2:00 to 3:00."""
    change = datetime(2026, 3, 29, 1, tzinfo=timezone.utc).timestamp()

    def berlin(seconds: float) -> datetime:
        offset = timedelta(hours=1 if seconds < change else 2)
        return datetime.fromtimestamp(seconds, timezone(offset))

    start = hours("2-3").next_start(change - 1800, berlin)
    assert start is not None and berlin(start).isoformat() == "2026-03-30T02:00:00+02:00"


# ---- which reason --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("now", "paused", "used", "limit", "reason", "until"),
    [
        ("2026-11-20 23:00", False, 4.9, 5, None, None),
        ("2026-11-20 23:00", False, 500, 0, None, None),
        ("2026-11-20 12:00", False, 0, 0, "hours", at("2026-11-20 22:00")),
        ("2026-11-20 12:00", False, 5, 5, "traffic", utc("2026-12-01")),
        ("2026-11-20 23:00", False, 5, 5, "traffic", utc("2026-12-01")),
        ("2026-11-20 23:00", True, 0, 0, "paused", None),
        ("2026-11-20 12:00", True, 5, 5, "paused", None),
    ],
)
def test_a_peer_rests_for_the_reason_that_lasts_longest(
    now: str,
    paused: bool,
    used: float,
    limit: float,
    reason: str | None,
    until: float | None,
    tmp_path: Path,
) -> None:
    options = PeerOptions(
        invite=INVITE, state=tmp_path, hours=hours("22-6"), monthly_traffic_gb=limit
    )
    allowance = Allowance(options, lambda: at(now), local)
    allowance.count(int(used * GB))
    if paused:
        (tmp_path / "paused").touch()
    rest: Rest | None = allowance.rest()
    assert (rest and rest.reason, rest and rest.until) == (reason, until)


# ---- months --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("now", "month", "following"),
    [
        ("2026-11-30 23:59:59", "2026-11", "2026-12-01"),
        ("2026-12-01 00:00:00", "2026-12", "2027-01-01"),
        ("2028-02-29 12:00:00", "2028-02", "2028-03-01"),
    ],
)
def test_months_are_those_of_utc(now: str, month: str, following: str) -> None:
    assert (month_of(utc(now)), next_month(utc(now))) == (month, utc(following))


class Kept(Allowance):
    """An allowance at a time that the test sets."""

    def __init__(self, folder: Path, now: float):
        self.now = now
        super().__init__(PeerOptions(invite=INVITE, state=folder), lambda: self.now)


def test_traffic_counts_for_the_month_in_which_it_was_seen(tmp_path: Path) -> None:
    last, first = utc("2026-11-30 23:59:59"), utc("2026-12-01")
    kept = Kept(tmp_path, last)
    kept.count(110)
    kept.count(115)
    assert kept.used_bytes == 115
    kept.now = first
    assert kept.used_bytes == 0
    kept.count(118, last=True)
    assert json.loads((tmp_path / "traffic.json").read_text()) == {"2026-11": 115, "2026-12": 3}
    again = Kept(tmp_path, first)  # a new process counts from zero on top of what was kept
    again.count(5, last=True)
    assert (again.used_bytes, Kept(tmp_path, last).used_bytes) == (8, 115)


def test_the_file_is_written_at_most_once_a_minute(tmp_path: Path) -> None:
    begin = utc("2026-11-20")
    kept = Kept(tmp_path, begin)
    for second, total, expected in ((0, 1, 1), (1, 2, 1), (59, 3, 1), (60, 4, 4), (61, 5, 4)):
        kept.now = begin + second
        kept.count(total)
        assert (kept.used_bytes, Kept(tmp_path, begin).used_bytes) == (total, expected)
    kept.now = begin  # the clock was set back
    kept.count(6)
    assert Kept(tmp_path, begin).used_bytes == 6


def test_a_damaged_file_is_named_with_the_fix(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"2026-11": "x"}', '{"2026-11": {}}'):
        (tmp_path / "traffic.json").write_text(text)
        with pytest.raises(EnvironmentFault, match=r"traffic\.json: .* remove the file"):
            Kept(tmp_path, 0.0)
