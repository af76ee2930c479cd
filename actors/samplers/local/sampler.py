"""The local sampler: the local engine behind the sampler contract."""

from __future__ import annotations

from pathlib import Path

from actors.samplers.admission import checked_tokens_in_flight
from actors.samplers.contract import OnUpdate
from actors.samplers.local.engine import Engine
from actors.samplers.serving import EngineSampler
from actors.samplers.stops import StopStrings
from learner.models.config import ModelConfig, read_config


class LocalSampler(EngineSampler):
    """Samples with the learner's own transformer."""

    def __init__(
        self,
        *,
        model: ModelConfig | Path | str,
        slots: int,
        context_length: int,
        on_update: OnUpdate | str,
        seed: int,
        name: str,
        tokens_in_flight: int | None = None,
        filters: bool = False,
    ) -> None:
        """Allocate, compile every shape and start the engine's thread: constructed means ready for ``update``.

        Args:
            model: the model's shape, or a checkpoint folder whose ``config.json`` gives it, and whose
                ``tokenizer.json``, if there is one, is what stop strings are found with. Its weights are not read:
                those come with ``update``.
            slots: requests that run at once; below the number of episodes in flight, prefixes are lost to others.
            context_length: most tokens of a request, prompt and sampled.
            on_update: what becomes of requests in flight when the weights change. Finished ones' keys are dropped in
                any case.
            seed: where requests without a seed of their own draw one from.
            name: shown in errors and status.
            tokens_in_flight: most tokens, prompts and most new ones, of the requests that the engine is given; the
                others wait in line, until their deadlines. None: what the cache holds, slots × context_length.
            filters: serve top-k, top-p and min-p, for evaluation; otherwise they are refused.
        """
        config = model if isinstance(model, ModelConfig) else read_config(Path(model))
        bound = checked_tokens_in_flight(tokens_in_flight, slots=slots, context_length=context_length)
        engine = Engine(
            config,
            slots=slots,
            context_length=context_length,
            on_update=on_update,
            seed=seed,
            filters=filters,
            stop_strings=None if isinstance(model, ModelConfig) else StopStrings.of(Path(model)),
        )
        engine.warm_up()
        super().__init__(engine, on_update=on_update, tokens_in_flight=bound, name=name)
