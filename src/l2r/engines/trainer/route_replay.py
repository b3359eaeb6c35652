"""Sampled routes replayed in the loss of TRL's GRPO trainer.

    trainer = GRPOTrainer(model=model, args=args, reward_funcs=reward, train_dataset=prompts, ...)
    replayed = add_route_replay(trainer, sampler="bf16")
    trainer.train()

``generate`` of the model runs in a copy in the sampler's arithmetic and is recorded; a vLLM in the
trainer's process records by itself, and its answers are read. The loss of the sampled rows then
takes the recorded experts, and its policy ratio is against the sampler's own log-probabilities.
Follows the rows through TRL's shuffling and splitting of a batch.

Shape letters: B sequences, W columns of prompt and completion, G generated tokens.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from l2r.analysis.routes import in_other_arithmetic
from l2r.errors import InputError
from l2r.files.mismatch import ARITHMETICS
from l2r.hf.routes import Routes, fingerprint_of, from_vllm, record, replay, unwrapped_model
from l2r.routers.temporary import replaced

ROWS = "sampled_route"  # number of each row among all sampled sequences, in the trainer's batches
_METHODS = ("compute_loss", "_generate_and_score_completions")


def add_route_replay(
    trainer: Any, *, sampler: str | None = None, replays: bool = True
) -> "RouteReplay":
    """Let ``trainer``, a TRL GRPOTrainer, replay sampled routes.

    sampler: arithmetic of the sampling, bf16, int8 or fp8, in a copy of the model that is made
    anew for each generation; None samples with the model itself, or with vLLM where
    ``use_vllm`` is set. vLLM must be in this process (``vllm_mode="colocate"``) and be made with
    ``enable_return_routed_experts``, as docs/routes.md shows. replays: False records and compares
    with the sampler's log-probabilities, and lets the loss choose its own experts.

    Raises ValueError for another trainer, for a vLLM whose answers have no routes (TRL's server,
    several ranks for one model), for another sampler, and for a model without a supported router.
    """
    if sampler is not None and sampler not in ARITHMETICS:
        allowed = ", ".join(ARITHMETICS)
        raise InputError(f"sampler must be None or one of {allowed}; got sampler={sampler!r}")
    missing = [name for name in _METHODS if not callable(getattr(trainer, name, None))]
    if missing:
        raise InputError(
            f"trainer must be TRL's GRPOTrainer, with {' and '.join(_METHODS)}; "
            f"{type(trainer).__name__} has no {missing[0]}"
        )
    if getattr(trainer, "use_vllm", False):
        _check_vllm(trainer, sampler)
    return RouteReplay(trainer, sampler, replays)


def _check_vllm(trainer: Any, sampler: str | None) -> None:
    if sampler is not None:
        raise InputError(f"sampler must be None with use_vllm=True; got sampler={sampler!r}")
    if trainer.vllm_mode != "colocate":
        raise InputError(
            "vllm_mode must be 'colocate': TRL's vLLM server returns no routes; "
            f"got vllm_mode={trainer.vllm_mode!r}"
        )
    ranks = getattr(trainer, "vllm_tensor_parallel_size", 1)
    if ranks != 1:
        raise InputError(f"vllm_tensor_parallel_size must be 1; got {ranks}")


class RouteReplay:
    """Routes of the last generation, and the trainer's methods around them.

    routes: of the sampled sequences, in the order of the generation; None before the first.
    """

    def __init__(self, trainer: Any, sampler: str | None, replays: bool) -> None:
        self._fingerprint = fingerprint_of(trainer.model)
        self.routes: Routes | None = None
        self._trainer, self._sampler, self._replays = trainer, sampler, replays
        # The trainer keeps a batch of training for several steps, between which it evaluates:
        # whether it was training -> number of the generation's first row, and its routes.
        self._kept: dict[bool, tuple[int, Routes]] = {}
        self._sampled_rows = 0
        self._log_probs = torch.empty(0, 0)  # of generated tokens [B, G]
        self._loss: Callable[..., Any] = trainer.compute_loss
        self._generates: Callable[..., Any] = trainer._generate_and_score_completions
        trainer.compute_loss = self._compute_loss
        trainer._generate_and_score_completions = self._sampled

    def _sampled(self, inputs: Any) -> dict[str, Any]:
        """Return the trainer's batch with each row's number and the sampler's log-probabilities."""
        self.routes = None
        if getattr(self._trainer, "use_vllm", False):
            engine = self._trainer.vllm_generation.llm
            sampling = {(engine, "generate"): self._answering(engine)}
        else:
            model = unwrapped_model(self._trainer.model)
            sampling = {(model, "generate"): self._generating(model)}
        with replaced(sampling):
            batch: dict[str, Any] = self._generates(inputs)
        if self.routes is None or len(self.routes) != len(batch["completion_ids"]):
            raise InputError(
                "route replay needs one call of generate for a batch of completions; it got "
                f"{0 if self.routes is None else len(self.routes)} sequences for "
                f"{len(batch['completion_ids'])} rows"
            )
        tokens = batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)
        pairs = zip(self.routes.extended(1), tokens.tolist(), strict=True)
        self.routes = Routes.concatenate([one.truncated(int(length)) for one, length in pairs])
        ids = batch["completion_ids"]
        log_probs = self._log_probs[:, : ids.shape[1]].to(ids.device)
        if log_probs.shape != ids.shape:
            raise InputError(
                f"completions must be the {self._log_probs.shape[1]} tokens that were generated; "
                f"got {ids.shape[1]}"
            )
        mask = batch["completion_mask"].bool()
        batch["old_per_token_logps"] = torch.where(mask, log_probs, 0.0)
        if "importance_sampling_ratio" in batch:  # of the sampler to those that it was
            batch["importance_sampling_ratio"] = torch.ones_like(batch["importance_sampling_ratio"])
        first, self._sampled_rows = self._sampled_rows, self._sampled_rows + len(ids)
        self._kept[self._trainer.model.training] = first, self.routes
        batch[ROWS] = torch.arange(first, self._sampled_rows, device=ids.device)
        return batch

    def _generating(self, model: Any) -> Callable[..., Any]:
        generate: Callable[..., Any] = model.generate

        def generating(*args: Any, **kwargs: Any) -> Tensor:
            if self.routes is not None:
                raise InputError("route replay needs one call of generate for a batch; got two")
            sampling: Any = model
            if self._sampler is not None:
                sampling = in_other_arithmetic(model, self._sampler)
                vars(sampling).pop("forward", None)  # of TRL: it calls the model, not its copy
                generate_there = sampling.generate
            else:
                generate_there = generate
            config = copy.deepcopy(kwargs.get("generation_config") or model.generation_config)
            config.return_dict_in_generate = config.output_logits = config.use_cache = True
            # PEFT's model generates with the one inside, which is then the model that is called
            called = getattr(sampling, "get_base_model", lambda: sampling)()
            with record(called) as recorder:
                output = generate_there(*args, **{**kwargs, "generation_config": config})
            sequences: Tensor = output.sequences
            self._keep(sequences, output.logits)
            self.routes = recorder.routes()
            return sequences

        return generating

    def _answering(self, engine: Any) -> Callable[..., Any]:
        """vLLM's ``generate``, whose answers have routes and log-probabilities."""
        generate: Callable[..., Any] = engine.generate

        def answering(*args: Any, **kwargs: Any) -> Any:
            if self.routes is not None:
                raise InputError("route replay needs one call of generate for a batch; got two")
            requests = generate(*args, **kwargs)
            answers = [answer for request in requests for answer in request.outputs]
            if any(answer.routed_experts is None for answer in answers):
                raise InputError(
                    "vLLM's answers have no routed_experts; make it with "
                    "enable_return_routed_experts=True"
                )
            if any(answer.logprobs is None for answer in answers):
                raise InputError("vLLM's answers must have log-probabilities; got logprobs=None")
            self.routes = from_vllm([a.routed_experts for a in answers], self._fingerprint)
            self._log_probs = torch.nn.utils.rnn.pad_sequence(
                [
                    torch.tensor([step[token].logprob for token, step in zip(*pair, strict=True)])
                    for pair in ((a.token_ids, a.logprobs) for a in answers)
                ],
                batch_first=True,
            )
            return requests

        return answering

    def _keep(self, sequences: Int[Tensor, "B W"], logits: tuple[Tensor, ...]) -> None:
        """Log-probabilities of generated tokens, at the trainer's temperature."""
        temperature = float(getattr(self._trainer, "temperature", 1.0))
        log_probs: list[Float[Tensor, " B"]] = []
        for column, step in enumerate(logits, start=sequences.shape[1] - len(logits)):
            scaled = (step.float() / temperature).log_softmax(dim=-1)
            log_probs.append(scaled.gather(1, sequences[:, column, None])[:, 0])
        self._log_probs = torch.stack(log_probs, dim=1)

    def _compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._replays or ROWS not in inputs:
            return self._loss(model, inputs, *args, **kwargs)
        with replay(model, self._routes_of(inputs[ROWS].tolist())):
            return self._loss(model, inputs, *args, **kwargs)

    def _routes_of(self, rows: list[int]) -> Routes:
        """Routes of numbered rows; raises ValueError for rows of an earlier generation."""
        for first, routes in self._kept.values():
            if all(first <= row < first + len(routes) for row in rows):
                return routes[[row - first for row in rows]]
        kept = [f"{first} to {first + len(routes) - 1}" for first, routes in self._kept.values()]
        raise InputError(
            f"{ROWS} must be rows whose routes are kept ({', '.join(kept)}); got {rows}"
        )
