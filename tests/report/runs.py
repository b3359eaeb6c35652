"""Run folders written by hand, and what a table prints bold."""

import json
import re

import yaml

from l2r.files.folder import RunFolder

PER_STEP = 512  # tokens of a step


def made_run(
    folder,
    *,
    steps=120,
    until=None,
    every=60,
    ce=6.0,
    parameters=1000,
    router_parameters=100,
    training=None,
    validation=None,
    data=None,
    **fields,
):
    """A run of ``steps`` steps that stands at step ``until``, with a record every ten steps.

    Its validation cross-entropy falls by 0.1 a record to ``ce`` at its end. Its balance loss is
    the number of the step.
    """
    run, last = RunFolder(folder), until or steps
    run.create()
    recipe = {"seed": 0, "model": {}, "data": {}, "router": {"kind": folder.name}, **fields}
    budget = {"steps": steps, "tokens": None, "epochs": None, "global_batch": 8, "ema_decay": 0}
    recipe["training"] = {**budget, **(training or {})}
    run.recipe.write_text(yaml.safe_dump(recipe))
    facts = {"parameters": parameters, "router_parameters": router_parameters, "data": data or {}}
    run.write_json(run.environment, facts)
    for step in range(10, last + 1, 10):
        place = {"step": step, "tokens": step * PER_STEP}
        run.append_metrics({"kind": "train", **place, "ce": 6.0, "balance": float(step)})
        if step % every == 0 or step == steps:
            numbers = {"ce/mean": ce + 0.1 * (steps - step) / every}
            measured = validation(step) if validation else numbers
            run.append_metrics({"kind": "validation", **place, **measured})
    if last == steps:
        run.model.mkdir()
        (run.model / "config.json").write_text(json.dumps({}))
    return run


def bold(table):
    """Names (first cells) of the rows whose cell is bold, by column."""
    rows = re.findall(r"<tr>(.*?)</tr>", table.to_html())[1:]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]
    marked = {
        column: [row[0] for row in cells if row[number].startswith("<b>")]
        for number, column in enumerate(table.columns)
    }
    return {column: names for column, names in marked.items() if names}
