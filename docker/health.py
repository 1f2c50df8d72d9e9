"""The container's health check: exit code 0 if the command in it works, 1 and one line if not.

Asks http://127.0.0.1:$DILOCOX_METRICS_PORT/healthz, or the URL given as argument. Where nobody
listens there (a command that starts has none yet, and some have none at all), somebody must take
connections on $DILOCOX_PORT. Where that is not given there is nothing to ask, and a command that
has ended ends its container anyway.
"""

from __future__ import annotations

import os
import socket
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 5.0


def main(arguments: list[str]) -> int:
    """Check once; the exit code."""
    fault = answer_fault(arguments[0]) if arguments else _own_fault()
    sys.stdout.write(f"{fault or 'ok'}\n")
    return 1 if fault else 0


def _own_fault() -> str:
    metrics, port = (_port(name) for name in ("DILOCOX_METRICS_PORT", "DILOCOX_PORT"))
    if metrics and not listening_fault(metrics):
        return answer_fault(f"http://127.0.0.1:{metrics}/healthz")
    return listening_fault(port) if port else ""


def answer_fault(url: str) -> str:
    """Why the URL does not answer with 200; empty if it does."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is this container
    try:
        with opener.open(url, timeout=TIMEOUT_S) as answer:
            return "" if answer.status == 200 else f"{url}: status {answer.status}"
    except urllib.error.HTTPError as error:
        return f"{url}: status {error.code}, {error.read(200).decode(errors='replace').strip()}"
    except (OSError, ValueError) as error:
        return f"{url}: {error}"


def listening_fault(port: int) -> str:
    """Why nobody takes connections on a port of this container; empty if somebody does."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S).close()
    except OSError as error:
        return f"port {port}: {error}"
    return ""


def _port(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
