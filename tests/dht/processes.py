"""Programs for the tests that need a main process of their own, and a look at what is alive."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P

OPEN_A_NODE = """
import asyncio, json, os, signal, sys, threading
from pathlib import Path
from dilocox.dht.clock import RunClock
from dilocox.dht.identity import Identity
from dilocox.dht.node import open_dht
from dilocox.dht.validator import RunRecordValidator

identity = Identity.load_or_create(Path(sys.argv[1]))
if "ignore" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
# A peer's main process has a handle of its own to p2pd.
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()

def opened():
    dht = open_dht(
        identity=identity, bootstraps=(), listen=("/ip4/127.0.0.1/tcp/0",), announce=(),
        client_mode=False, validator=RunRecordValidator("0" * 32, identity), clock=RunClock(),
    )
    asyncio.run_coroutine_threadsafe(dht.replicate_p2p(), loop).result(30)
    facts = {"child": dht.pid, "p2pd": dht.p2pd_pid, "alive": dht.visible_addresses()}
    print(json.dumps(facts), flush=True)
    return dht

class Torn:
    # A request with a pipe or a future in it asks the main process for more as it is read.
    def __reduce__(self):
        return (fail, ())

def fail():
    raise EOFError

dht = opened()
for line in sys.stdin:
    if line.strip() == "raise":
        raise RuntimeError("the main program failed")
    if line.strip() == "die":
        dht._outer_pipe.send(Torn())
        os.kill(os.getpid(), signal.SIGKILL)
    if line.strip() == "ping":
        print(json.dumps(dht.visible_addresses()), flush=True)
    if line.strip() == "close":
        dht.close()
        print(json.dumps("closed"), flush=True)
    if line.strip() == "open":
        dht = opened()
"""


@dataclass
class NodeProgram:
    """A Python program that has opened a node; its lines are commands, its answers JSON."""

    process: "subprocess.Popen[str]"
    child: int
    p2pd: int
    temporary: Path  # a folder of its own: nothing may stay in it

    @classmethod
    def start(cls, key: Path, *options: str) -> "NodeProgram":
        temporary = Path(tempfile.mkdtemp(prefix="node-"))
        process = subprocess.Popen(
            [sys.executable, "-c", OPEN_A_NODE, str(key), *options],
            env={**os.environ, "TMPDIR": str(temporary)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        facts = json.loads(line)
        assert facts["alive"]
        return cls(process, facts["child"], facts["p2pd"], temporary)

    def tell(self, command: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def ask(self, command: str) -> object:
        self.tell(command)
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def open(self) -> None:
        """Another node after the one that was closed."""
        facts: Any = self.ask("open")
        assert facts["alive"]
        self.child, self.p2pd = facts["child"], facts["p2pd"]

    @property
    def sockets(self) -> list[Path]:
        """The folders of sockets that are there."""
        return list(self.temporary.glob("dilocox-*"))

    def left(self) -> list[str]:
        """What of the node is still there."""
        names = {"child": self.child, "p2pd": self.p2pd}
        left = [name for name, pid in names.items() if is_alive(pid)]
        shared = [path.name for path in Path("/dev/shm").glob(f"torch_{self.process.pid}_*")]
        return left + [str(path) for path in self.temporary.iterdir()] + shared

    def end(self) -> None:
        """For the end of a test, however it went."""
        self.process.kill()
        self.process.wait()
        kill(self.child, self.p2pd)
        shutil.rmtree(self.temporary, ignore_errors=True)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe:
                pipe.close()


@contextlib.asynccontextmanager
async def handles(daemons: Iterable[P2P]) -> AsyncIterator[list[P2P]]:
    """Of this event loop, to p2pd that run; who adds handlers by one has to remove them."""
    made = [await P2P.replicate(each.daemon_listen_maddr) for each in daemons]
    try:
        yield made
    finally:
        for each in made:
            await each.shutdown()


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(*pids: int) -> None:
    for pid in pids:
        if is_alive(pid):
            subprocess.run(["kill", "-KILL", str(pid)], check=False)


def wait_until(condition: Callable[[], object], timeout_s: float) -> float:
    """Wait for a condition; how long it took. Fails with what the condition last said."""
    start = time.monotonic()
    while not (last := condition()):
        assert time.monotonic() - start < timeout_s, f"not within {timeout_s} s: {last}"
        time.sleep(0.01)
    return time.monotonic() - start
