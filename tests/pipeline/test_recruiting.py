"""A head asks the right peers in the right order, and finds out who is missing."""

from __future__ import annotations

from typing import Any

import pytest

from dilocox.dht.records import StageRecord
from dilocox.pipeline.frames import Frame
from dilocox.pipeline.messages import Fault
from dilocox.pipeline.recruiting import AVOID_S, UNBOUNDED, Recruiter, Replica
from dilocox.pipeline.reservation import Assignment, Reservation
from tests.pipeline.swarms import stage_record
from tests.pipeline.wires import LIMITS, Box, Wires


class Town:
    """Reservations that answer, records of them, and a recruiter of the head `me`."""

    stages = 3

    def __init__(self) -> None:
        self.wires = Wires(LIMITS)
        self.records: dict[int, dict[str, StageRecord]] = {}
        self.reservations: dict[str, Reservation] = {}
        self.asked: list[str] = []
        self.wires.on_request = lambda _, peer, frame: self.asked.append(f"{frame.kind} {peer}")
        self.recruiter = self.recruiter_of("me")

    def recruiter_of(self, me: str) -> Recruiter:
        box = Box(self.wires, me, 0, lambda _, __: Frame(kind="no"))
        self.wires.boxes[me] = box
        return Recruiter(
            me=me,
            num_stages=self.stages,
            network=box,
            records=lambda: self.records,
            clock=self.wires.monotonic,
        )

    def add(
        self, peer: str, stage: int, *, distance_s: float = 0.01, window: object = 9, **record: Any
    ) -> Reservation:
        reservation = Reservation(
            me=peer,
            stage=stage,
            num_stages=self.stages,
            clock=self.wires.monotonic,
            on_change=lambda: None,
        )
        reservation.open({"window": window})
        self.reservations[peer] = reservation
        self.wires.boxes[peer] = Box(self.wires, peer, stage, reservation.answer)
        self.wires.boxes[peer].distance_s = distance_s
        self.records.setdefault(stage, {})[peer] = stage_record(**record)
        return reservation

    def recruit(self, replica: Replica) -> str:
        self.asked.clear()
        vacant = set(range(self.stages)) - set(replica.members)
        return self.recruiter.recruit(replica, vacant)

    def assign(self, replica: Replica) -> None:
        """Begin the next epoch, as a head does."""
        self.recruiter.epoch += 1
        stages = range(self.stages)
        assignment = Assignment(
            replica="me",
            epoch=self.recruiter.epoch,
            head="me",
            members=tuple(replica.members[k] for k in stages),
            clients=tuple(replica.clients[k] for k in stages),
            codecs=("fp32",) * (self.stages - 1),
            step=0,
            done=None,
        )
        facts = assignment.to_facts()
        answers = self.recruiter.ask_all(replica.others.values(), "assign", facts)
        assert all(answer and answer.frame.kind == "yes" for answer in answers.values())
        assert all(self.reservations[peer].take_assignment() for peer in replica.others.values())


@pytest.fixture
def town() -> Town:
    return Town()


def replica(*, client: bool = False) -> Replica:
    return Replica(members={0: "me"}, clients={0: client}, codecs=("fp32", "fp32"), window=4)


class TestOrder:
    def test_all_are_pinged_once_and_the_nearest_asked_first(self, town: Town) -> None:
        town.add("far", 1, distance_s=0.3)
        town.add("near", 1, distance_s=0.01)
        town.add("last", 2)
        ours = replica()
        assert town.recruit(ours) == ""
        assert ours.members == {0: "me", 1: "near", 2: "last"}
        assert sorted(town.asked[:3]) == ["ping far", "ping last", "ping near"]
        assert town.asked[3:] == ["reserve near", "reserve last"]
        assert town.reservations["near"].state == "reserved"
        assert town.reservations["far"].state == "free"
        town.recruiter.ask_all(ours.others.values(), "release")
        town.recruit(replica())
        assert town.asked == ["reserve near", "reserve last"], "distances are remembered"

    def test_the_next_is_asked_when_one_refuses(self, town: Town) -> None:
        town.add("near", 1, distance_s=0.01).shut("it leaves")
        town.add("far", 1, distance_s=0.3)
        town.add("last", 2)
        ours = replica()
        assert town.recruit(ours) == ""
        assert ours.members[1] == "far"
        assert town.asked[-3:] == ["reserve near", "reserve far", "reserve last"]

    def test_only_vacant_stages_are_filled(self, town: Town) -> None:
        town.add("one", 1)
        town.add("two", 2)
        ours = replica()
        town.recruit(ours)
        town.assign(ours)
        town.add("new", 2)
        town.wires.kill("two", flushed=False)
        del ours.members[2]
        assert town.recruit(ours) == ""
        assert ours.members == {0: "me", 1: "one", 2: "new"}
        assert not any(asked.endswith("one") for asked in town.asked)


class TestNobody:
    def test_what_was_reserved_stays_in_the_replica_to_be_released(self, town: Town) -> None:
        town.add("one", 1)
        town.add("two", 2).shut("it leaves")
        ours = replica()
        assert town.recruit(ours) == "stage 2 has no free peer"
        assert ours.others == {1: "one"}


class TestPeersThatOnlyDialOut:
    def test_a_head_of_their_kind_needs_a_neighbour_that_others_reach(self, town: Town) -> None:
        town.add("dials1", 1, distance_s=0.01, client_mode=True)
        town.add("dials2", 2, distance_s=0.01, client_mode=True)
        ours = replica(client=True)
        assert town.recruit(ours) == (
            "stage 1 has no free peer (1 can only dial out, like its neighbour)"
        )
        town.add("open1", 1, distance_s=0.2)
        assert town.recruit(ours) == ""
        assert ours.members == {0: "me", 1: "open1", 2: "dials2"}

    def test_one_that_was_reserved_gives_way_when_its_neighbour_refuses(self, town: Town) -> None:
        town.add("dials1", 1, distance_s=0.01, client_mode=True)
        town.add("open1", 1, distance_s=0.2)
        town.add("open2", 2, distance_s=0.01).shut("it leaves")
        town.add("dials2", 2, distance_s=0.2, client_mode=True)
        ours = replica()
        assert town.recruit(ours) == ""
        assert ours.members == {0: "me", 1: "open1", 2: "dials2"}
        assert ours.clients == {0: False, 1: False, 2: True}
        assert town.reservations["dials1"].state == "free"
        assert "release dials1" in town.asked


class TestAvoiding:
    def test_who_gives_no_answer_is_left_alone_for_a_while(self, town: Town) -> None:
        town.add("dead", 1, distance_s=0.01)
        town.add("alive", 1, distance_s=0.2)
        town.add("last", 2)
        town.wires.kill("dead", flushed=False)
        ours = replica()
        assert town.recruit(ours) == ""
        assert ours.members[1] == "alive"
        assert "reserve dead" not in town.asked
        town.recruiter.ask_all(ours.others.values(), "release")
        town.recruit(replica())
        assert not any("dead" in asked for asked in town.asked)
        town.wires.now += AVOID_S
        town.recruit(replica())
        assert "ping dead" in town.asked


class TestAnswers:
    def test_an_earlier_life_of_this_head_has_used_up_epochs(self, town: Town) -> None:
        town.add("one", 1)
        town.add("two", 2)
        ours = replica()
        town.recruit(ours)
        town.recruiter.epoch = 41
        town.assign(ours)
        town.recruiter = town.recruiter_of("me")
        again = replica()
        assert town.recruit(again) == ""
        assert town.recruiter.epoch == 42
        town.assign(again)
        assert town.reservations["one"].assignment is not None
        assert town.reservations["one"].assignment.epoch == 43

    @pytest.mark.parametrize(("told", "limit"), [(3, 3), (0, UNBOUNDED), ("many", UNBOUNDED)])
    def test_windows_are_limited_by_those_that_say_so(
        self, town: Town, told: object, limit: int
    ) -> None:
        town.add("one", 1, window=told)
        town.add("two", 2, window=UNBOUNDED)
        ours = replica()
        assert ours.limit == UNBOUNDED
        town.recruit(ours)
        assert ours.limit == limit


class TestMissing:
    def standing(self, town: Town) -> Replica:
        town.add("one", 1)
        town.add("two", 2)
        ours = replica()
        town.recruit(ours)
        town.assign(ours)
        return ours

    def fault(self, stage: int, seen_by: int) -> Fault:
        return Fault(stage=stage, seen_by=seen_by, reason="closed", after_s=0.1)

    def test_are_all_that_give_no_answer_whoever_was_blamed(self, town: Town) -> None:
        ours = self.standing(town)
        town.wires.kill("two", flushed=False)
        assert town.recruiter.missing(ours, self.fault(1, 0)) == {2}
        town.wires.freeze("one")
        assert town.recruiter.missing(ours, self.fault(1, 0)) == {1, 2}

    def test_and_those_that_have_left_but_they_may_be_asked_again_at_once(self, town: Town) -> None:
        ours = self.standing(town)
        town.reservations["one"].leave("me")
        assert town.recruiter.missing(ours, self.fault(2, 1)) == {1}
        del ours.members[1]
        assert town.recruit(ours) == ""
        assert ours.members[1] == "one"

    def test_a_head_never_gives_up_itself(self, town: Town) -> None:
        ours = self.standing(town)
        for _ in range(3):
            assert town.recruiter.missing(ours, self.fault(0, 0)) == set()
