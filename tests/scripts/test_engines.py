"""The table of docs/engines.md is what the tests of the engines said."""

import json
import runpy
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "others" / "engines.py"

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="b"><properties>
  <property name="engine" value="megatron:TP"/><property name="engine" value="megatron:EP"/>
  <property name="version" value="1.2"/></properties></testcase>
<testcase classname="a" name="c"><properties><property name="engine" value="megatron:TP"/>
  </properties><failure message="no"/></testcase>
<testcase classname="a" name="d"><properties><property name="engine" value="megatron:FSDP"/>
  </properties><skipped message="not here"/></testcase>
<testcase classname="a" name="e"><properties><property name="engine" value="megatron:TP"/>
  </properties></testcase>
</testsuite></testsuites>"""


def test_a_column_is_yes_when_all_its_tests_passed_and_a_skipped_one_says_nothing(tmp_path):
    outcomes = runpy.run_path(str(SCRIPT))["outcomes"]
    (tmp_path / "results.xml").write_text(REPORT)
    version, found, failed = outcomes(tmp_path / "results.xml")
    assert version == "1.2" and found == {"TP": "no", "EP": "yes"} and failed == ["a::c"]
    assert outcomes(tmp_path / "none.xml") == ("", {}, [])


def test_every_version_of_an_engine_has_a_row(tmp_path):
    read = runpy.run_path(str(SCRIPT))["read"]
    for name, version in (("megatron", "1.2"), ("megatron-0.19", "0.19.2")):
        (tmp_path / name).mkdir()
        report = REPORT.replace('value="1.2"', f'value="{version}"')
        (tmp_path / name / "results.xml").write_text(report)
    page = {
        "snippets": "3 of 4", "logits": "5.7e-07", "problem": "ValueError: no", "absent": "",
        "minutes": "4 + 1", "size": "2.0 GB",
    }  # fmt: skip
    (tmp_path / "megatron" / "page.json").write_text(json.dumps(page))
    (tmp_path / "torchtitan").mkdir()
    absent = page | {"absent": "the install failed", "problem": "no wheel"}
    (tmp_path / "torchtitan" / "page.json").write_text(json.dumps(absent))
    rows, failed = read(
        tmp_path, ["olmo-core", "megatron", "megatron-0.19", "megatron-0.18", "torchtitan"]
    )
    assert [row[0] for row in rows] == [
        "ai2-olmo-core", "megatron-core 1.2", "megatron-core 0.19.2", "megatron-core 0.18",
        "torchtitan",
    ]  # fmt: skip
    assert rows[1][5:] == rows[2][5:] and "yes" in rows[1] and "no" in rows[1]
    assert rows[1][1:5] == ("3 of 4", "5.7e-07", "4 + 1", "2.0 GB")
    assert rows[2][1:5] == rows[3][1:5] == ("not run",) * 4
    assert rows[4][1:5] == ("the install failed", "none", "none", "none")
    assert failed == [
        "snippets of megatron: ValueError: no", "a::c", "a::c", "snippets of torchtitan: no wheel"
    ]  # fmt: skip
