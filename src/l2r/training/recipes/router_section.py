"""The router section of a recipe: read once into a RouterConfig, written out with every field.

A router's options stand in its own file, which imports torch. ``SECTIONS_ONLY`` as the context of a
validation leaves the router out, so that what is wrong elsewhere is said before.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import PlainSerializer, PlainValidator, ValidationInfo

from l2r.errors import InputError

SECTIONS_ONLY = {"router": False}

if TYPE_CHECKING:
    from l2r.routers import RouterConfig

    LanguageRouter = RouterConfig
    VisionRouter = RouterConfig


def default_router() -> "RouterConfig":
    """The router of a language recipe that names none."""
    from l2r.routers import L2RConfig

    return L2RConfig()


def default_vision_router() -> "RouterConfig":
    """The router of a vision recipe that names none."""
    from l2r.routers.vision_defaults import vision_router

    return vision_router({"kind": "l2r_sips"})


Read = Callable[[Mapping[str, Any], Any], "RouterConfig"]  # of the values and the model section


def _reader(read: Read) -> Callable[[Any, ValidationInfo], Any]:
    def validate(values: Any, info: ValidationInfo) -> Any:
        if info.context == SECTIONS_ONLY:
            return values
        from l2r.routers import RouterConfig

        if isinstance(values, RouterConfig):
            return values
        if not isinstance(values, Mapping):
            raise InputError(f"must be a section such as {{kind: l2r_sips}}; got {values!r}")
        return read(values, info.data.get("model"))

    return validate


def _language(values: Mapping[str, Any], model: Any) -> "RouterConfig":
    from l2r.routers import RouterConfig
    from l2r.routers.preset import preset_router

    if "preset" not in values:
        return RouterConfig.from_dict(values)
    if model is None:
        raise InputError("preset needs a valid model section")  # whose problem is reported first
    return preset_router(
        values,
        num_experts=model.num_experts,
        hidden_size=model.hidden_size,
        top_k=model.num_experts_per_tok,
    )


def _vision(values: Mapping[str, Any], model: Any) -> "RouterConfig":
    """The paper's settings for vision where the section has none."""
    from l2r.routers.vision_defaults import vision_router

    del model
    if "preset" in values:
        raise InputError(
            "preset is for language: on images its setting was not better "
            f"(docs/evidence.md); got preset={values['preset']!r}"
        )
    return vision_router(values)


def _written(router: "RouterConfig") -> dict[str, Any]:
    return router.to_dict()


if not TYPE_CHECKING:
    _WRITTEN = PlainSerializer(_written, return_type=dict)
    LanguageRouter = Annotated[Any, PlainValidator(_reader(_language)), _WRITTEN]
    VisionRouter = Annotated[Any, PlainValidator(_reader(_vision)), _WRITTEN]
