"""The commands of docs/re-run-the-paper.md, as they stand there, at the page's rehearsal sizes."""

import gzip
import json
import os
import re
import subprocess
from itertools import groupby, repeat
from operator import itemgetter
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow
import pytest

from l2r.training.data.manifest import read_manifest
from l2r.training.data.olmoe_mix import OLMOE_MIX, parse_tokens, plan_subset
from l2r.training.data.split import Split
from l2r.training.data.tokens import read_documents
from l2r.training.recipes.load import load_recipe
from tests.processes import Running, in_turn

PAGE = Path(__file__).resolve().parents[2] / "docs" / "re-run-the-paper.md"
BLOCK = re.compile(r"^( *)```bash\n(.*?)^ *```", re.S | re.M)
DATA = Path("data/olmoe-mix-10B")
ROUTERS = ("linear", "l2r-sips")


def sections():
    """Code blocks of the page by heading, without their indentation."""
    parts = re.split(r"^## (.*)\n", PAGE.read_text(), flags=re.M)
    return {
        title: [
            "".join(line[len(indent) :] for line in code.splitlines(keepends=True))
            for indent, code in BLOCK.findall(text)
        ]
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def settings_of(block):
    """The shell's own reading of a block of assignments."""
    done = subprocess.run(
        ["bash", "-c", f"set -a; {block}\nenv -0"],
        capture_output=True,
        check=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )
    given = dict(line.split("=", 1) for line in done.stdout.split("\0") if "=" in line)
    return {name: given[name] for name in re.findall(r"^([A-Z_]+)=", block, re.M)}


FULL, *COMMANDS = sections()["Language: OLMoE-1B-7B, 10B tokens"]
(REHEARSAL,) = sections()["Rehearse it first"]


def write_mix(folder, plan):
    """All 2,903 names of the mixture in the hub's formats; the planned shards hold text."""
    endings = {"dclm": (".json.zst",), "open-web-math": (".json.gz", ".jsonl.gz")}
    texts = [text for _, text in sorted(topics.items())]
    position = 0
    for domain, planned in zip(OLMOE_MIX.domains, plan.domains, strict=True):
        place = folder / "data" / domain.name
        place.mkdir(parents=True)
        chosen = {shard.index for shard in planned.shards}
        for number in range(domain.shards):
            kinds = endings.get(domain.name, (".json.gz",))
            path = place / f"{domain.name}-{number:04d}{kinds[number % len(kinds)]}"
            path.touch()
            if number in chosen:
                part = [texts[(position + i) % len(texts)][:600] for i in range(40)]
                rows = [
                    {"id": f"{number}-{i}", "text": t, "added": "2024"} for i, t in enumerate(part)
                ]
                data = "".join(json.dumps(row) + "\n" for row in rows).encode()
                zstd = path.suffix == ".zst"
                packed = (
                    pyarrow.compress(data, "zstd", asbytes=True) if zstd else gzip.compress(data)
                )
                path.write_bytes(packed)
                position += 7
    return folder


def test_full_size_settings_are_the_papers():
    full, rehearsal = settings_of(FULL), settings_of(REHEARSAL)
    assert list(full) == list(rehearsal), "the rehearsal changes the same settings, and no others"
    assert full["SIZES"] == "" and full["SUBSET"] == "200B" and "1024" in full["EVALUATE"]
    plan = plan_subset(parse_tokens(full["SUBSET"]))
    split = Split(hold_out=float(full["HOLD_OUT"]), share=float(full["SHARE"]))
    made = plan.tokens * (1 - split.hold_out) * split.share
    for router in ROUTERS:
        recipe = load_recipe(f"olmoe-1b-7b/{router}", [])
        assert recipe.training.tokens <= made, "no document should be seen twice"
        folders = split.folders(DATA)
        assert recipe.data.tokens == [str(folders["train"])]
        assert recipe.data.validation_tokens == [str(folders["validation"])]
        assert recipe.data.tokenizer == str(DATA / "tokenizer")
    # Sizes, and nothing that says where data lies or what is trained.
    changed = {change.partition("=")[0] for change in rehearsal["SIZES"].split()}
    sections = {key.partition(".")[0] for key in changed}
    assert sections <= {"model", "data", "training", "optimizer", "evaluation"}
    assert {key for key in changed if key.startswith("data.")} == {"data.sequence_length"}


def torchrun(words):
    from torch.distributed.run import main

    main(words)


def commands_of(script):
    """What the shell would run: its words after expansion, loops unrolled.

    Both programs are functions that print their words; any other would not be found.
    """
    record = "".join(
        f"{name}() {{ printf '%s\\0' {name} \"$@\"; printf '\\n\\0'; }}\n"
        for name in ("l2r", "torchrun")
    )
    done = subprocess.run(
        ["bash", "-c", f"set -eu\nPATH=\n{record}{script}"],
        capture_output=True,
        check=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )
    return [line.split("\0")[:-1] for line in done.stdout.split("\n\0") if line]


@pytest.mark.slow("a chain of commands")
def test_the_commands_of_the_page_run_from_plan_to_report(tmp_path, monkeypatch):
    plan = plan_subset(parse_tokens(settings_of(REHEARSAL)["SUBSET"]))
    write_mix(tmp_path / "mix", plan)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    commands = commands_of("\n".join([REHEARSAL, *COMMANDS]))
    assert [words[:2] for words in commands if words[0] == "l2r"] == [
        ["l2r", "data"], ["l2r", "data"], ["l2r", "eval"], ["l2r", "diagnose"], ["l2r", "report"]
    ]  # fmt: skip
    shown = ""
    for program, group in groupby(commands, key=itemgetter(0)):
        arguments = [words[1:] for words in group]
        if program == "torchrun":  # the loop of the page: its runs know nothing of each other
            places = (tmp_path / f"torchrun-{number}" for number in range(len(arguments)))
            running = [Running(*each) for each in zip(places, repeat(torchrun), arguments)]
        else:
            running = [Running(tmp_path / "l2r", in_turn, arguments)]
        shown += "".join(each.succeed() for each in running)

    parts = {part: read_manifest(tmp_path / DATA / part) for part in ("train", "validation")}
    domains = {domain.name for domain in OLMOE_MIX.domains}
    assert all(set(manifest.by_domain()) == domains for manifest in parts.values())
    seen, held_out = (
        {tuple(ids) for _, ids in read_documents(tmp_path / DATA / part)} for part in parts
    )
    assert seen.isdisjoint(held_out)

    for router in ROUTERS:
        run = tmp_path / "runs" / "olmoe-1b-7b" / router
        assert (run / "model" / "tokenizer.json").is_file()
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        last = {record["kind"]: record for record in records}
        assert {f"ce/{domain}" for domain in domains} & set(last["validation"])
        assert "ce/mean" in last["validation"] and last["train"]["step"] == 4
        assert {"mmlu", "hellaswag"} <= set(last["tasks"])
        evaluation = json.loads((run / "evaluation.json").read_text())
        assert evaluation["accuracy"]["Overall"] is not None
        assert evaluation["settings"]["requests"] == 8
    for words in ("Subset of allenai/OLMoE-mix-0924", "validation", "l2r-sips - linear", "Overall"):
        assert words in shown, words
    for page in ("diagnosis/index.html", "runs/olmoe-1b-7b/report.html"):
        assert "l2r-sips" in (tmp_path / page).read_text()
