"""Names are texts of strangers: what people see of them is short, visible, and beside an id."""

from dilocox.dht.names import MAX_NAME, cut, shown_peer
from dilocox.dht.swarm_view import SwarmView
from tests.pipeline.swarms import stage_record

PEER = "12D3KooWEXWcUQWJ6amCxHKtPFrcNxgepcmy7YXo7tirWjgiJ9Fr"


def test_texts_of_peers_are_one_short_line():
    assert cut("a\nb\x1b[31m\u202ec") == "a b [31m c"
    assert cut(" a  b\u200b \ud800 ") == "a b"
    assert len(cut("x" * 1000)) == 120


def test_the_end_of_the_id_stands_beside_every_name():
    assert shown_peer(PEER) == "giJ9Fr"
    assert shown_peer(PEER, "Ada's laptop") == "Ada's laptop (giJ9Fr)"
    assert shown_peer(PEER, "\x1b\n") == "giJ9Fr"
    assert shown_peer(PEER, "x" * 99) == f"{'x' * (MAX_NAME - 1)}… (giJ9Fr)"


def test_a_view_shows_a_peer_of_any_stage_with_the_name_that_its_record_states():
    named = stage_record(state="training", name="Ada")
    view = SwarmView(me="me", stage={"peer-a": named}, stages={1: {"peer-b": named}})
    assert view.shown("peer-a") == "Ada (peer-a)"
    assert view.shown("peer-b") == "Ada (peer-b)"
    assert view.shown("peer-c") == "peer-c"
