"""The SGLang-Jax release that is served, and the models it serves: all that can be refused before anything starts."""

from __future__ import annotations

from importlib import metadata

RELEASE = "0.1.0rc0"
"""The one release whose faults are known and corrected; every other has others."""
INSTALL = "make setup-sampler installs it"
MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""Families, by ``model_type``, whose log-probabilities are tested against an independent forward pass."""
HEAD_DIM_MULTIPLE = 128
"""Its kernels and its loader know no other width of a head than a multiple of this."""


class ReleaseError(RuntimeError):
    """SGLang-Jax is missing, is another release, or does not serve the model; one line says what to do."""


def check_release() -> None:
    """Find out whether the right release is installed, without importing it.

    Raises:
        ReleaseError: it is missing or another one.
    """
    try:
        installed = metadata.version("sglang-jax")
    except metadata.PackageNotFoundError:
        raise ReleaseError(
            f"sampler.kind=sglang_jax: sglang-jax is not installed; expected {RELEASE}: {INSTALL}, or use "
            "sampler.kind=local"
        ) from None
    if installed != RELEASE:
        raise ReleaseError(
            f"sampler.kind=sglang_jax: sglang-jax {installed} is installed; expected {RELEASE}, for which its faults "
            f"are corrected: {INSTALL}"
        )


def check_model(model_type: str, head_dim: int) -> None:
    """Find out whether the engine serves such a model.

    Raises:
        ReleaseError: another family, or heads of another width.
    """
    if model_type not in MODEL_TYPES:
        raise ReleaseError(
            f"sampler.kind=sglang_jax: the model_type is {model_type}; expected {', '.join(MODEL_TYPES[:-1])} or "
            f"{MODEL_TYPES[-1]}: use such a model, or sampler.kind=local"
        )
    if head_dim % HEAD_DIM_MULTIPLE:
        raise ReleaseError(
            f"sampler.kind=sglang_jax: the model's head_dim is {head_dim}; expected a multiple of {HEAD_DIM_MULTIPLE}: "
            "use such a model, or sampler.kind=local"
        )
