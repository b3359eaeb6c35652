"""push_to_hub against a local stand-in of the hub's HTTP calls.

Weights go as LFS objects over plain HTTP; the hub's own faster protocol (xet) is not spoken here.
"""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard, constants
from safetensors.torch import load

from l2r.hf.models.card import CARD, is_untouched
from tests.hf.models.test_card import olmoe

# huggingface_hub's own call of its HTTP client, while it uploads weights
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


class Hub(BaseHTTPRequestHandler):
    """Repositories in memory: files[branch][path], requests in ``seen``, LFS objects by sum."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        """Silent."""

    def answer(self, value=None, *, code=200, content=None, **headers):
        body = json.dumps(value).encode() if content is None else content
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        for name, header in headers.items():
            self.send_header(name.replace("_", "-"), header)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_POST(self):
        hub, path = self.server.hub, self.path.partition("?")[0]
        content = self.body()
        hub.seen.append(path)
        hub.tokens.add(self.headers["Authorization"])
        if path == "/api/repos/create":
            hub.created.append(json.loads(content))
            self.answer({"url": f"{hub.url}/me/tiny"}, code=409 if hub.created[1:] else 200)
        elif path.startswith("/api/models/me/tiny/branch/"):
            hub.files.setdefault(path.rpartition("/")[2], {})
            self.answer({})
        elif path == "/api/validate-yaml":
            hub.cards.append(ModelCard(json.loads(content)["content"]).data.to_dict())
            self.answer({})
        elif "/preupload/" in path:
            names = [file["path"] for file in json.loads(content)["files"]]
            modes = {n: "lfs" if n.endswith(".safetensors") else "regular" for n in names}
            files = [{"path": n, "uploadMode": modes[n], "shouldIgnore": False} for n in names]
            self.answer({"files": files})
        elif path == "/me/tiny.git/info/lfs/objects/batch":
            objects = json.loads(content)["objects"]
            for thing in objects:
                thing["actions"] = {"upload": {"href": f"{hub.url}/lfs/{thing['oid']}"}}
            self.answer({"objects": objects, "transfer": "basic"})
        elif "/commit/" in path:
            self.commit(hub, path.rpartition("/")[2], content)
        else:
            self.answer({}, code=404)

    def commit(self, hub, branch, content):
        head, *changes = (json.loads(line) for line in content.splitlines())
        hub.commits.append(head["value"]["summary"])
        for change in changes:
            value = change["value"]
            lfs = change["key"] == "lfsFile"
            data = hub.objects[value["oid"]] if lfs else base64.b64decode(value["content"])
            hub.files[branch][value["path"]] = data
        self.answer({"commitUrl": f"{hub.url}/me/tiny/commit/1", "commitOid": "1" * 40})

    def do_PUT(self):
        content = self.body()
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == oid
        self.server.hub.objects[oid] = content
        self.answer({})

    def do_GET(self):
        branch, name = self.path.split("/")[-2:]
        data = self.server.hub.files.get(branch, {}).get(name)
        if data is None:
            self.answer({}, code=404, X_Error_Code="EntryNotFound")
        else:
            tag = f'"{hashlib.sha256(data).hexdigest()}"'
            self.answer(content=data, ETag=tag, X_Repo_Commit=hashlib.sha1(data).hexdigest())

    do_HEAD = do_GET  # noqa: N815


@pytest.fixture
def hub(tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    url = f"http://127.0.0.1:{server.server_port}"
    server.hub = SimpleNamespace(
        url=url, files={"main": {}}, objects={}, seen=[], created=[], cards=[], commits=[]
    )
    server.hub.tokens = set()
    monkeypatch.setattr(constants, "ENDPOINT", url)  # as HF_ENDPOINT does in a new process
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants._HF_DEFAULT_ENDPOINT, url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.hub
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_push_brings_weights_and_our_card(hub):
    model = olmoe()
    model.push_to_hub("me/tiny", token="hf_x", private=True, tags=["mine"])
    files = hub.files["main"]
    assert {"config.json", "model.safetensors", CARD} <= set(files)
    assert len(load(files["model.safetensors"])) > 0
    assert is_untouched(files[CARD].decode())
    assert hub.cards[0]["tags"] == ["mixture-of-experts", "l2r", "l2r_sips", "mine"]
    assert hub.created[0]["name"] == "tiny" and hub.created[0]["visibility"] == "private"
    assert hub.tokens == {"Bearer hf_x"} and hub.commits == ["Upload model"]


def test_a_second_push_replaces_our_card_and_keeps_a_persons(hub):
    olmoe().push_to_hub("me/tiny", token="hf_x")
    olmoe(heads=5).push_to_hub("me/tiny", token="hf_x", commit_message="Five")
    ours = hub.files["main"][CARD]
    assert b"| `heads` | 5 |" in ours and hub.commits == ["Upload model", "Five"]
    hub.files["main"][CARD] = mine = ours.replace(b"license: unknown", b"license: mit")
    with pytest.warns(UserWarning, match=r"README.md of me/tiny was edited"):
        olmoe().push_to_hub("me/tiny", token="hf_x")
    assert hub.files["main"][CARD] == mine and len(hub.commits) == 3


def test_a_branch_is_made_where_there_is_none(hub):
    olmoe().push_to_hub("me/tiny", token="hf_x", revision="next")
    assert hub.files["main"] == {} and CARD in hub.files["next"]


def test_saving_may_push_at_once_and_a_persons_local_card_goes_along(hub, tmp_path):
    folder = tmp_path / "tiny"
    olmoe().save_pretrained(folder, push_to_hub=True, repo_id="me/tiny", token="hf_x")
    assert hub.files["main"][CARD] == (folder / CARD).read_bytes()
    (folder / CARD).write_text("---\nlicense: mit\n---\n# Mine\n")
    with pytest.warns(UserWarning, match="was edited"):
        olmoe().save_pretrained(folder, push_to_hub=True, repo_id="me/tiny", token="hf_x")
    assert hub.files["main"][CARD] == (folder / CARD).read_bytes()
