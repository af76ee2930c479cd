"""The ``sampler`` section: which engines sample, how many, how weights reach them, and what they may hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from cluster.section import AbsolutePath, Count, Cpus, CustomResources, Seconds, Section

SHARED_MEMORY = Path("/dev/shm")
"""Where ``transport=shared_memory`` keeps weights."""

PUBLISH_ATTEMPTS = 3
"""Times that a version is published before the run ends because not all samplers have acknowledged it."""


def _http_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise ValueError("expected the address of an SGLang server, such as http://gpu-0:30000")
    return url.rstrip("/")


class SamplerConfig(Section):
    """The sampler pool: engines that sample tokens, ours or SGLang's."""

    kind: Literal["local", "sglang_jax", "sglang"] = "local"
    """The learner's own transformer behind a continuous-batching engine (``local``), SGLang-Jax in actors of ours
    (``sglang_jax``), or SGLang servers that run already (``sglang``)."""
    replicas: Count = 1
    """Number of samplers, each a process with its own copy of the weights; under ``sglang`` there is one for each of
    ``urls``."""
    urls: tuple[Annotated[str, AfterValidator(_http_url)], ...] = ()
    """SGLang servers, such as ``http://gpu-0:30000``; only ``sglang`` reads it, and needs it."""
    transport: Literal["object_store", "shared_memory", "folder"] = "object_store"
    """How new weights travel: through Ray's object store, through the memory of a host that learner and samplers share
    (``shared_memory``), or as checkpoints in ``weights_folder`` (``folder``), which ``sglang`` needs."""
    weights_folder: AbsolutePath | None = None
    """Folder that learner, samplers and servers see under the same path; ``transport=folder`` needs it."""
    slots: Count = 64
    """Requests that one sampler serves at once, each in a slot of its cache of keys and values. With fewer slots than
    episodes in flight, an episode's next turn often finds its keys gone and computes them again."""
    context_length: Annotated[int, Field(ge=16)]
    """Longest conversation in tokens, prompt and replies together."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits when training samples are drawn, which nothing else shapes; ``evaluation`` has its own."""
    on_update: Literal["recompute", "continue", "drain"] = "recompute"
    """What happens to requests in flight when new weights arrive: their cached keys are computed again, or kept, or
    the weights wait until they have ended. ``sglang`` cannot keep keys: it would not know which token came from which
    version."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type of weights, activations and cache, in which the weights are published too; ``local`` is always ``float32``,
    and for a server it is that of the weights alone."""
    tensor: Count = 1
    """Devices that share the heads and the feed-forward channels of every layer; only ``sglang_jax`` reads it."""
    tokens_in_flight: Count | None = None
    """Most tokens of the requests that one sampler has taken up, each counted with its prompt and the most it may
    sample; further requests wait their turn, no longer than ``request_timeout_seconds``. Null takes ``slots`` ×
    ``context_length``, what the cache holds; a server is given ``slots`` requests and no more."""
    request_timeout_seconds: Seconds = 120.0
    """Longest that one generation may take, in seconds."""
    stall_seconds: Seconds = 60.0
    """Longest that a sampler may owe answers without finishing a step, or not say how it is; it is then started anew.
    The longest step is the prefill of ``context_length`` tokens. Below ``request_timeout_seconds``, what it was asked
    can still be asked of others."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """Times that a sampler that died, failed or stalled is started anew before the run ends; they are counted from
    zero again once it has served for ten minutes."""
    resources: CustomResources = Field(default_factory=dict)
    """What one sampler asks Ray for besides CPUs, such as ``{TPU: 4}`` for the chips of its host."""
    cpus: Cpus = 0.5
    """CPUs that Ray sets aside for one sampler; it runs on that many threads, at least one."""
