"""The fields of a recipe, their defaults and their limits. Unknown fields are refused.

The router section is read once into a RouterConfig and written out with every field. A router's
options stand in its own file, which imports torch; ``SECTIONS_ONLY`` as the context of a validation
leaves the router out, so that what is wrong elsewhere is said before.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    model_validator,
)

from l2r.errors import InputError
from l2r.files.shared_settings import BalanceVariant, OtherThan, ReadWith, ZVariant, check_read

SECTIONS_ONLY = {"router": False}

if TYPE_CHECKING:
    from l2r.routers import RouterConfig

    LanguageRouter = RouterConfig
    VisionRouter = RouterConfig


def default_router() -> "RouterConfig":
    """Return the router of a language recipe that names none."""
    from l2r.routers import L2RConfig

    return L2RConfig()


def default_vision_router() -> "RouterConfig":
    """Return the router of a vision recipe that names none."""
    from l2r.routers.defaults import vision_router

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
    from l2r.routers.defaults import preset_router

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
    """Return the paper's settings for vision where the section has none."""
    from l2r.routers.defaults import vision_router

    del model
    if "preset" in values:
        raise InputError(
            "preset is for language: on images its setting was not better "
            f"(docs/vision.md); got preset={values['preset']!r}"
        )
    return vision_router(values)


def _written(router: "RouterConfig") -> dict[str, Any]:
    return router.to_dict()


if not TYPE_CHECKING:
    _WRITTEN = PlainSerializer(_written, return_type=dict)
    LanguageRouter = Annotated[Any, PlainValidator(_reader(_language)), _WRITTEN]
    VisionRouter = Annotated[Any, PlainValidator(_reader(_vision)), _WRITTEN]


# What a recipe says of its images, by section; it says nothing of others.
PIXELS = {
    "model": ("image_size", "patch_size", "num_channels"),
    "data": ("mean", "deviation"),
}
CorpusVersion = Literal[1, 2]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Layers = Annotated[int, Field(gt=0, le=2000)]  # far above any model's; each is built by itself


class RecipeSection(BaseModel):
    """Base of all sections: frozen, no unknown fields, no NaN.

    read_with: fields that are read only with some values of others, as in RouterConfig.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    read_with: ClassVar[ReadWith] = {}

    def check_multiple(self, large: str, small: str) -> None:
        """Raise ValueError unless one field is a multiple of another."""
        if getattr(self, large) % getattr(self, small):
            raise InputError(
                f"{large} must be a multiple of {small}; got "
                f"{getattr(self, large)} and {getattr(self, small)}"
            )

    def check_read(self, given: Mapping[str, Any]) -> None:
        """Raise ValueError for a field off its default that was ``given`` and that nothing reads.

        A section that is given whole was written by a run, whose base had what its run did not use.
        """
        fields = type(self).model_fields
        given = {name: values for name, values in given.items() if name in fields}
        for name, values in given.items():
            section = getattr(self, name)
            if isinstance(section, RecipeSection):
                section.check_read(values)
        if fields.keys() - given.keys():
            defaults = {n: fields[n].get_default(call_default_factory=True) for n in given}
            check_read(self, self.read_with, defaults)


def check_experts(model: Any) -> None:
    """Raise ValueError where a token would take more experts than there are."""
    if model.num_experts_per_tok > model.num_experts:
        raise InputError(
            f"num_experts_per_tok must be <= num_experts; got "
            f"{model.num_experts_per_tok} > {model.num_experts}"
        )


class OlmoeSection(RecipeSection):
    """Architecture of the language model; defaults are OLMoE-1B-7B's in the paper's table.

    init_from: folder of a model to start from, such as ``l2r swap --fit`` or a run writes; its
    sizes and its routers must be those of the recipe.
    """

    read_with: ClassVar = {"initializer_range": {"init_from": (None,)}}

    init_from: str | None = None
    hidden_size: PositiveInt = 2048
    num_hidden_layers: Layers = 16
    num_attention_heads: PositiveInt = 16
    intermediate_size: PositiveInt = 1024
    num_experts: PositiveInt = 64
    num_experts_per_tok: PositiveInt = 8
    vocab_size: PositiveInt | None = None  # None: that of the tokenizer
    rms_norm_eps: PositiveFloat = 1e-5
    rope_theta: PositiveFloat = 10000.0
    initializer_range: PositiveFloat = 0.02

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        check_experts(self)
        self.check_multiple("hidden_size", "num_attention_heads")
        size = self.hidden_size // self.num_attention_heads
        if size % 2:  # halves are rotated by positions
            raise InputError(
                f"hidden_size / num_attention_heads must be even; got {self.hidden_size} / "
                f"{self.num_attention_heads} = {size}"
            )
        return self


class TextSection(RecipeSection):
    """Source of tokens: ``tokens`` folders if given, else a corpus built from text.

    corpus: "embedded", or a folder of text files. tokens: folders written by l2r data prepare;
    validation_tokens: the same for validation; tokenizer: its folder or tokenizer.json.
    corpus_version: of the rules by which text is chosen, held out and validated on (docs/data.md).
    """

    read_with: ClassVar = {
        **{
            name: {"tokens": ([],)}
            for name in ("corpus", "vocab_size", "characters_per_domain", "corpus_version")
        },
        "tokenizer": {"tokens": OtherThan([])},
    }

    sequence_length: Annotated[int, Field(ge=8)] = 4096
    corpus: str = "embedded"
    vocab_size: Annotated[int, Field(ge=300)] = 4096
    characters_per_domain: Annotated[int, Field(ge=10_000)] = 4_000_000
    corpus_version: CorpusVersion = 2
    tokens: list[str] = []
    validation_tokens: list[str] = []
    tokenizer: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_versions(cls, values: Any) -> Any:
        """Set version 1 in a section that a run from before versions wrote, which is whole."""
        if not isinstance(values, dict) or values.get("tokens") or "corpus_version" in values:
            return values
        whole = {"corpus", "vocab_size", "characters_per_domain", "tokens", "tokenizer"}
        return {**values, "corpus_version": 1} if whole <= values.keys() else values

    @model_validator(mode="after")
    def _both_splits(self) -> Self:
        if bool(self.tokens) != bool(self.validation_tokens):
            raise InputError("tokens and validation_tokens go together; give both or neither")
        return self


class TrainingSection(RecipeSection):
    """Length and form of training: one of ``steps``, ``tokens`` and ``epochs`` sets the length.

    global_batch and micro_batch count sequences (or images); micro_batch is per rank, and
    gradients are accumulated until global_batch is reached. parallel applies when torchrun
    starts several ranks. ema_decay > 0 keeps a moving average of the weights, evaluated and
    exported too. loss_chunk: tokens whose logits exist at a time, for language; null:
    those of a whole micro-batch. compile: torch.compile of every block but its router. logger is
    told what metrics.jsonl gets; a run may resume with another.
    """

    steps: PositiveInt | None = None
    tokens: PositiveInt | None = None
    epochs: PositiveFloat | None = None
    global_batch: PositiveInt = 1024
    micro_batch: PositiveInt = 1
    precision: Literal["fp32", "bf16"] = "bf16"
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    activation_checkpointing: bool = False
    compile: bool = False
    loss_chunk: PositiveInt | None = None
    clip_norm: PositiveFloat = 1.0
    deterministic: bool = False
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    log_every: PositiveInt = 10
    logger: Literal["tensorboard", "wandb", "trackio", "none"] = "tensorboard"

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        limits = [n for n in ("steps", "tokens", "epochs") if getattr(self, n) is not None]
        if len(limits) != 1:
            raise InputError(f"give exactly one of steps, tokens, epochs; got {limits or 'none'}")
        self.check_multiple("global_batch", "micro_batch")
        if self.compile and self.activation_checkpointing:
            raise InputError(
                "compile must be false with activation_checkpointing=true, in which blocks that "
                "leave their graph for the router are not compiled; got compile=true"
            )
        return self


class OptimizerSection(RecipeSection):
    """AdamW with a warmup and a cosine.

    warmup: in tokens (or samples for images), from warmup_start * lr to lr; then a cosine to
    final * lr at the end. anchor_lr: times lr, the learning rate of the routers' anchors, whose
    directions turn by lr over their norm: L2R's are of norm 1, X-MoE's of sqrt(rank / experts).
    decay_anchors: whether weight decay touches the anchors (the paper does not say). decay_norms:
    whether it touches the gains of norms, every bias, the class token and the position embeddings;
    OLMoE decays everything, DeiT none of these.
    """

    read_with: ClassVar = {
        **{name: {"weight_decay": OtherThan(0)} for name in ("decay_anchors", "decay_norms")},
        "warmup_start": {"warmup": OtherThan(0)},
    }

    lr: PositiveFloat = 4e-4
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    warmup: NonNegativeInt = 300_000_000
    warmup_start: Fraction = 0.1
    final: Fraction = 0.1
    anchor_lr: PositiveFloat = 1.0
    decay_anchors: bool = True
    decay_norms: bool = True


class LossSection(RecipeSection):
    """Weights and variants of the auxiliary losses.

    margin: weight of the margin loss, which asks the k-th expert of a token to score ``margin_gap``
    standard deviations of its scores above the next (``l2r.functional.router_margin_loss``).
    bias_speed: how far the selection bias of routers that have one (router.selection_bias) moves
    against the load after each step (loss-free balancing, arXiv 2408.15664); 0 leaves it as it is.
    balance_scope: tokens that the balance statistics cover. "microbatch": those of one forward
    on one rank, as OLMoE trains; "step": all ranks and all accumulated micro-batches, which
    makes training independent of how a step is cut (accumulation then needs a second forward).
    """

    read_with: ClassVar = {"margin_gap": {"margin": OtherThan(0)}}

    balance: NonNegativeFloat = 0.01
    balance_variant: BalanceVariant = "paper"
    balance_scope: Literal["microbatch", "step"] = "microbatch"
    bias_speed: NonNegativeFloat = 0.0
    z: NonNegativeFloat = 0.001
    z_variant: ZVariant = "paper"
    margin: NonNegativeFloat = 0.0
    margin_gap: PositiveFloat = 0.1


class EvaluationSection(RecipeSection):
    """In-training validation every ``every`` steps (0: only at the end).

    tasks: downstream tasks to run as well, with ``task_limit`` documents each.
    """

    read_with: ClassVar = {"task_limit": {"tasks": OtherThan([])}}

    every: NonNegativeInt = 0
    batch_size: PositiveInt = 8
    max_batches: PositiveInt = 16
    tasks: list[str] = []
    task_limit: PositiveInt = 64


class CheckpointSection(RecipeSection):
    """Checkpoint every ``every`` steps (0: only at the end), and which of them stay on disk.

    keep: the newest. keep_nearest: for each of these numbers of tokens (images in vision), also the
    checkpoint nearest to it, as the paper's Table 14 takes the one nearest to 10B tokens.
    """

    every: NonNegativeInt = 0
    keep: PositiveInt = 2
    keep_nearest: list[PositiveInt] = []


class Recipe(RecipeSection):
    """Fields of every recipe, whatever its task."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    training: TrainingSection
    optimizer: OptimizerSection = OptimizerSection()
    losses: LossSection = LossSection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()


class LanguageRecipe(Recipe):
    """Causal language model on tokens."""

    task: Literal["language"]
    model: OlmoeSection = OlmoeSection()
    router: LanguageRouter = Field(default_factory=default_router)
    data: TextSection = TextSection()

    def model_options(self, vocab_size: int) -> dict[str, Any]:
        """Keyword arguments of L2rOlmoeConfig; ``vocab_size`` is for a recipe that gives none.

        Rows are packed, so that no id stands for padding: its embedding would never be trained.
        """
        options = self.model.model_dump(exclude={"init_from", "rope_theta"})
        return {
            **options,
            "vocab_size": self.model.vocab_size or vocab_size,
            "pad_token_id": None,
            "max_position_embeddings": self.data.sequence_length,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.model.rope_theta},
            "router": self.router,
        }
