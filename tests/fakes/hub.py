"""A fake model hub: listings and resolve on one server, large files with Range requests on another."""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

_LARGE = (".safetensors", ".gguf", ".bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A request. path: on the hub, or on the storage server /storage/ORG/NAME/FILE."""

    method: str
    path: str
    range: str
    token: str


@dataclass(kw_only=True)
class Repo:
    """A repository. token: required if it is gated. Faults: `listed` and `sizes` change what the hub lists for a file,
    but not what it sends."""

    files: Mapping[str, bytes]
    token: str = ""
    listed: Mapping[str, bytes] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files)).encode()).hexdigest()

    def size(self, name: str) -> int:
        return self.sizes.get(name, len(self._listed(name)))

    def sha256(self, name: str) -> str:
        return hashlib.sha256(self._listed(name)).hexdigest()

    def git_name(self, name: str) -> str:
        data = self._listed(name)
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def _listed(self, name: str) -> bytes:
        return self.listed.get(name, self.files[name])

    def entry(self, name: str) -> dict[str, Any]:
        entry = {"type": "file", "path": name, "size": self.size(name), "oid": self.git_name(name)}
        if name.endswith(_LARGE):
            entry["lfs"] = {"oid": self.sha256(name), "size": self.size(name), "pointerSize": 134}
        return entry


class FakeHub:
    """Serves `repos`. stall_after: the storage server sends this many bytes, then waits for `go_on`. drop_after: the
    connection of the next answer ends after this many bytes."""

    def __init__(self, repos: dict[str, Repo]):
        self.repos = repos
        self.stall_after: int | None = None
        self.drop_after: int | None = None
        self.seen: list[Seen] = []
        self.changed = threading.Condition()

    def ranges(self) -> list[str]:
        """The Range headers of requests to the storage server, in order."""
        return [each.range for each in self.seen if each.path.startswith("/storage/")]

    def go_on(self) -> None:
        with self.changed:
            self.stall_after = None
            self.changed.notify_all()

    @contextlib.contextmanager
    def serve(self) -> Iterator[str]:
        """Yields the hub's address, for HF_ENDPOINT."""
        storage = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Storage, self))
        hub = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Hub, self, f"http://127.0.0.1:{storage.server_port}"))
        threads = [threading.Thread(target=each.serve_forever, args=(0.05,)) for each in (hub, storage)]
        for thread in threads:
            thread.start()
        try:
            yield f"http://127.0.0.1:{hub.server_port}"
        finally:
            self.go_on()
            for server in (hub, storage):
                server.shutdown()
                server.server_close()
            for thread in threads:
                thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: FakeHub, *arguments: Any):
        self.hub = hub
        super().__init__(*arguments)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    @property
    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def note(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.hub.seen.append(
            Seen(method=self.command, path=path, range=self.headers.get("Range", ""), token=self.token)
        )
        return path

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        raise NotImplementedError


class _Hub(_Handler):
    def __init__(self, hub: FakeHub, storage: str, *arguments: Any):
        self.storage = storage
        super().__init__(hub, *arguments)

    def do_GET(self) -> None:
        path = self.note()
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/tree/[^/]+|/revision/[^/]+)?", path):
            self._describe(match[1], match[2] or "")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(match[1], match[2], match[3])
        else:
            self.answer(404)

    def _repo(self, name: str) -> Repo | None:
        repo = self.hub.repos.get(name)
        if repo is None:
            # The hub answers 401 to clients without a token: the repository may be private.
            self.answer(404 if self.token else 401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        return repo

    def _describe(self, name: str, what: str) -> None:
        if (repo := self._repo(name)) is None:
            return
        if what.startswith("/tree/"):
            body: Any = [repo.entry(each) for each in repo.files]
        else:
            body = {"id": name, "sha": repo.commit, "siblings": [{"rfilename": each} for each in repo.files]}
        self.answer(200, json.dumps(body).encode(), Content_Type="application/json")

    def _resolve(self, name: str, revision: str, file: str) -> None:
        if (repo := self._repo(name)) is None:
            return
        if repo.token and self.token != repo.token:
            status = 403 if self.token else 401
            self.answer(status, X_Error_Code="GatedRepo", X_Error_Message=f"Access to model {name} is restricted")
        elif revision not in ("main", repo.commit) or file not in repo.files:
            self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=repo.commit)
        elif file.endswith(_LARGE):
            self.answer(
                302,
                Location=f"{self.storage}/storage/{name}/{file}",
                X_Repo_Commit=repo.commit,
                X_Linked_Etag=f'"{repo.sha256(file)}"',
                X_Linked_Size=str(repo.size(file)),
                ETag='"of-the-redirect"',
            )
        else:
            self.answer(200, repo.files[file], X_Repo_Commit=repo.commit, ETag=f'"{repo.git_name(file)}"')


class _Storage(_Handler):
    def do_GET(self) -> None:
        _, _, org, name, file = self.note().split("/", 4)
        data = self.hub.repos[f"{org}/{name}"].files[file]
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        if first and first >= len(data):
            self.answer(416, Content_Range=f"bytes */{len(data)}")
            return
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(len(data) - first))
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):
                self._send(data[first:])

    def _send(self, data: bytes) -> None:
        if (limit := self.hub.drop_after) is not None:
            self.hub.drop_after = None
            self.wfile.write(data[:limit])
            self.close_connection = True
            return
        limit = self.hub.stall_after
        self.wfile.write(data[:limit])
        if limit is not None:
            with self.hub.changed:
                self.hub.changed.wait_for(lambda: self.hub.stall_after is None)
            self.close_connection = True
