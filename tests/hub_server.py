"""A hub on this machine: the few endpoints that adapters need, rights, and faults on order."""

import contextlib
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.local_server import PATIENCE_S, LocalServer


@dataclass
class Repository:
    """readers: tokens that may read it; None: all. gated: only its description is public."""

    files: dict[str, bytes]
    readers: set[str] | None = None
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    @property
    def sha(self) -> str:
        """The commit of what is there now."""
        return self.commit(self.files)

    def commit(self, files: dict[str, bytes]) -> str:
        """Keep these files under their commit."""
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[sha] = dict(files)
        return sha


class HubServer(LocalServer):
    """`with HubServer() as hub`; faults: statuses that answer the next requests instead.

    fault_headers: of those answers.
    descriptions: bodies that answer the next requests about a repository instead.
    requests: paths of all that came, in order. cuts: so many bytes of a file go out, then the
    connection breaks, once for each entry. resumed: where downloads went on.
    """

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.repositories: dict[str, Repository] = {}
        self.faults: list[int] = []
        self.fault_headers: dict[str, str] = {}
        self.descriptions: list[bytes] = []
        self.cuts: list[int] = []
        self.requests: list[str] = []
        self.resumed: list[int] = []
        self.file_requested = threading.Event()
        self._came = threading.Condition()

    def add(self, name: str, files: dict[str, bytes], **rules: Any) -> Repository:
        repository = self.repositories[name] = Repository(files, **rules)
        return repository

    def downloads(self) -> list[str]:
        """The files that were requested."""
        return [path.rpartition("/")[2] for path in self.requests if "/resolve/" in path]

    def await_downloads(self, count: int) -> None:
        """Wait for so many requests of files; a client that gives up is faster than this server."""
        with self._came:
            assert self._came.wait_for(lambda: len(self.downloads()) >= count, PATIENCE_S)

    def looks(self) -> int:
        """How many requests were about a repository."""
        return sum(path.startswith("/api/models/") for path in self.requests)

    def note(self, path: str) -> None:
        """A request came."""
        with self._came:
            self.requests.append(path)
            self._came.notify_all()


class _Handler(BaseHTTPRequestHandler):
    owner: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        hub = self.owner
        hub.note(self.path)
        if hub.faults:
            self._answer(hub.faults.pop(0), b"fault on order", hub.fault_headers)
        elif self.path.startswith("/api/models/"):
            self._describe(*_split(self.path.removeprefix("/api/models/")))
        else:
            name, _, rest = self.path[1:].partition("/resolve/")
            sha, _, file = rest.partition("/")
            self._send_file(name, sha, file)

    def log_message(self, *_: object) -> None:
        pass

    def _describe(self, name: str, rest: str) -> None:
        if self.owner.descriptions:
            self._answer(200, self.owner.descriptions.pop(0))
            return
        repository = self.owner.repositories.get(name)
        if repository is None or not (repository.gated or self._may_read(repository)):
            self._answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif rest == "auth-check":
            allowed = self._may_read(repository)
            self._answer(200 if allowed else 403, b"", {} if allowed else _GATED)
        else:
            self._send_info(repository, rest.removeprefix("revision/"))

    def _send_info(self, repository: Repository, revision: str) -> None:
        sha = repository.sha if revision in ("", "main") else revision
        if sha not in repository.commits:
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        files = repository.commits[sha]
        description = {
            "id": "any/name",
            "sha": sha,
            "private": repository.readers is not None and not repository.gated,
            "gated": "manual" if repository.gated else False,
            "siblings": [_sibling(name, data) for name, data in files.items()],
        }
        self._answer(200, json.dumps(description).encode(), {"Content-Type": "application/json"})

    def _send_file(self, name: str, sha: str, file: str) -> None:
        hub = self.owner
        repository = hub.repositories[name]
        if not self._may_read(repository):
            self._answer(403, b"", _GATED)
            return
        data = repository.commits[sha][file]
        cut = hub.cuts.pop(0) if hub.cuts else None
        hub.file_requested.set()
        hub.gate.wait(PATIENCE_S)
        start = 0
        if (ranged := self.headers["Range"]) is not None:
            start = int(ranged.removeprefix("bytes=").removesuffix("-"))
            hub.resumed.append(start)
        body = data[start:]
        headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        self._answer(206 if start else 200, body, headers, cut)

    def _may_read(self, repository: Repository) -> bool:
        token = (self.headers["Authorization"] or "").removeprefix("Bearer ")
        return repository.readers is None or token in repository.readers

    def _answer(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was given up
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


_GATED = {"X-Error-Code": "GatedRepo"}


def _sibling(name: str, data: bytes) -> dict[str, Any]:
    """A file's description; weights are kept in LFS, as on the hub."""
    found = {"rfilename": name, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
    if not name.endswith((".safetensors", ".bin")):
        return found
    lfs = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 134}
    return {**found, "lfs": lfs}


def _split(path: str) -> tuple[str, str]:
    """owner/name and what follows."""
    owner, name, *rest = path.partition("?")[0].split("/")
    return f"{owner}/{name}", "/".join(rest)
