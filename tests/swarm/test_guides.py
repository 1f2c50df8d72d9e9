"""A new operator and new volunteers, with the guides alone, get a swarm that trains and is watched.

Each has a machine of their own (a network namespace) and types exactly what docs/operator.md and
docs/volunteer.md say; nothing else starts anything. What they fill in is their machine's address
and the invite that the bootstrap printed. Two stories, because two cores are not for one of all.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.dht.processes import wait_until
from tests.guide_blocks import Block, blocks, unseen
from tests.swarm.browser import chromium, show
from tests.swarm.links import Links, available
from tests.swarm.people import Person, Terminal, Transcript

STAGES, REPLICAS = 3, 2
ROUNDS = 2
TYPED_LIMIT_S = 120.0
ROUNDS_LIMIT_S = 240.0
LOOK_LIMIT_S = 60.0
CHANGE_LIMIT_S = 120.0

# What nobody can type on a machine without internet: pip needs a package index (`dilocox` is that
# of this environment), and there is no registry to pull from (docker/test-image.sh runs the image).
NOT_TYPED = {
    "operator": {"Install", "In containers"},
    "volunteer": {"Install", "In a container"},
}
WATCHED = {
    "operator": {
        "Describe the run",
        "Start the bootstrap",
        "Keep the key",
        "Invite volunteers",
        "Watch",
        "Prometheus and Grafana",
        "Look into the rounds",
        "Get the model",
        "Talk to the model",
    },
    "volunteer": {"Ask the doctor", "Start"},
}
OPERATED = {
    "operator": {"A second bootstrap", "Change, pause and end a run"},
    "volunteer": {"Ports", "Limits", "Pause", "Your name", "See what you gave"},
}

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(900)]


class Town:
    """The people, and what they know from each other."""

    def __init__(self, links: Links, folder: Path):
        self.transcript = Transcript(folder / "transcript.txt")
        people = [Person(host, links, folder, self.transcript) for host in range(links.hosts)]
        self.operator, self.volunteers = people[0], people[1:]
        self.values: dict[str, str] = {}

    def follow(self, person: Person, section: str) -> list[Terminal]:
        """A person types all commands of a section of their guide, one after the other."""
        return [
            person.type(block, self.values, TYPED_LIMIT_S) for block in of_section(person, section)
        ]

    def boot(self) -> Terminal:
        """Describe the run and start the bootstrap, which prints the invite; its terminal."""
        self.follow(self.operator, "Describe the run")
        (bootstrap,) = self.follow(self.operator, "Start the bootstrap")
        invite = re.search(r"dilocox:[0-9a-f]{32}@\S+", bootstrap.output)
        assert invite is not None
        self.values["INVITE"] = invite[0]
        return bootstrap

    def all_gone(self) -> None:
        """Nothing that anybody started is left."""
        for person in (self.operator, *self.volunteers):
            wait_until(lambda person=person: not person.left(), LOOK_LIMIT_S)

    def close(self) -> None:
        """For the end of a test, however it went."""
        for person in (*self.volunteers, self.operator):
            person.close()


def of_section(person: Person, section: str) -> list[Block]:
    """The commands under a heading of a person's guide."""
    found = [block for block in blocks(person.guide) if block.section == section]
    assert found, f"docs/{person.guide}.md has no command under {section!r}"
    return found


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Callable[[int], Town]]:
    """`town(volunteers)`: machines for them and the operator."""
    if reason := available():
        pytest.skip(reason)
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian's package is called prometheus)")
    opened: list[tuple[Links, Town]] = []

    def make(volunteers: int) -> Town:
        links = Links(1 + volunteers).__enter__()
        opened.append((links, Town(links, tmp_path)))
        return opened[-1][1]

    yield make
    for links, made in opened:
        made.close()
        links.close()
        print("\n" + made.transcript.path.read_text())


def test_every_command_of_the_guides_is_typed_or_named_with_the_reason() -> None:
    for guide in ("operator", "volunteer"):
        found = {block.section for block in blocks(guide)}
        typed = WATCHED[guide] | OPERATED[guide]
        assert found == typed | NOT_TYPED[guide]
        assert not typed & NOT_TYPED[guide]


def test_the_guides_lead_from_nothing_to_a_watched_swarm(town: Callable[[int], Town]) -> None:
    here = town(STAGES * REPLICAS)
    operator, volunteers = here.operator, here.volunteers
    bootstrap = here.boot()
    here.follow(operator, "Keep the key")
    here.follow(operator, "Invite volunteers")

    here.follow(volunteers[0], "Ask the doctor")
    peers = [here.follow(person, "Start")[-1] for person in volunteers]
    (monitor,) = here.follow(operator, "Watch")
    prometheus = here.follow(operator, "Prometheus and Grafana")[-1]
    for peer in peers:
        peer.wait_for_rounds(ROUNDS, ROUNDS_LIMIT_S)
    _check_the_page(operator)
    _check_prometheus(operator)
    here.follow(operator, "Look into the rounds")
    here.follow(operator, "Get the model")
    served = here.follow(operator, "Talk to the model")[0]
    _check_the_chat(operator)
    seen = "".join(peer.output for peer in peers)
    assert unseen(peers[0].block.later, seen) == []

    for peer in peers:
        peer.interrupt()
    for peer in peers:
        assert peer.ended() == 0, peer.output[-2000:]
    for terminal in (served, monitor, prometheus, bootstrap):
        terminal.interrupt()
        assert terminal.ended() == 0, terminal.output[-2000:]
    here.all_gone()


def test_a_run_is_operated_as_the_guides_say(town: Callable[[int], Town]) -> None:
    here = town(STAGES + 1)
    operator, first, second, third, friend = here.operator, *here.volunteers
    bootstrap = here.boot()
    friend.guide, friend.name = "operator", "friend"
    (copy,) = here.follow(friend, "A second bootstrap")
    peers = [
        here.follow(first, "Start")[0],
        here.follow(second, "Ports")[0],
        here.follow(third, "Limits")[0],
    ]
    for peer in peers:
        peer.wait_for_rounds(1, ROUNDS_LIMIT_S)

    paused, resumed = of_section(third, "Pause")
    third.type(paused, here.values, TYPED_LIMIT_S)
    peers[2].wait_for("resting: paused", CHANGE_LIMIT_S)
    third.type(resumed, here.values, TYPED_LIMIT_S)
    peers[2].wait_for("going on", CHANGE_LIMIT_S)

    peers[0].interrupt()
    assert peers[0].ended() == 0
    peers[0] = here.follow(first, "Your name")[0]
    # one to go back from, at least; who is a spare now names rounds only now and then
    wait_until(lambda: max(peer.rounds for peer in peers) >= 3, ROUNDS_LIMIT_S)
    told = "".join(each.output for each in here.follow(first, "See what you gave"))
    assert "(name Ada's laptop, team Foxes)" in told

    words = ("pauses", "resumes", "new values", "goes back to round 1", "ends the run")
    commands = of_section(operator, "Change, pause and end a run")
    for block, word in zip(commands, words, strict=True):
        operator.type(block, here.values, TYPED_LIMIT_S)
        for peer in peers:
            peer.wait_for(f"of the manifest: {_said(word)}", CHANGE_LIMIT_S)
        if word.startswith("goes back"):  # all go on, before the run ends
            for peer in peers:
                peer.wait_for_rounds(peer.rounds + 1, ROUNDS_LIMIT_S)
    for peer in peers:
        assert peer.ended(CHANGE_LIMIT_S) == 0, peer.output[-2000:]
    for terminal in (bootstrap, copy):
        terminal.interrupt()
        assert terminal.ended() == 0, terminal.output[-2000:]
    here.all_gone()


def _said(word: str) -> str:
    return word if word == "new values" else f"the operator {word}"


def _check_the_page(operator: Person) -> None:
    """The status page shows all stages and replicas, training."""

    def there() -> bool:
        status = json.loads(operator.ask("http://127.0.0.1:9470/status.json"))
        stages = status.get("stages", [])
        return (
            status.get("health", {}).get("state") == "training"
            and status["totals"]["replicas"] == REPLICAS
            and [len(stage["peers"]) for stage in stages] == [REPLICAS] * STAGES
            and all(stage["rounds"] >= ROUNDS for stage in stages)
        )

    wait_until(there, LOOK_LIMIT_S)
    page = operator.ask("http://127.0.0.1:9470/").decode()
    assert '<h1 id="name">' in page
    if chromium() is not None:
        shown = show("http://127.0.0.1:9470/", within=operator.links.command(operator.host, []))
        assert shown.console == ()
        assert shown.text("name") == "first-run" and shown.text("health") == "Training"
        assert shown.count('class="replica"') == REPLICAS


def _check_the_chat(operator: Person) -> None:
    """The page names the run and the round that answers."""
    (model,) = json.loads(operator.ask("http://127.0.0.1:9480/v1/models"))["data"]
    assert model["id"] == "first-run" and model["round"] >= 0
    if chromium() is not None:
        shown = show("http://127.0.0.1:9480/", within=operator.links.command(operator.host, []))
        assert shown.console == () and shown.text("name") == "first-run"
        assert shown.text("round").startswith("round ")


def _check_prometheus(operator: Person) -> None:
    """It has scraped what the guide says, and no alert is up."""

    def query(expr: str) -> dict[tuple[str, ...], float]:
        url = f"http://127.0.0.1:9090/api/v1/query?query={quote(expr)}"
        rows = json.loads(operator.ask(url))["data"]["result"]
        return {tuple(sorted(row["metric"].values())): float(row["value"][1]) for row in rows}

    def there() -> bool:
        training = query('sum by (stage) (dilocox_swarm_peers{state="training"})')
        return (
            list(query('up{job=~"monitor|bootstrap"}').values()) == [1.0, 1.0]
            and list(training.values()) == [float(REPLICAS)] * STAGES
        )

    wait_until(there, LOOK_LIMIT_S)
    assert query("ALERTS") == {}
