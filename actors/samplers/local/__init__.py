"""The local sampler: the learner's own transformer behind a continuous-batching engine."""

from actors.samplers.local.engine import Engine
from actors.samplers.local.sampler import LocalSampler

__all__ = ["Engine", "LocalSampler"]
