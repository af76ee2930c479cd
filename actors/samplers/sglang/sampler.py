"""The SGLang-Jax sampler: its engine, in this process, behind the sampler contract."""

from __future__ import annotations

from pathlib import Path

from actors.samplers.admission import checked_tokens_in_flight
from actors.samplers.contract import OnUpdate
from actors.samplers.serving import EngineSampler
from actors.samplers.sglang.engine import SglangEngine


class SglangJaxSampler(EngineSampler):
    """Samples with SGLang-Jax: on a CPU as it is, on a TPU with its kernels."""

    def __init__(
        self,
        *,
        model: Path | str,
        slots: int,
        context_length: int,
        on_update: OnUpdate | str,
        seed: int,
        name: str,
        dtype: str = "float32",
        tensor: int = 1,
        tokens_in_flight: int | None = None,
        filters: bool = False,
    ) -> None:
        """Start the engine, compile every shape and start its thread: constructed means ready for ``update``.

        Args:
            model: a checkpoint folder, whose ``config.json`` is read, and ``tokenizer.json``, if there is one, to find
                stop strings with; weights come with ``update``.
            slots: requests that run at once.
            context_length: most tokens of a request, prompt and sampled.
            on_update: what becomes of requests in flight when the weights change.
            seed: where requests without a seed of their own draw one from.
            name: shown in errors and status.
            dtype: of weights, activations and cache: ``float32`` or ``bfloat16``.
            tensor: devices that share the heads and the feed-forward channels of every layer.
            tokens_in_flight: most tokens, prompts and most new ones, of the requests that the engine is given; the
                others wait in line, until their deadlines. None: slots × context_length.
            filters: serve top-k, top-p and min-p, for evaluation; otherwise they are refused.

        Raises:
            ReleaseError: SGLang-Jax is missing or another release, or it does not serve the model.
        """
        bound = checked_tokens_in_flight(tokens_in_flight, slots=slots, context_length=context_length)
        engine = SglangEngine(
            Path(model),
            slots=slots,
            context_length=context_length,
            on_update=on_update,
            seed=seed,
            dtype=dtype,
            tensor=tensor,
            filters=filters,
        )
        super().__init__(engine, on_update=on_update, tokens_in_flight=bound, name=name)
