"""On slow links an exchange takes about the time and the bytes that arithmetic says, and training
hardly waits for it."""

from __future__ import annotations

import pytest

from tests.swarm.exchange_costs import SCHEMES, measure
from tests.swarm.links import available

STREAMS = 1.10  # bytes of the averaging streams for each of payload
WAITING = 0.02
# Beyond the bytes: some ways of 40 ms there and back, and codecs of four peers on two cores.
BESIDE_S = 3.0


@pytest.mark.swarm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCHEMES)
def test_an_exchange_on_slow_links_costs_what_its_payload_does(name: str) -> None:
    if reason := available():
        pytest.skip(reason)
    costs = measure(SCHEMES[name])
    print(
        f"\n{name}: payload {costs.payload_bytes / 1e3:,.0f} kB (fp16 "
        f"{costs.fp16_bytes / 1e3:,.0f}), streams {costs.overhead:.3f} of it, link "
        f"{costs.link_bytes / 1e3:,.0f} kB a round ({costs.burst_bytes / 1e3:,.0f} while "
        f"averaging); {costs.exchange_s:.2f} s, {costs.longest_s:.2f} at most, {costs.least_s:.2f} "
        f"for the bytes; waiting {costs.waiting:.2%}; rank {costs.rank:.1f}"
    )
    assert 1.0 <= costs.overhead <= STREAMS
    assert costs.least_s <= costs.exchange_s <= 1.25 * costs.least_s + BESIDE_S
    assert costs.waiting < WAITING
    assert costs.payload_bytes < costs.fp16_bytes / 3.5
    if SCHEMES[name]["scheme"] != "dense":
        assert costs.payload_bytes < costs.fp16_bytes / 12
