"""An invite survives copying, and what is wrong with one is said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.dht.errors import InvalidInput
from dilocox.dht.identity import Identity
from dilocox.dht.invite import Invite, bootstrap_address, listen_address, run_id

RUN = "0123456789abcdef" * 2
PEER = "12D3KooWEXWcUQWJ6amCxHKtPFrcNxgepcmy7YXo7tirWjgiJ9Fr"
FIRST = f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}"
SECOND = f"/dns4/boot.example.org/tcp/443/p2p/{PEER}"
SIXTH = f"/ip6/2001:db8::1/tcp/443/p2p/{PEER}"


def test_invite_reads_back_what_it_writes():
    invite = Invite(RUN, (FIRST, SECOND, SIXTH))
    assert Invite.parse(str(invite)) == invite
    assert Invite.parse(f"  {invite}\n") == invite


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "does not start with 'dilocox:'"),
        ("http://example.org", "does not start with 'dilocox:'"),
        (f"dilocox:{RUN}", "has no '@'"),
        (f"dilocox:{RUN[:-1]}@{FIRST}", "is not 32 hex digits"),
        (f"dilocox:{RUN.upper()}@{FIRST}", "is not 32 hex digits"),
        (f"dilocox:{RUN}@", "is not a TCP multiaddr"),
        (f"dilocox:{RUN}@{FIRST},", "is not a TCP multiaddr"),
        (f"dilocox:{RUN}@{FIRST.replace('tcp', 'udp')}", "is not a TCP multiaddr"),
        (f"dilocox:{RUN}@{FIRST.replace('31337', '70000')}", "is not a TCP multiaddr"),
        (f"dilocox:{RUN}@{FIRST[:-5]}", "is not a TCP multiaddr"),
        (f"dilocox:{RUN}@/ip4/203.0.113.7/tcp/31337", "is not a TCP multiaddr"),
        (f"dilocox:{RUN}@{FIRST.replace('203.0.113.7', 'ADDRESS')}", "'ADDRESS' is no IPv4"),
        (f"dilocox:{RUN}@{FIRST.replace('ip4', 'ip6')}", "'203.0.113.7' is no IPv6"),
        (f"dilocox:{RUN}@{SIXTH.replace('2001:db8::1', 'fe80::1%eth0')}", "is no IPv6"),
        (f"dilocox:{RUN}@{FIRST.replace('KooWE', 'KooWz')}", "damaged peer id; copy the whole"),
        (f"dilocox:{RUN}@{','.join([FIRST] * 17)}", "17 bootstrap addresses"),
    ],
)
def test_wrong_invite_is_refused_with_its_wrong_part(text: str, reason: str):
    with pytest.raises(InvalidInput, match=reason):
        Invite.parse(text)


@given(st.text(max_size=200))
def test_any_text_is_an_invite_or_a_users_mistake(text: str):
    for candidate in (text, f"dilocox:{RUN}@{text}"):
        try:
            Invite.parse(candidate)
        except InvalidInput as error:
            assert "\n" not in str(error)


def test_run_id_depends_on_operator_and_name(operator: Identity, stranger: Identity):
    run = run_id(operator.public_key, "demo")
    assert run == run_id(operator.public_key, "demo")
    assert len(run) == 32
    assert run != run_id(stranger.public_key, "demo")
    assert run != run_id(operator.public_key, "demo2")


def test_addresses_are_taken_apart():
    address = bootstrap_address(SIXTH)
    assert (address.host, address.port, address.peer_id) == ("2001:db8::1", 443, PEER)
    assert listen_address("/ip4/0.0.0.0/tcp/0").port == 0
