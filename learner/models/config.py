"""What a decoder looks like, in the words of a Hugging Face ``config.json``.

Six families differ in a handful of traits. Which traits a family has is a row of ``FAMILIES``; sizes and what a
checkpoint may choose are fields of ``ModelConfig``. Both layouts of ``config.json`` are read: the current one
(``rope_parameters``, ``layer_types``) and the older one that most published checkpoints carry.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ModelError(ValueError):
    """A checkpoint folder does not hold the model that was expected; one line says what differs."""


@dataclass(frozen=True, slots=True)
class Family:
    """What all models of one ``model_type`` share.

    Attributes:
        architecture: its name in ``config.json``.
        qk_norm: queries and keys are normed before they are rotated.
        qkv_bias: the projections of queries, keys and values add a bias.
        sandwich_norm: attention and feed-forward are normed after as well as before.
        unit_offset: norms multiply by 1 + weight.
        scaled_embedding: embeddings are multiplied by √hidden_size.
        defaults: of the fields that its published checkpoints leave out.
    """

    architecture: str
    qk_norm: bool = False
    qkv_bias: bool = False
    sandwich_norm: bool = False
    unit_offset: bool = False
    scaled_embedding: bool = False
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)


_GEMMA = {
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, defaults={"head_dim": 128}),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        sandwich_norm=True,
        unit_offset=True,
        scaled_embedding=True,
        defaults={**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        qk_norm=True,
        sandwich_norm=True,
        unit_offset=True,
        scaled_embedding=True,
        defaults={**_GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6},
    ),
}
"""By ``model_type``."""

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")

_NULL_MEANS_NONE = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
"""Fields of which null is a value of its own, not the family's default."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched to contexts longer than those a model was first trained on.

    Attributes:
        rope_type: ``linear``, or ``llama3``, which stretches long wavelengths and leaves short ones alone.
        factor: of the stretch.
        low_freq_factor: wavelengths beyond original length ÷ this are stretched in full; ``llama3`` only.
        high_freq_factor: wavelengths below original length ÷ this are left alone; ``llama3`` only.
        original_max_position_embeddings: the original length, in tokens; ``llama3`` only.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder: grouped-query attention, RoPE, a gated feed-forward, RMSNorm, and its family's traits.

    Field names are those of ``config.json``.

    Attributes:
        sliding_window: tokens that a sliding layer sees, the own one included; None if no layer slides.
        sliding_layers: whether each layer slides.
        rope_local_base_freq: base of the rotary embedding in sliding layers; None: as in the others.
        query_pre_attn_scalar: scores are divided by its root; None: by that of ``head_dim``.
        attn_logit_softcapping: scores are bounded to ± this by tanh; None: they are not.
        final_logit_softcapping: likewise the logits.
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
    model_type: str = "qwen3"
    hidden_act: str = "silu"
    rope_scaling: RopeScaling | None = None
    rope_local_base_freq: float | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        if self.model_type not in FAMILIES:
            raise ModelError(f"model_type is {self.model_type!r}; expected one of {', '.join(FAMILIES)}")
        if self.hidden_act not in ACTIVATIONS:
            raise ModelError(f"hidden_act is {self.hidden_act!r}; this decoder supports {' and '.join(ACTIVATIONS)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}; every key/value head serves as many query heads"
            )
        if self.sliding_layers and len(self.sliding_layers) != self.num_hidden_layers:
            raise ModelError(
                f"layer_types has {len(self.sliding_layers)} entries; expected one for each of the "
                f"{self.num_hidden_layers} layers"
            )

    @property
    def family(self) -> Family:
        """The traits of its family."""
        return FAMILIES[self.model_type]

    @property
    def slides(self) -> tuple[bool, ...]:
        """Whether each layer sees only ``sliding_window`` tokens."""
        return self.sliding_layers or (False,) * self.num_hidden_layers

    @property
    def query_scale(self) -> float:
        """What queries are multiplied by."""
        return float((self.query_pre_attn_scalar or self.head_dim) ** -0.5)

    @property
    def parameter_count(self) -> int:
        """Number of parameters, tied embeddings counted once."""
        heads = self.num_attention_heads + 2 * self.num_key_value_heads
        attention = self.hidden_size * self.head_dim * (heads + self.num_attention_heads)
        norms = (4 if self.family.sandwich_norm else 2) * self.hidden_size + 2 * self.head_dim * self.family.qk_norm
        biases = heads * self.head_dim * self.family.qkv_bias
        layer = attention + 3 * self.hidden_size * self.intermediate_size + norms + biases
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
    try:
        return parse_config(json.loads(path.read_text()))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def parse_config(given: dict[str, Any]) -> ModelConfig:
    """Read the content of a ``config.json``.

    Raises:
        ModelError: it describes a model this decoder is not.
    """
    family = FAMILIES.get(given.get("model_type", ""))
    if family is None:
        hint = ": export its language model alone" if given.get("model_type") == "gemma3" else ""
        raise ModelError(f"model_type is {given.get('model_type')!r}; expected one of {', '.join(FAMILIES)}{hint}")
    # Most fields that are null are as good as left out: they are what is usual in the family.
    raw = {"tie_word_embeddings": False, **family.defaults, **{k: v for k, v in given.items() if v is not None}}
    for name in _NULL_MEANS_NONE:
        if name in given and given[name] is None:
            raw.pop(name, None)
    raw["hidden_act"] = given.get("hidden_activation") or raw.get("hidden_act", "silu")
    if given.get("attention_bias", family.qkv_bias) != family.qkv_bias:
        raise ModelError(f"attention_bias is {given['attention_bias']}; this decoder supports {family.qkv_bias}")
    for name in ("mlp_bias", "use_bidirectional_attention"):
        if raw.get(name):
            raise ModelError(f"{name} is {raw[name]}; this decoder supports false")
    raw |= _read_rope(raw)
    raw["sliding_layers"] = _read_sliding(raw)
    if not any(raw["sliding_layers"]):
        raw["sliding_window"], raw["sliding_layers"] = None, ()
    if "head_dim" not in raw and {"hidden_size", "num_attention_heads"} <= raw.keys():
        raw["head_dim"] = raw["hidden_size"] // raw["num_attention_heads"]
    raw.setdefault("num_key_value_heads", raw.get("num_attention_heads"))
    known = {field.name: field for field in dataclasses.fields(ModelConfig)}
    missing = [n for n, f in known.items() if raw.get(n) is None and f.default is dataclasses.MISSING]
    if missing:
        raise ModelError(f"{', '.join(missing)} is missing; expected the fields of a {family.architecture} config")
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
        "architectures": [config.family.architecture],
        **{name: value for name, value in dataclasses.asdict(config).items() if value is not None},
        **{name: getattr(config, name) for name in _NULL_MEANS_NONE},
        "hidden_activation": config.hidden_act,
        "attention_bias": config.family.qkv_bias,
        "use_sliding_window": any(config.slides),
        "max_window_layers": config.num_hidden_layers,
        "torch_dtype": "float32",
        "eos_token_id": eos_token_id,
        "bos_token_id": None,
    }
    del raw["sliding_layers"]
    if config.model_type not in ("llama", "mistral"):  # in these all layers are alike
        raw["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in config.slides]
    if "query_pre_attn_scalar" in config.family.defaults:
        raw["query_pre_attn_scalar"] = config.query_pre_attn_scalar or config.head_dim
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def _read_rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Base and scaling of the rotary embedding, from whichever layout."""
    rope = raw.get("rope_parameters") or {}
    by_layer = "full_attention" in rope
    everywhere = rope["full_attention"] if by_layer else rope or raw.get("rope_scaling") or {}
    found: dict[str, Any] = {"rope_scaling": _read_scaling(everywhere)}
    if "rope_theta" in everywhere:
        found["rope_theta"] = everywhere["rope_theta"]
    if by_layer and "sliding_attention" in rope:
        local = rope["sliding_attention"]
        if _read_scaling(local) is not None:
            raise ModelError(f"sliding layers have rope_type {local['rope_type']!r}; this decoder supports 'default'")
        found["rope_local_base_freq"] = local["rope_theta"]
    return found


def _read_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise ModelError(f"rope_type is {kind!r}; this decoder supports 'default', 'linear' and 'llama3'")
    names = {field.name for field in dataclasses.fields(RopeScaling)} - {"rope_type"}
    return RopeScaling(kind, **{name: rope[name] for name in names if name in rope})


def _read_sliding(raw: dict[str, Any]) -> tuple[bool, ...]:
    """Which layers see a window of tokens only."""
    layers = range(raw.get("num_hidden_layers") or 0)
    if raw.get("sliding_window") is None or raw.get("use_sliding_window") is False:
        return ()
    if "layer_types" in raw:
        unknown = set(raw["layer_types"]) - {"sliding_attention", "full_attention"}
        if unknown:
            raise ModelError(f"layer_types holds {min(unknown)!r}; this decoder supports sliding and full attention")
        return tuple(kind == "sliding_attention" for kind in raw["layer_types"])
    match raw["model_type"]:
        case "mistral":
            return (True,) * len(layers)
        case "qwen2" | "qwen3":
            first = raw.get("max_window_layers", 0) if raw.get("use_sliding_window") else len(layers)
            return tuple(layer >= first for layer in layers)
        case "gemma2":
            return tuple(layer % 2 == 0 for layer in layers)
        case "gemma3_text":
            return tuple((layer + 1) % raw["sliding_window_pattern"] != 0 for layer in layers)
    return ()
