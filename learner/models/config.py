"""What a decoder looks like, in the words of a Hugging Face ``config.json``."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURE = "Qwen3ForCausalLM"
MODEL_TYPE = "qwen3"


class ModelError(ValueError):
    """A checkpoint folder does not hold the model that was expected; one line says what differs."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Qwen3-style decoder: grouped-query attention with q/k norm, RoPE, SwiGLU, RMSNorm.

    Field names are those of ``config.json``, so that a folder written here is read by other tools.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}; every key/value head serves as many query heads"
            )

    @property
    def parameter_count(self) -> int:
        """Number of parameters, tied embeddings counted once."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_attention_heads + self.num_key_value_heads)
        layer = attention + 2 * self.head_dim + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * layer + embeddings + self.hidden_size


def read_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` of a checkpoint folder.

    Raises:
        ModelError: the file is missing, or describes a model this decoder is not.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} holds no config.json; expected a Hugging Face checkpoint folder")
    raw: dict[str, Any] = json.loads(path.read_text())
    if raw.get("model_type") != MODEL_TYPE:
        raise ModelError(f"{path}: model_type is {raw.get('model_type')!r}; expected {MODEL_TYPE!r}")
    for name, supported in _FIXED.items():
        if raw.get(name, supported) != supported:
            raise ModelError(f"{path}: {name} is {raw[name]!r}; this decoder supports {supported!r}")
    rope = raw.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ModelError(f"{path}: rope_type is {rope['rope_type']!r}; this decoder supports 'default'")
    if "rope_theta" in rope:
        raw["rope_theta"] = rope["rope_theta"]
    known = {f.name: f for f in dataclasses.fields(ModelConfig)}
    missing = [n for n, f in known.items() if n not in raw and f.default is dataclasses.MISSING]
    if missing:
        raise ModelError(f"{path} lacks {', '.join(missing)}; expected the fields of a {ARCHITECTURE} config")
    return ModelConfig(**{name: raw[name] for name in known if name in raw})


def write_config(config: ModelConfig, folder: Path, *, eos_token_id: int | None) -> None:
    """Write ``config.json`` in the layout that Hugging Face and SGLang read.

    Args:
        config: the decoder's shape.
        folder: where to; made if missing.
        eos_token_id: the token at which other engines stop unasked, the end of an assistant message for a chat
            model; None where the model has no tokenizer. It is the tokenizer's to know, so no ``ModelConfig`` holds it.

    Raises:
        ModelError: the token is outside the vocabulary.
    """
    if eos_token_id is not None and not 0 <= eos_token_id < config.vocab_size:
        raise ModelError(
            f"eos_token_id is {eos_token_id}; expected an id below vocab_size={config.vocab_size}: "
            "is the tokenizer that of another model?"
        )
    raw = {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        **dataclasses.asdict(config),
        **_FIXED,
        "torch_dtype": "float32",
        "eos_token_id": eos_token_id,
        "bos_token_id": None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_scaling": None,
    "use_sliding_window": False,
}
"""Fields whose other values this decoder does not implement."""
