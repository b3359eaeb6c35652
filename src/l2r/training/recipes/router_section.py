"""The router section of a recipe: read once into a RouterConfig, written out with every field."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, ValidationInfo

from l2r.routers import RouterConfig
from l2r.routers.preset import preset_router
from l2r.routers.vision_defaults import vision_router

Read = Callable[[Mapping[str, Any], Any], RouterConfig]  # of the values and the model section


def _reader(read: Read) -> Callable[[Any, ValidationInfo], RouterConfig]:
    def validate(values: Any, info: ValidationInfo) -> RouterConfig:
        if isinstance(values, RouterConfig):
            return values
        if not isinstance(values, Mapping):
            raise ValueError(f"must be a section such as {{kind: l2r_sips}}; got {values!r}")
        return read(values, info.data.get("model"))

    return validate


def _language(values: Mapping[str, Any], model: Any) -> RouterConfig:
    if "preset" not in values:
        return RouterConfig.from_dict(values)
    if model is None:
        raise ValueError("preset needs a valid model section")  # whose problem is reported first
    return preset_router(
        values,
        num_experts=model.num_experts,
        hidden_size=model.hidden_size,
        top_k=model.num_experts_per_tok,
    )


def _vision(values: Mapping[str, Any], model: Any) -> RouterConfig:
    """The paper's settings for vision where the section has none."""
    del model
    if "preset" in values:
        raise ValueError(
            "preset is for language: on images its setting was not better "
            f"(docs/evidence.md); got preset={values['preset']!r}"
        )
    return vision_router(values)


_WRITTEN = PlainSerializer(RouterConfig.to_dict, return_type=dict)

LanguageRouter = Annotated[RouterConfig, PlainValidator(_reader(_language)), _WRITTEN]
VisionRouter = Annotated[RouterConfig, PlainValidator(_reader(_vision)), _WRITTEN]
