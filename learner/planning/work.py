"""Operations and memory traffic of a training step, counted by hand from the shapes.

The compiler's own count does not serve: it counts the body of a loop once, and nothing inside the attention kernel.

Axes: N = query heads, K = key/value heads, D = head dim, T = tokens of a row, H = hidden, F = feed-forward,
V = vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from learner.models.config import ModelConfig
from learner.models.decoder import Remat
from learner.models.lora import Lora
from learner.models.weights import abstract_adapted

_KERNEL_BLOCK = 512
"""Most queries and keys that the attention kernel takes at once; it computes whole blocks on the diagonal."""

_KERNEL_BACKWARD = 3.5
"""Matrix products of the kernel's backward pass (7: scores and their gradients twice) by those of its forward pass."""


class MeshShape(NamedTuple):
    """Devices along each axis of the mesh, as in ``learner.mesh``."""

    data: int
    fsdp: int
    tensor: int


class Work(NamedTuple):
    """What a program does on all devices together.

    Attributes:
        useful_flops: of the model's matrix products, nothing counted that is done again; what MFU is about.
        flops: of what really runs, with what the backward pass computes again.
    """

    useful_flops: float
    flops: float


def layer_weights(config: ModelConfig) -> int:
    """Entries of the matrices of one layer."""
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    return config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)


def adapter_weights(config: ModelConfig, lora: Lora | None) -> int:
    """Entries of the adapters of all layers."""
    return 0 if lora is None else sum(leaf.size for leaf in jax.tree.leaves(abstract_adapted(config, lora)[2]))


def forward_pass(config: ModelConfig, rows: int, length: int, lora: Lora | None = None) -> Work:
    """Of the log-probabilities of ``rows`` rows of ``length`` tokens.

    A multiplication and an addition for each token and matrix entry, and for each pair of tokens that attention
    compares, as if a row held one sequence: 2 · N · D for its score, as much for its value.
    """
    matrices, useful_pairs, pairs, head = _parts(config, rows, length)
    matrices += 2.0 * rows * length * adapter_weights(config, lora)
    return Work(matrices + useful_pairs + head, matrices + pairs + head)


def training_pass(config: ModelConfig, rows: int, length: int, remat: Remat, lora: Lora | None = None) -> Work:
    """Of forward and backward pass of one micro-batch of ``rows`` rows of ``length`` tokens.

    The backward pass of a matrix product is two of its size. What ``remat`` makes the backward pass do again is a
    forward pass of the layers, or of their attention alone (``dots``); logits are always computed again. A frozen
    matrix has no gradient of its own, so its backward pass is one product; adapters have all three.
    """
    matrices, useful_pairs, pairs, head = _parts(config, rows, length)
    adapters = 2.0 * rows * length * adapter_weights(config, lora)
    passes = 3 if lora is None else 2
    again = {"none": 0, "dots": 0, "full": 1, "offload": 1}[remat]
    attention_again = {"none": 0, "dots": 1, "full": 1, "offload": 1}[remat]
    return Work(
        passes * (matrices + head) + 3 * (useful_pairs + adapters),
        (passes + again) * matrices
        + (3 + again) * adapters
        + (1 + attention_again + _KERNEL_BACKWARD) * pairs
        + (passes + 1) * head,
    )


def micro_batch_traffic(
    config: ModelConfig, rows: int, length: int, mesh: MeshShape, remat: Remat, lora: Lora | None = None
) -> float:
    """Bytes that a device moves to or from its memory for forward and backward pass of one micro-batch, at least.

    Weights: each pass over the layers reads this device's float32 part, writes the gathered bfloat16 weights and reads
    them; the backward pass writes their gradient, reads it to scatter it and adds its own part to the float32 sum.
    What is frozen has no gradient to write, read and add; adapters are too small to count.
    Activations: every matrix product reads its input and writes its output in bfloat16, once forward, again where it is
    computed again, and twice backward. Logits are written and read in float32, forward, again, and backward. Scores
    stay within the attention kernel, and what XLA fuses costs nothing.
    """
    passes = 3 if remat in ("full", "offload") else 2
    whole = config.num_hidden_layers * layer_weights(config) + 2 * config.vocab_size * config.hidden_size
    gathered, own = whole / mesh.tensor, whole / (mesh.fsdp * mesh.tensor)
    of_weights = passes * (4 * own + 2 * 2 * gathered)
    if lora is None:
        of_weights += 2 * 2 * gathered + 2 * 4 * own
    activations, logits = _activations(config, rows, length, mesh)
    return of_weights + (passes + 1) * activations + 3 * logits


def score_traffic(config: ModelConfig, rows: int, length: int, mesh: MeshShape) -> float:
    """The same for the log-probabilities of a micro-batch: one pass forward."""
    whole = config.num_hidden_layers * layer_weights(config) + 2 * config.vocab_size * config.hidden_size
    activations, logits = _activations(config, rows, length, mesh)
    return 4 * whole / (mesh.fsdp * mesh.tensor) + 2 * 2 * whole / mesh.tensor + activations + logits


def update_traffic(config: ModelConfig, mesh: MeshShape, lora: Lora | None = None) -> float:
    """Bytes that a device moves for one AdamW update of float32 state.

    The gradient is read twice (for its norm first), parameters and both moments are read and written.
    """
    trained = config.parameter_count if lora is None else adapter_weights(config, lora)
    return (2 + 2 * 3) * 4 * trained / (mesh.fsdp * mesh.tensor)


def _activations(config: ModelConfig, rows: int, length: int, mesh: MeshShape) -> tuple[float, float]:
    """Bytes of the inputs and outputs of a device's matrix products in one pass over the layers, and of its logits."""
    tokens = rows * length / (mesh.data * mesh.fsdp)
    heads = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    widths = 4 * config.hidden_size + (heads + 3 * config.intermediate_size) / mesh.tensor
    return 2 * tokens * widths * config.num_hidden_layers, 2 * 4 * tokens * config.vocab_size / mesh.tensor


def _parts(config: ModelConfig, rows: int, length: int) -> tuple[float, float, float, float]:
    """Forward FLOPs of matrices, of attention that is of use, of attention as the kernel computes it, of the head."""
    tokens = rows * length
    matrices = 2.0 * tokens * layer_weights(config) * config.num_hidden_layers
    head = 2.0 * tokens * config.vocab_size * config.hidden_size
    block = next((size for size in (_KERNEL_BLOCK, 256, 128) if length % size == 0), 1)
    per_pair = 4.0 * rows * config.num_attention_heads * config.head_dim
    useful = computed = 0.0
    for slides in config.slides:
        window = min(config.sliding_window or length, length) if slides else length
        pairs = window * (window + 1) / 2 + (length - window) * window
        useful += per_pair * pairs
        computed += per_pair * min(pairs + length * (block - 1) / 2 * (2 if window < length else 1), length * length)
    return matrices, useful, computed, head
