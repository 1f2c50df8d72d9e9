"""One end of a way between a host at home and a public one, without a swarm.

    python -m tests.swarm.nat_node public HOST
    python -m tests.swarm.nat_node home ADDRESS_OF_THE_OTHER

The public end prints its address, then once a second whether it can call the one at home: `yes` or
`no`. The one at home keeps the way open. Both run until they are killed.
"""

from __future__ import annotations

import asyncio
import sys
import time

from hivemind.p2p import P2P

from dilocox.dht.reachability import Probe, ask_time
from dilocox.dht.reconnect import Redialler

CALL_LIMIT_S = 1.0


async def node(**options: object) -> P2P:
    p2p = await P2P.create(
        nat_port_map=False,
        startup_timeout=60,
        dht_mode="client",
        **options,  # pyright: ignore[reportArgumentType]
    )
    await Probe(p2p, now=time.time, refuse=print).add_p2p_handlers(p2p)
    return p2p


async def public(host: str) -> None:
    p2p = await node(host_maddrs=[f"/ip4/{host}/tcp/0"])
    print((await p2p.get_visible_maddrs())[0], flush=True)
    while True:
        answered = False
        for other in await p2p.list_peers():
            try:
                await ask_time(p2p, other.peer_id, limit_s=CALL_LIMIT_S)
                answered = True
            except ConnectionError:
                pass
        print("yes" if answered else "no", flush=True)
        await asyncio.sleep(1.0)


async def home(address: str) -> None:
    p2p = await node(host_maddrs=None, no_listen=True)
    Redialler(p2p, local_network=True).aim({address.rpartition("/")[2]: [address]})
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run({"public": public, "home": home}[sys.argv[1]](sys.argv[2]))
