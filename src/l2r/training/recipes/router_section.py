"""The router section of a recipe: read once into a RouterConfig, written out with every field."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator

from l2r.routers import RouterConfig
from l2r.routers.vision import vision_router

Read = Callable[[Mapping[str, Any]], RouterConfig]


def _reader(read: Read) -> Callable[[Any], RouterConfig]:
    def validate(values: Any) -> RouterConfig:
        if isinstance(values, RouterConfig):
            return values
        if not isinstance(values, Mapping):
            raise ValueError(f"must be a section such as {{kind: l2r_sips}}; got {values!r}")
        return read(values)

    return validate


_WRITTEN = PlainSerializer(RouterConfig.to_dict, return_type=dict)

LanguageRouter = Annotated[RouterConfig, PlainValidator(_reader(RouterConfig.from_dict)), _WRITTEN]
# The paper's settings for vision hold where the section has none.
VisionRouter = Annotated[RouterConfig, PlainValidator(_reader(vision_router)), _WRITTEN]
