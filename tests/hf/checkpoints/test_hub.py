"""Checkpoints by a hub id, from a stand-in for the hub and from a filled cache."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch

import l2r
from l2r.hf.checkpoints.folders import _snapshot, local_checkpoint
from l2r.hf.swap.families import FAMILIES
from tests.hf.families import sample_tokens, tiny_model

COMMIT, OLDER, NAME = "a" * 40, "b" * 40, "someone/tiny"


class Hub(BaseHTTPRequestHandler):
    """The routes of the hub that a download asks; ``asked`` has the names of files."""

    folders: dict[str, Path]
    asked: list[str]

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def _answer(self, *, body):
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._info("/".join(parts[2:4]), parts[-1], tree=parts[4:5] == ["tree"])
            return
        name, revision, file = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        path = self.folders.get(revision, Path("none")) / file
        if name != NAME or not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        content = path.read_bytes()
        self.asked += [file] if body else []
        tag = hashlib.sha1(content).hexdigest()
        self._send(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": revision}, body=body)

    def _info(self, name, revision, *, tree):
        commit = {"main": COMMIT, "v1": OLDER}.get(revision, revision)
        if name != NAME:
            self._send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        elif commit not in self.folders:
            self._send(404, b'{"error": "none"}', {"X-Error-Code": "RevisionNotFound"})
        else:
            root = self.folders[commit]
            files = [p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()]
            answer = {"id": NAME, "sha": commit, "siblings": [{"rfilename": f} for f in files]}
            if tree:
                sizes = {file: (root / file).stat().st_size for file in files}
                entries = [{"type": "file", "path": f, "size": s} for f, s in sizes.items()]
                answer = [{**entry, "oid": "0" * 40} for entry in entries]
            self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _send(self, status, content, headers, *, body=True):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with two revisions of one model, and an empty cache."""
    Hub.folders = {COMMIT: tmp_path / "new", OLDER: tmp_path / "old"}
    Hub.asked = []
    for seed, folder in enumerate(Hub.folders.values()):
        torch.manual_seed(seed)
        model = tiny_model(FAMILIES["olmoe"])
        with torch.no_grad():
            model.lm_head.weight.normal_()
        model.save_pretrained(folder, max_shard_size="40KB")
        (folder / "original").mkdir()
        (folder / "original" / "consolidated.safetensors").write_bytes(b"others' form")
        (folder / "modeling_strange.py").write_text("raise SystemExit")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    for name, value in {
        "ENDPOINT": url,
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
    }.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.chdir(tmp_path)
    yield Hub
    server.shutdown()
    server.server_close()


@torch.no_grad()
def logits(model):
    return model(sample_tokens(), use_cache=False).logits


def test_a_hub_id_gives_the_weights_of_its_revision_and_no_code(hub):
    newest, older = l2r.load_pretrained(NAME), l2r.load_pretrained(NAME, revision="v1")
    assert torch.equal(logits(newest), logits(l2r.load_pretrained(hub.folders[COMMIT])))
    assert torch.equal(logits(older), logits(l2r.load_pretrained(hub.folders[OLDER])))
    assert not torch.equal(logits(newest), logits(older))
    assert any(file.startswith("model-0000") for file in hub.asked)
    assert not any(file.endswith(".py") or file.startswith("original/") for file in hub.asked)
    assert (local_checkpoint(NAME, code=True) / "modeling_strange.py").is_file()


def test_a_license_and_files_beside_the_weights_come_along(hub, l2r):
    """What a copy of a folder here keeps, a copy of a hub id keeps too."""
    beside = ("LICENSE", "NOTICE.md", "vocab.bpe", "recipe.yaml")
    for name in beside:
        (hub.folders[COMMIT] / name).write_text(name)
    (hub.folders[COMMIT] / "training_args.bin").write_text("pickled")
    ended = l2r("swap", NAME, "rank=2", "--out", "swapped")
    assert ended.code == 0, ended
    kept = {path.name for path in Path("swapped").iterdir()}
    assert {*beside} <= kept and "training_args.bin" not in kept


@pytest.mark.slow("two commands on a whole model")
def test_a_filled_cache_is_read_offline_and_once(hub, monkeypatch):
    expected = logits(l2r.load_pretrained(NAME))
    downloaded = list(hub.asked)
    assert torch.equal(logits(l2r.load_pretrained(NAME)), expected)
    assert hub.asked == downloaded
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert torch.equal(logits(l2r.load_pretrained(NAME)), expected)
    with pytest.raises(ValueError, match="and of the hub: "):
        local_checkpoint(NAME, revision="v1")


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("someone/else", None, r"no folder someone/else, and of the hub: .*"),
        (NAME, "v9", r"no folder someone/tiny, and of the hub: .*"),
        ("not/an/id", None, r"a folder with config\.json, a run or a hub id; got not/an/id"),
        ("../out", None, r"a run or a hub id; got \.\./out"),
        ("./someone/tiny", None, r"a run or a hub id; got \./someone/tiny"),
        ("tiny", None, r"a run or a hub id; got tiny"),
        ("~/tiny", None, r"a run or a hub id; got ~/tiny"),
        ("/someone/tiny", None, r"a run or a hub id; got /someone/tiny"),
        ("new/original", None, r"a folder with config\.json or model/config\.json; got new/orig"),
        (".", "v1", r"revision is for hub ids; got revision='v1' with \."),
    ],
)
def test_what_is_neither_a_folder_nor_on_the_hub_is_one_line(
    hub, name, revision, message, monkeypatch
):
    monkeypatch.setattr("l2r.hf.checkpoints.folders._snapshot", asked := Mock(wraps=_snapshot))
    with pytest.raises(ValueError, match=message) as error:
        local_checkpoint(name, revision=revision)
    assert "\n" not in str(error.value)
    assert asked.called == (name in ("someone/else", NAME))  # a path is none of the hub's


def test_commands_take_a_hub_id_and_leave_the_cache_alone(hub, l2r):
    before = {p: p.stat().st_mtime_ns for p in Path("cache").rglob("*") if p.is_file()}
    ended = l2r("swap", NAME, "rank=2", "--revision", "v1", "--out", "swapped")
    assert ended.code == 0, ended
    small = ("--instances", 4, "--length", 16, "--certify", 0, "--data", "text.txt")
    Path("text.txt").write_text("word " * 400)
    assert "the checkpoint has no tokenizer" in l2r("diagnose", NAME, *small).refusal()
    ended = l2r("landscape", "swapped", "--out", "page.html")
    assert ended.code == 0, ended
    assert "revision is for hub ids" in l2r("landscape", "swapped", "--revision", "x").refusal()
    after = {p: p.stat().st_mtime_ns for p in Path("cache").rglob("*") if p in before}
    assert after == before
