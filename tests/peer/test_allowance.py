"""When a peer rests: paused, outside its hours, over the month's traffic; and until when."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.peer.options import GB, Hours, next_month
from dilocox.peer.process.resting import MonthlyTraffic, Rest, month_of, rest_now

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


def test_without_spans_all_hours_will_do() -> None:
    assert Hours.parse([]) is None


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
    ],
)
def test_the_next_start_is_the_hour_itself(now: str, start: str | None) -> None:
    found = hours("22-6").next_start(at(now), local)
    assert found == (None if start is None else at(start))


def test_the_next_start_can_be_tomorrow_and_is_the_same_whenever_it_is_asked() -> None:
    asked = [at("2026-12-31 12:00:00") + seconds for seconds in (0.0, 0.1, 7.3, 3599.99)]
    assert {hours("8-12").next_start(now, local) for now in asked} == {at("2027-01-01 08:00")}


def test_on_a_day_that_leaves_the_only_hour_out_it_is_the_next_days() -> None:
    """In spring the clock goes from 2:00 to 3:00."""
    change = datetime(2026, 3, 29, 1, tzinfo=timezone.utc).timestamp()

    def berlin(seconds: float) -> datetime:
        offset = timedelta(hours=1 if seconds < change else 2)
        return datetime.fromtimestamp(seconds, timezone(offset))

    start = hours("2-3").next_start(change - 1800, berlin)
    assert start is not None and berlin(start).isoformat() == "2026-03-30T02:00:00+02:00"


# ---- which reason --------------------------------------------------------------------------------
def rest(
    now: str, *, paused: bool = False, used: float = 0, limit: float | None = None
) -> Rest | None:
    return rest_now(
        at(now),
        paused=paused,
        hours=hours("22-6"),
        used_bytes=int(used * GB),
        limit_bytes=None if limit is None else limit * GB,
        local=local,
    )


def test_a_peer_rests_for_the_reason_that_lasts_longest() -> None:
    noon, night = "2026-11-20 12:00", "2026-11-20 23:00"
    assert rest(night) is None
    assert rest(night, used=4.9, limit=5) is None
    assert rest(night, used=500) is None
    found = [
        rest(noon),
        rest(noon, used=5, limit=5),
        rest(night, used=5, limit=5),
        rest(night, paused=True),
        rest(noon, paused=True, used=5, limit=5),
    ]
    assert [each and each.reason for each in found] == [
        "hours",
        "traffic",
        "traffic",
        "paused",
        "paused",
    ]
    assert [each and each.until for each in found] == [
        at("2026-11-20 22:00"),
        utc("2026-12-01"),
        utc("2026-12-01"),
        None,
        None,
    ]


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


def test_traffic_counts_for_the_month_in_which_it_was_seen(tmp_path: Path) -> None:
    kept = MonthlyTraffic(tmp_path / "traffic.json")
    last, first = utc("2026-11-30 23:59:59"), utc("2026-12-01")
    kept.count(110, last)
    kept.count(115, last)
    assert kept.used_bytes(last) == 115
    assert kept.used_bytes(first) == 0
    kept.count(118, first, last=True)
    assert (kept.used_bytes(last), kept.used_bytes(first)) == (115, 3)
    assert json.loads((tmp_path / "traffic.json").read_text()) == {
        "2026-11": 115,
        "2026-12": 3,
    }


def test_a_new_process_counts_from_zero_on_top_of_what_was_kept(tmp_path: Path) -> None:
    now = utc("2026-11-20")
    for total in (115, 230):
        kept = MonthlyTraffic(tmp_path / "traffic.json")
        kept.count(115, now, last=True)
        assert kept.used_bytes(now) == total


def test_the_file_is_written_at_most_once_a_minute(tmp_path: Path) -> None:
    path, begin = tmp_path / "traffic.json", utc("2026-11-20")
    kept = MonthlyTraffic(path)
    for second, total, expected in ((0, 1, 1), (1, 2, 1), (59, 3, 1), (60, 4, 4), (61, 5, 4)):
        kept.count(total, begin + second)
        on_disk = MonthlyTraffic(path).used_bytes(begin)
        assert (kept.used_bytes(begin), on_disk) == (total, expected)
    kept.count(6, begin)  # the clock was set back
    assert MonthlyTraffic(path).used_bytes(begin) == 6


def test_a_damaged_file_is_named_with_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    for text in ("{", "[]", '{"2026-11": "x"}', '{"2026-11": {}}'):
        path.write_text(text)
        with pytest.raises(EnvironmentFault, match=r"traffic\.json: .* remove the file"):
            MonthlyTraffic(path)
