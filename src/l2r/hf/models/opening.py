"""Notes in config.json by which every loader that lacks this package stops, and names it.

transformers builds a family's own class from any folder of weights, and draws what is missing.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PACKAGE = (
    "The routers of this checkpoint need the Python package l2r-moe (pip install 'l2r-moe[lm]', "
    "then import l2r)"
)
# transformers prints the first where it does not know the model type, before any code is loaded;
# a repository of this name cannot be. The second stands in a field that the configuration class
# of every family checks for a number, and prints.
_AUTO_MAP = {"AutoConfig": f"{_PACKAGE}--l2r.Config"}
_FIELD, _SAVED = "initializer_range", "l2r_initializer_range"
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
        values |= {"auto_map": _AUTO_MAP, _FIELD: _NOTE, _SAVED: getattr(self, _FIELD)}
        path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **options: Any) -> Any:
        """Read config.json as transformers does, without the notes."""
        values = dict(config_dict)
        if values.get(_FIELD) == _NOTE:
            values[_FIELD] = values.pop(_SAVED)
            del values["auto_map"]
        return super().from_dict(values, **options)  # type: ignore[misc]
