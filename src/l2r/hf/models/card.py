"""The model card, README.md of a saved model: what is known of it and nothing else.

A card of ours ends with the checksum of its text. Edited cards, and those of others, are kept, with
a warning.
"""

import hashlib
import re
import warnings
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch.distributed as dist
from huggingface_hub import HfApi, ModelCard, ModelCardData
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
)

from l2r.files.atomic import write_text
from l2r.files.wording import one_cell
from l2r.hf.models.lossless import check_save
from l2r.hf.models.opening import preparing_code
from l2r.routers import Router
from l2r.routers.selection_rule import FAMILY_FIELDS

CARD = "README.md"
_MARK = "<!-- Written by l2r-moe; edited cards are not overwritten (checksum {sum}) -->\n"
_MARK_0_3 = "<!-- Written by l2r-moe; kept as it is once its text has another sum than {sum} -->\n"
_MARKED = re.compile(
    "(?:"
    + "|".join(re.escape(m).replace(r"\{sum\}", "([0-9a-f]{64})") for m in (_MARK, _MARK_0_3))
    + r")\Z"
)
_TAGS = {  # Auto classes, each with its pipeline_tag
    AutoModelForCausalLM: "text-generation",
    AutoModelForImageTextToText: "image-text-to-text",
    AutoModelForTokenClassification: "token-classification",
    AutoModelForImageClassification: "image-classification",
}
_UPLOAD = ("private", "token", "revision", "create_pr", "commit_message", "commit_description")


class Loading(NamedTuple):
    """Instructions to load a saved model: ``library_name`` of the card, and a section of it."""

    library: str
    text: str


class SavesCard:
    """A model class that writes its card; stands before transformers' own in the bases."""

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        push_to_hub: bool = False,
        **options: Any,
    ) -> None:
        """Save as transformers does, and write a model card. ``push_to_hub`` uploads the folder."""
        check_save(self, **options)
        folder = Path(save_directory)
        repo_id = options.pop("repo_id", folder.name)
        upload = _taken(options, _UPLOAD) if push_to_hub else {}
        options |= {"is_main_process": is_main_process, "state_dict": state_dict}
        super().save_pretrained(save_directory, **options)  # type: ignore[misc]
        if is_main_process and _is_first_rank():
            write_card(folder, self)
            if push_to_hub:
                upload_model(folder, repo_id, **upload)

    def push_to_hub(
        self, repo_id: str, *, tags: str | list[str] | None = None, **options: Any
    ) -> Any:
        """Upload as transformers does, with a model card unless a person wrote the repository's."""
        if tags:
            self.add_model_tags(tags)  # type: ignore[attr-defined]
        upload = _taken(options, _UPLOAD)
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder, **options)
            return upload_model(Path(folder), repo_id, **upload) if _is_first_rank() else None


def write_card(
    folder: Path, model: Any, sections: Sequence[str] = (), loading: Loading | None = None
) -> None:
    """Write the card of a saved model into its folder; warn if an edited one is kept.

    ``sections`` say in Markdown how the model was made and what was measured of it.
    """
    path = folder / CARD
    if path.is_file() and not is_untouched(path.read_text(encoding="utf-8", errors="replace")):
        _warn(str(path), "remove it and save again for a new one")
        return
    write_text(path, _card_text(folder, model, sections, loading))


def is_untouched(text: str) -> bool:
    """Say whether a card is one of ours that nobody has edited."""
    mark = _MARKED.search(text)
    return mark is not None and mark[mark.lastindex or 0] == _sum(text[: mark.start()])


def _card_text(folder: Path, model: Any, sections: Sequence[str], loading: Loading | None) -> str:
    auto = auto_class(model)
    loading = loading or _loading(folder, model.config, auto)
    groups = _router_groups(model)
    kinds = sorted({router.config.kind for router in groups.values()})
    data = ModelCardData(
        library_name=loading.library,
        license="unknown",
        pipeline_tag=_TAGS.get(auto),
        tags=["mixture-of-experts", "l2r", *kinds, *(model.model_tags or [])],
    )
    routers = sum(
        p.numel() for m in model.modules() if isinstance(m, Router) for p in m.parameters()
    )
    parts = [
        f"# {type(model).__name__} with {' and '.join(kinds) or 'no'} routers",
        f"{model.num_parameters():,} parameters, {routers:,} of them in routers.",
        *(_router_section(layers, router) for layers, router in groups.items()),
        f"## How to load it\n\n{loading.text}",
        *sections,
        _limits(made=bool(sections)),
    ]
    body = "\n\n".join(parts)
    text = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n\n").content
    return text + _MARK.format(sum=_sum(text))


def table(rows: Sequence[tuple[str, Any]], head: tuple[str, str]) -> str:
    """Return a Markdown table of names and values."""
    shown = [
        (n, f"{v:.4g}" if isinstance(v, float) else f"{v:,}" if type(v) is int else v)
        for n, v in rows
    ]
    lines = [f"| {one_cell(name)} | {one_cell(str(value))} |" for name, value in shown]
    return "\n".join([f"| {head[0]} | {head[1]} |", "|---|---|", *lines])


def upload_model(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
) -> Any:
    """Upload a saved model in one commit; keep an edited card that is on the hub."""
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    skipped: list[str] = []
    if is_untouched((folder / CARD).read_text(encoding="utf-8")):
        there = api.file_exists(repo_id, CARD, revision=revision)
        theirs = Path(api.hf_hub_download(repo_id, CARD, revision=revision)) if there else None
        if theirs and not is_untouched(theirs.read_text(encoding="utf-8", errors="replace")):
            skipped = [CARD]
            _warn(f"{CARD} of {repo_id}", "remove it there and push again for a new one")
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        ignore_patterns=skipped,
        revision=revision,
        create_pr=create_pr,
        commit_message=commit_message or "Upload model",
        commit_description=commit_description,
    )


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _taken(options: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: options.pop(name) for name in names if name in options}


def _warn(card: str, remedy: str) -> None:
    message = f"{card} was edited, or not written by l2r-moe, and is kept; {remedy}"
    warnings.warn(message, stacklevel=3)


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _router_groups(model: Any) -> dict[str, Router]:
    """Return a router of each kind and size, by the layers that have it."""
    alike: dict[str, list[tuple[str, Router]]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Router):
            layer = next((part for part in path.split(".") if part.isdigit()), path)
            alike.setdefault(f"{module.extra_repr()} {module.selection}", []).append(
                (layer, module)
            )
    return {", ".join(layer for layer, _ in layers): layers[0][1] for layers in alike.values()}


def _router_section(layers: str, router: Router) -> str:
    settings: dict[str, Any] = {"hidden size": router.hidden_size, "experts": router.num_experts}
    settings["experts per token"] = router.top_k
    config = router.config.to_dict()
    if router.selection.family:
        settings["selection"] = _selection_of(router)
        config = {name: value for name, value in config.items() if name not in FAMILY_FIELDS}
    settings |= {f"`{name}`": value for name, value in config.items()}
    title = f"## Router of layer{'s' if ',' in layers else ''} {layers}"
    return f"{title}\n\n{table(list(settings.items()), ('setting', 'value'))}"


def _selection_of(router: Router) -> str:
    """Name the family whose rule chooses, and the settings of the rule."""
    rule = router.selection
    always = ("gate", "normalize")
    settings = {
        field.name: getattr(rule, field.name)
        for field in fields(rule)
        if field.name in always or getattr(rule, field.name) != field.default
    }
    family = settings.pop("family")
    return f"that of {family}: " + ", ".join(f"{n} {value}" for n, value in settings.items())


def _loading(folder: Path, config: Any, auto: Any) -> Loading:
    name = auto.__name__
    code = f"from transformers import {name}\n\nmodel = {name}.from_pretrained({{}})"
    files = [
        place.partition(".")[0] + ".py"
        for name, place in (getattr(config, "auto_map", None) or {}).items()
        if name not in preparing_code(config.auto_map)
    ]
    if files and all((folder / file).is_file() for file in files):
        call = python_block(code.format('"FOLDER", trust_remote_code=True'))
        text = f"The router's code is in this folder; torch and transformers are enough:\n\n{call}"
        return Loading("transformers", text)
    code = f"import l2r  # transformers then knows the model type\n{code}"
    alone = "A copy that needs transformers alone is written by `l2r export FOLDER --out COPY`"
    if auto is AutoModelForCausalLM:
        alone += ", one program by `l2r export FOLDER --format onnx --out COPY`"
    elif auto in (AutoModel, AutoModelForImageClassification):
        alone = "There is no form of it that loads without the package"
    call = python_block(code.format('"FOLDER"'))
    return Loading(
        "l2r-moe", f"With the package (`pip install 'l2r-moe[lm]'`):\n\n{call}\n\n{alone}."
    )


def auto_class(model: Any) -> Any:
    """Return the Auto class of transformers that opens a saved model as its own class."""
    kind, config = type(model), type(model.config)
    mapped = (auto for auto in _TAGS if auto._model_mapping.get(config, None) is kind)
    with_code = AutoModelForCausalLM if kind.__name__.endswith("ForCausalLM") else AutoModel
    return next(mapped, with_code)


def python_block(code: str) -> str:
    """Code of a card."""
    return f"```python\n{code}\n```"


def _limits(*, made: bool) -> str:
    lines = [] if made else ["How the weights were made is not recorded here."]
    lines += [
        "Nobody has checked its outputs for truth, bias or harm.",
        "The license of the weights is for who publishes them to say: set `license` above.",
    ]
    return "\n".join(["## Limits", "", *(f"- {line}" for line in lines)])
