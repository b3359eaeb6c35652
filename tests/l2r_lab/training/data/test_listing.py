"""Which files count as shards, and what an unreachable hub says."""

from functools import partial
from importlib import import_module

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import DatasetInfo
from huggingface_hub.utils import hf_raise_for_status

from l2r.text import UnreachableError, streams
from l2r_lab.training.data.listing import by_domain, folder_listing, shard_source
from l2r_lab.training.data.olmoe_mix import ShardPlan


def test_shards_are_grouped_by_folder_and_sorted():
    names = [
        "README.md", "olmoe-mix.png", ".gitattributes", "data/readme.json.gz",
        "data/wiki/wiki-0001.json.gz", "data/wiki/wiki-0000.json.gz", "data/wiki/notes.md",
        "data/open-web-math/open-web-math-train-0012.json.gz", "data/open-web-math/041.jsonl.gz",
        "data/dclm/dclm-0000.json.zst", "data/dclm/deep/er.json.zst",
    ]  # fmt: skip
    assert by_domain(names) == {
        "dclm": ["data/dclm/dclm-0000.json.zst"],
        "open-web-math": [
            "data/open-web-math/041.jsonl.gz",
            "data/open-web-math/open-web-math-train-0012.json.gz",
        ],
        "wiki": ["data/wiki/wiki-0000.json.gz", "data/wiki/wiki-0001.json.gz"],
    }


def test_local_folder_may_leave_data_out_and_hidden_files_do_not_count(tmp_path):
    for name in ("wiki/a.jsonl", "wiki/.b.jsonl", "data/code/c.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert folder_listing(tmp_path) == {"wiki": ["wiki/a.jsonl"], "code": ["data/code/c.parquet"]}


def test_folder_without_shards_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must hold text files, ending in \.txt \.json\.gz"):
        folder_listing(tmp_path)
    with pytest.raises(ValueError, match="data folder must exist"):
        folder_listing(tmp_path / "missing")


def test_unreachable_hub_is_one_clear_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="cannot list allenai/x on the Hugging Face hub") as caught:
        shard_source("hub", ShardPlan("allenai/x", 1, 0, ()))
    assert "name a local folder" in str(caught.value)


def test_hub_listing_is_grouped_and_pinned_to_its_commit(monkeypatch):
    def dataset_info(self, repository, revision=None, timeout=None):
        assert (repository, revision) == ("a/b", "main")
        return DatasetInfo(
            id=repository,
            sha="c0ffee",
            siblings=[{"rfilename": "data/wiki/w.json.gz"}, {"rfilename": "README.md"}],
        )

    monkeypatch.setattr(HfApi, "dataset_info", dataset_info)
    source = shard_source("hub", ShardPlan("a/b", 1, 0, (), revision="main"))
    assert source.files == {"wiki": ["data/wiki/w.json.gz"]}
    assert source.prefix == "hf://datasets/a/b@c0ffee/"
    assert source.origin == {"shards": "a/b", "revision": "c0ffee"}


# The hub's own library of HTTP, which changes with its version.
HTTP = import_module(HfHubHTTPError.__mro__[1].__module__.partition(".")[0])
PASSING = (
    ConnectionResetError("reset"),
    HTTP.ReadTimeout("late"),
    HTTP.ConnectTimeout("no answer"),
)


def failing(monkeypatch, *errors):
    """A hub that fails once for each error and then answers; the number of times it was asked."""
    asked, left = [], list(errors)

    def dataset_info(self, repository, revision=None, timeout=None):
        asked.append(timeout)
        if left and callable(left[0]):
            left.pop(0)()
        if left:
            raise left.pop(0)
        return DatasetInfo(id=repository, sha="c0ffee", siblings=[{"rfilename": "wiki/w.jsonl"}])

    monkeypatch.setattr(HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(streams, "_WAITS", (0.0, 0.0, 0.0))
    return asked


def test_a_listing_survives_resets_and_timeouts(monkeypatch):
    asked = failing(monkeypatch, *PASSING)
    source = shard_source("hub", ShardPlan("a/b", 1, 0, ()))
    assert source.files == {"wiki": ["wiki/w.jsonl"]}
    assert len(asked) == 4 and all(asked)  # and none waits for ever


def test_a_hub_that_stays_away_is_named_with_its_cause(monkeypatch):
    asked = failing(monkeypatch, *PASSING * 2)
    with pytest.raises(UnreachableError, match=r"list of files of a/b .*: reset; run the command"):
        shard_source("hub", ShardPlan("a/b", 1, 0, ()))
    assert len(asked) == 4


def test_a_dataset_that_is_not_there_is_asked_for_once(monkeypatch):
    if not hasattr(HTTP, "Client"):
        pytest.skip("a hub older than 1.0 answers by another library")
    request = HTTP.Request("GET", "https://huggingface.co/api/datasets/a/b")
    gone = HTTP.Response(404, request=request, headers={"X-Error-Code": "RepoNotFound"})
    asked = failing(monkeypatch, partial(hf_raise_for_status, gone))
    with pytest.raises(ValueError, match="cannot list a/b on the Hugging Face hub"):
        shard_source("hub", ShardPlan("a/b", 1, 0, ()))
    assert len(asked) == 1
