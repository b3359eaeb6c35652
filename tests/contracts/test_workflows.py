"""The workflows say what the Makefile, the package and this shell can do."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import l2r
from l2r.cli.extras import FOR_DEVELOPMENT

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
INSTALL = ROOT / "docs" / "index.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def steps(path):
    jobs = yaml.safe_load(path.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def commands():
    """Every shell line of every job, expressions of the workflow language left out."""
    lines = [step["run"] for path in WORKFLOWS for step in steps(path) if "run" in step]
    assert len(lines) >= 7
    return lines


def test_there_is_a_workflow_for_tests_documentation_families_and_releases():
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "families", "release"]


@pytest.mark.parametrize("script", commands())
def test_a_shell_line_parses_and_its_targets_exist(script):
    checked = subprocess.run(
        ["bash", "-n"], input=script, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    targets = re.search(r"^\.PHONY: (.+)$", MAKEFILE, re.M).group(1).split()
    for target in re.findall(r"\bmake ([\w-]+)", script):
        assert target in targets and re.search(rf"^{target}:", MAKEFILE, re.M), target
    for program, words in re.findall(r"\.venv/bin/(\S+)(.*)", script):
        module = re.match(r" -m ([\w.]+)", words) if program == "python" else None
        if module is None:
            assert program in PROJECT["scripts"], program
        else:
            assert (ROOT / f"{module[1].replace('.', '/')}.py").is_file(), module[1]


def test_the_commands_of_the_page_of_installation_are_run():
    promised = set(re.findall(r"`make (\w+)`", INSTALL.read_text()))
    run = {target for line in commands() for target in re.findall(r"\bmake ([\w-]+)", line)}
    assert promised >= {"test", "demo"} and promised | {"lint", "site", "dist"} <= run


def test_the_matrix_has_the_oldest_python_arm_and_macos():
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]
    matrix = job["strategy"]["matrix"]
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert oldest in matrix["python"] and all(isinstance(v, str) for v in matrix["python"])
    systems = [*matrix["os"], *(entry["os"] for entry in matrix["include"])]
    assert any(s.endswith("-arm") for s in systems) and any("macos" in s for s in systems)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_gives_no_more_rights_than_needed(path):
    """Read by default, writing only where a job publishes; actions by commit, not by name."""
    flow = yaml.safe_load(path.read_text())
    assert flow["permissions"] == {"contents": "read"}
    for name, job in flow["jobs"].items():
        assert "timeout-minutes" in job, name
        assert set(job.get("permissions", {})) <= {"pages", "id-token"}, name
    for step in steps(path):
        action = step.get("uses", "")
        if action and not action.startswith("pypa/"):  # a branch that PyPA asks to follow
            assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action), action


def test_hooks_run_the_programs_of_make_lint():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    programs = {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in hooks}
    lint = re.search(r"^lint:.*\n((?:\t.+\n)+)", MAKEFILE, re.M).group(1)
    assert programs - {"make"} == set(re.findall(r"\$\(BIN\)/(\S+)", lint))


def test_the_wheel_that_is_installed_is_the_one_that_make_dist_builds():
    (wheel,) = re.findall(r"\S*l2r_moe-\S+?\.whl", INSTALL.read_text())
    assert wheel == f"'dist/l2r_moe-{l2r.__version__}-py3-none-any.whl"


def test_the_page_of_installation_lists_every_extra_that_is_not_for_development():
    listed = re.findall(r"^\| `([a-z-]+)` \|", INSTALL.read_text(), re.M)
    assert listed == [e for e in PROJECT["optional-dependencies"] if e not in FOR_DEVELOPMENT]


def test_what_make_test_leaves_out_make_test_slow_runs_and_ci_runs_both():
    fast, slow = (
        re.search(rf"^{target}: .*\n\t(.+)$", MAKEFILE, re.M)[1] for target in ("test", "test-slow")
    )
    assert fast.replace('-m "not slow"', "-m slow") == slow != fast
    workflow = [step.get("run") for step in steps(ROOT / ".github/workflows/ci.yml")]
    for script in (workflow, (ROOT / ".ci" / "run").read_text().splitlines()):
        assert {"make test", "make test-slow", "make lint"} <= set(script)


def test_every_slow_mark_says_why():
    files = sorted((ROOT / "tests").rglob("*.py"))
    marks = [mark for file in files for mark in re.findall(r"mark\.slow\b.?.?", file.read_text())]
    assert len(marks) > 50 and {mark for mark in marks if mark != 'mark.slow("'} <= {
        "mark.slow(w"  # tests/tiers.py passes it on
    }
