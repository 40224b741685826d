"""A Hugging Face Hub in memory, over real HTTP: repositories, branches, commits, LFS objects, and faults on demand."""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml


TOKEN = "hf_owner"
RESOLVE = r"(/kernels)?/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)"
API = r"/api/(models|kernels)/(?P<repo>[^/]+/[^/]+)"


@dataclass
class Fault:
    """What happens instead of, or to, the next `times` answers to requests that match.

    `kind` is a status, `"drop"` (the connection closes without an answer), `"cut"` (half of the body is sent) or
    `"corrupt"` (a byte of the body is another one).
    """

    method: str
    path: str
    kind: int | str
    times: int = 1


@dataclass
class Repo:
    name: str
    private: bool
    commits: dict = field(default_factory=dict)  # commit id to {path: content}
    messages: dict = field(default_factory=dict)  # commit id to its first line
    branches: dict = field(default_factory=dict)  # branch to commit id

    def commit(self, branch, files, message):
        oid = hashlib.sha1(f"{self.name} {len(self.commits)}".encode()).hexdigest()
        self.commits[oid] = {**self.commits.get(self.branches.get(branch), {}), **files}
        self.messages[oid] = message
        self.branches[branch] = oid
        return oid

    def find(self, revision):
        return self.branches.get(revision, revision if revision in self.commits else None)


class FakeHub(ThreadingHTTPServer):
    """Serves itself from a thread while used as a context manager."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos, self.objects, self.faults, self.requests = {}, {}, [], []

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *unused):
        self.shutdown()
        self.server_close()

    def take_fault(self, method, path):
        for fault in self.faults:
            if fault.method == method and re.search(fault.path, path) and fault.times:
                fault.times -= 1
                return fault.kind
        return None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_request(self):
        length = int(self.headers.get("Content-Length", 0))
        self.body = self.rfile.read(length)
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path))
        self.fault = self.server.take_fault(self.command, path)
        if self.fault == "drop":
            self.close_connection = True
            return
        if isinstance(self.fault, int):
            self.answer(self.fault, error="refused", headers={"Retry-After": "0"})
            return
        for method, pattern, handler in ROUTES:
            if method == self.command and (match := re.fullmatch(pattern, path)):
                self.route(handler, match.groupdict())
                return
        self.answer(404, error="no such page")

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def route(self, handler, names):
        owner = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        repo = self.server.repos.get(names.pop("repo", None))
        about_repo = handler not in (create_repo, validate_yaml, upload_object)
        if not owner and (self.command == "POST" or (about_repo and (repo is None or repo.private))):
            self.answer(401, error="no valid token", code="RepoNotFound" if self.command != "POST" else None)
        elif about_repo and repo is None:
            self.answer(404, error="no such repository", code="RepoNotFound")
        else:
            handler(self, *([repo] if about_repo else []), **names)

    def answer(self, status, content=b"", error=None, code=None, headers=None):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        data = json.dumps({"error": error}).encode() if error else data
        self.send_response(status)
        extra = {"X-Error-Message": error, "X-Error-Code": code, **(headers or {})}
        for name, value in {"Content-Length": len(data), **extra}.items():
            if value is not None:
                self.send_header(name, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault == "corrupt":
            data = data[:-1] + bytes([data[-1] ^ 1])
        if self.fault == "cut":
            data, self.close_connection = data[: len(data) // 2], True
        self.wfile.write(data)

    def log_message(self, *unused):
        pass


def create_repo(request):
    wanted = json.loads(request.body)
    name = f"{wanted.get('organization') or 'user'}/{wanted['name']}"
    status = 409 if name in request.server.repos else 200
    if status == 200:
        private = wanted.get("private") or wanted.get("visibility") == "private"
        request.server.repos[name] = Repo(name, bool(private))
        request.server.repos[name].commit("main", {".gitattributes": b""}, "initial commit")
    request.answer(status, {"url": f"{request.server.url}/{name}"})


def validate_yaml(request):
    metadata = yaml.safe_load(json.loads(request.body)["content"].split("---")[1])
    base, errors = metadata.get("base_model"), []
    if base is not None and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base):
        errors.append({"message": f'"base_model" with value "{base}" is not valid.'})
    request.answer(400 if errors else 200, {"errors": errors, "warnings": []})


def create_branch(request, repo, branch):
    status = 409 if branch in repo.branches else 200
    repo.branches.setdefault(branch, repo.branches["main"])
    request.answer(status, {})


def is_large(path):
    return path.endswith((".safetensors", ".png"))


def preupload(request, repo, revision):
    paths = [file["path"] for file in json.loads(request.body)["files"]]
    modes = ({"path": p, "uploadMode": "lfs" if is_large(p) else "regular", "shouldIgnore": False} for p in paths)
    status = 200 if repo.find(revision) else 404
    request.answer(status, {"files": list(modes)}, code=None if repo.find(revision) else "RevisionNotFound")


def batch(request, repo):
    objects = json.loads(request.body)["objects"]
    for wanted in objects:
        if wanted["oid"] not in request.server.objects:
            wanted["actions"] = {"upload": {"href": f"{request.server.url}/objects/{wanted['oid']}"}}
    request.answer(200, {"transfer": "basic", "objects": objects})


def upload_object(request, oid):
    if hashlib.sha256(request.body).hexdigest() != oid:
        request.answer(400, error="sha256 mismatch")
        return
    request.server.objects[oid] = request.body
    request.answer(200)


def commit(request, repo, revision):
    lines = [json.loads(line) for line in request.body.splitlines()]
    values = {kind: [line["value"] for line in lines if line["key"] == kind] for kind in ("header", "file", "lfsFile")}
    files = {value["path"]: base64.b64decode(value["content"]) for value in values["file"]}
    files |= {value["path"]: request.server.objects[value["oid"]] for value in values["lfsFile"]}
    oid = repo.commit(revision, files, values["header"][0]["summary"])
    request.answer(200, {"commitUrl": f"{request.server.url}/{repo.name}/commit/{oid}", "commitOid": oid})


def model_info(request, repo, revision):
    oid = repo.find(revision or "main")
    request.answer(200, {"id": repo.name, "sha": oid, "siblings": [{"rfilename": path} for path in repo.commits[oid]]})


def list_files(request, repo, revision):
    files = repo.commits.get(repo.find(revision))
    if files is None:
        request.answer(404, error="no such revision", code="RevisionNotFound")
        return
    sizes = {path: len(content) for path, content in files.items()}
    request.answer(200, [{"type": "file", "path": path, "oid": "", "size": size} for path, size in sizes.items()])


def resolve(request, repo, revision, path):
    oid = repo.find(revision)
    content = repo.commits.get(oid, {}).get(path)
    if content is None:
        code = "RevisionNotFound" if oid is None else "EntryNotFound"
        request.answer(404, error="not found", code=code, headers={"X-Repo-Commit": oid})
        return
    blob = content if is_large(path) else f"blob {len(content)}\0".encode() + content
    etag = (hashlib.sha256 if is_large(path) else hashlib.sha1)(blob).hexdigest()
    start = int(re.sub(r"\D", "", request.headers.get("Range", "")) or 0)
    headers = {"X-Repo-Commit": oid, "ETag": f'"{etag}"', "X-Linked-Size": len(content)}
    request.answer(206 if start else 200, content[start:], headers=headers)


ROUTES = [
    ("POST", "/api/repos/create", create_repo),
    ("POST", "/api/validate-yaml", validate_yaml),
    ("POST", API + "/branch/(?P<branch>.+)", create_branch),
    ("POST", API + "/preupload/(?P<revision>.+)", preupload),
    ("POST", API + "/commit/(?P<revision>.+)", commit),
    ("GET", API + "/tree/(?P<revision>[^/]+)", list_files),
    ("GET", API + "(/revision/(?P<revision>.+))?", model_info),
    ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", batch),
    ("PUT", "/objects/(?P<oid>.+)", upload_object),
    ("HEAD", RESOLVE, resolve),
    ("GET", RESOLVE, resolve),
]
