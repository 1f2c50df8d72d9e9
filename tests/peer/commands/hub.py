"""A server on this machine that speaks as much of the Hugging Face hub as an upload needs, for the
real client of huggingface_hub: repositories are made, small files come within the commit, large
ones before it as LFS objects.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_secretsecretsecretsecretsecretsecret"
READ_ONLY = "hf_readreadreadreadreadreadreadreadread"
OWNER = "somebody"


class Hub:
    """What it holds: the commits of each repository, as summary and files by path."""

    def __init__(self) -> None:
        self.commits: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.private: set[str] = set()
        self.broken = self.full = False
        self.url = ""
        self.objects: dict[str, bytes] = {}

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any]:
        """Status and what is sent, as JSON."""
        if self.broken:
            return 500, {"error": "out of order"}
        if method == "PUT":  # to a storage that needs no token: its address is the secret
            if self.full:
                return 400, {"error": "no more room"}
            self.objects[hashlib.sha256(body).hexdigest()] = body
            return 200, {}
        if token not in (TOKEN, READ_ONLY):
            return 401, {"error": "Invalid credentials"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._create(json.loads(body), token)
        if match := re.fullmatch(r"/api/models/([\w-]+/[\w-]+)/(\w+)/main", path):
            return self._write(match[1], match[2], token, body)
        if re.fullmatch(r"/[\w-]+/[\w-]+\.git/info/lfs/objects/batch", path):
            return 200, {"objects": list(map(self._wanted, json.loads(body)["objects"]))}
        return 404, {"error": f"no {method} {path}"}

    def _create(self, asked: dict[str, Any], token: str) -> tuple[int, Any]:
        name = f"{asked.get('organization') or OWNER}/{asked['name']}"
        if token == READ_ONLY or not name.startswith(f"{OWNER}/"):
            return 403, {"error": "You don't have the rights to create a model here"}
        if name in self.commits:
            return 409, {"error": "You already created this model repo", "url": self._page(name)}
        self.commits[name] = []
        if asked.get("private") or asked.get("visibility") == "private":  # by version of the client
            self.private.add(name)
        return 200, {"url": self._page(name), "name": name}

    def _page(self, name: str) -> str:
        return f"{self.url}/{name}"

    def _write(self, name: str, what: str, token: str, body: bytes) -> tuple[int, Any]:
        if name not in self.commits:
            return 404, {"error": "Repository not found"}
        if token == READ_ONLY:
            return 403, {"error": "Forbidden"}
        if what == "preupload":
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for file in json.loads(body)["files"]
            ]
            return 200, {"files": files}
        summary, files = "", dict[str, bytes]()
        for line in map(json.loads, body.decode().splitlines()):
            value = line["value"]
            match line["key"]:
                case "header":
                    summary = value["summary"]
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.objects[value["oid"]]
                case other:
                    return 400, {"error": f"no {other} here"}
        self.commits[name].append((summary, files))
        oid = hashlib.sha1(body).hexdigest()
        return 200, {
            "success": True,
            "commitOid": oid,
            "commitUrl": f"{self._page(name)}/commit/{oid}",
        }

    def _wanted(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["oid"] in self.objects:
            return asked
        return asked | {"actions": {"upload": {"href": f"{self.url}/storage/{asked['oid']}"}}}


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub on a free port; `url` is what HF_ENDPOINT is to say."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            status, told = hub.answer(self.command, self.path.partition("?")[0], token, body)
            sent = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        do_GET = do_POST = do_PUT = _answer  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
