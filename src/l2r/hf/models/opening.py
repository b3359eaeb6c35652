"""Notes in config.json by which every loader that lacks this package stops, and names it.

transformers builds a family's own class from any folder of weights, and draws what is missing.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PACKAGE = (
    "The routers of this checkpoint need the Python package l2r-moe (pip install 'l2r-moe[lm]', "
    "then import l2r)"
)
# transformers prints the first where it does not know the model type, before any code is loaded;
# a repository of this name cannot be. The second stands in a field whose type the configuration
# class checks, printing the value: the first of these that it has.
_AUTO_MAP = {"AutoConfig": f"{_PACKAGE}--l2r.Config"}
_FIELDS = ("initializer_range", "tie_word_embeddings")
_SAVED = "l2r_"  # before the name of the field, for its value
_NOTE = f"{_PACKAGE}; open it with an Auto class of transformers or l2r.load_pretrained"


class NeedsPackage:
    """Mixin of configurations whose models need this package: it writes and removes the notes.

    A configuration that has an ``auto_map`` brings its code, and gets none.
    """

    auto_map: Mapping[str, str] = {}  # TRL asks for it where transformers exports no such class

    def to_json_file(self, json_file_path: str | Path, use_diff: bool = True) -> None:
        """Write config.json as transformers does, and the notes."""
        super().to_json_file(json_file_path, use_diff=use_diff)  # type: ignore[misc]
        if self.auto_map:
            return
        path = Path(json_file_path)
        values = json.loads(path.read_text(encoding="utf-8"))
        values["auto_map"] = _AUTO_MAP
        checked = {field.name for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        for field in [name for name in _FIELDS if name in checked][:1]:
            values |= {field: _NOTE, _SAVED + field: getattr(self, field)}
        path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **options: Any) -> Any:
        """Read config.json as transformers does, without the notes."""
        values = dict(config_dict)
        for field in _FIELDS:
            if values.get(field) == _NOTE:
                values[field] = values.pop(_SAVED + field)
        if values.get("auto_map") == _AUTO_MAP:
            del values["auto_map"]
        return super().from_dict(values, **options)  # type: ignore[misc]
