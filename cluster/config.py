"""The configuration schema: one section per service, every field with its unit.

Nothing here imports JAX or Ray, so that a mistake is found before anything starts. Sections
check their own fields; ``cluster/combinations.py`` checks what only makes sense together.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qs, urlsplit

from pydantic import AfterValidator, Field, model_validator

from cluster.agreement_config import AgreementConfig
from cluster.combinations import check_combinations
from cluster.objective_config import ObjectiveConfig
from cluster.sampler_config import SamplerConfig
from cluster.section import AbsolutePath, Count, Cpus, CustomResources, Fraction, Seconds, Section


def _ascending(lengths: tuple[int, ...]) -> tuple[int, ...]:
    if list(lengths) != sorted(set(lengths)) or min(lengths) < 1:
        raise ValueError("expected different lengths ≥ 1 in ascending order, such as [128, 256, 384]")
    return lengths


def _run_name(name: str) -> str:
    # The buffer's run is this name and nine more characters; an automatic name is the experiment and a number.
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name) or name in (".", ".."):
        raise ValueError(
            "expected 1 to 100 of the characters A-Z a-z 0-9 . _ - and neither '.' nor '..'; it names a folder and a "
            "run in Redis, and run.folder chooses where the folder lies"
        )
    return name


def _redis_url(url: str) -> str:
    expected = "expected a URL such as redis://:password@host:6379/0, or null for a server of our own"
    quote = "write the characters : / ? # @ of a password as %3A %2F %3F %23 %40"
    try:
        parts = urlsplit(url)
        port, password = parts.port, parts.password
    except ValueError:  # its message may show the password
        raise ValueError(f"{expected}; {quote}") from None
    if parts.scheme == "unix":
        usable = bool(parts.path)
    else:
        usable = parts.scheme in ("redis", "rediss") and port != 0 and re.fullmatch(r"(/\d*)?", parts.path) is not None
    if not usable or parts.fragment or "@" in parts.query:
        raise ValueError(f"{expected}; {quote}")
    if REDACTED in (password, *parse_qs(parts.query).get("password", ())):
        raise ValueError("the password was left out when this was printed or stored; give the URL with its password")
    return url


def _stop_string(text: str) -> str:
    if not text or "\ufffd" in text:
        raise ValueError("expected texts that are not empty and hold no U+FFFD, which stands for half a character")
    return text


REDACTED = "***"
"""Stands for a password wherever a configuration is printed or stored."""


class RunConfig(Section):
    """The run: what it is called, where it is kept, and how it starts."""

    name: Annotated[str, AfterValidator(_run_name)] | None = None
    """Name of the run and its folder; null numbers the runs of ``experiment`` (``quickstart-1``, ``quickstart-2``)."""
    experiment: Annotated[str, AfterValidator(_run_name)] = "run"
    """Stem of automatic run names; unless given, that of the YAML file."""
    folder: Path = Path("runs")
    """Folder that holds the run folders."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the initial weights, the demonstrations and the sampling."""
    resume: bool = False
    """Go on from the newest checkpoint of the run ``name`` (null: of the newest run of ``experiment``)."""


class TaskConfig(Section):
    """The task sets: ranges of environment seeds for training and for evaluation."""

    train_seed_start: Annotated[int, Field(ge=0)] = 1_000_000
    """First environment seed of training."""
    train_tasks: Count = 1_000_000
    """Number of training seeds; they are drawn in order and start over at the end."""
    eval_seed_start: Annotated[int, Field(ge=0)] = 0
    """First environment seed of evaluation."""
    eval_tasks: Count = 256
    """Number of evaluation episodes, one seed each."""


class AgentConfig(Section):
    """The agent: how the policy talks to the environment."""

    system_prompt: str | None = None
    """First message of every conversation; null for none."""
    max_turns: Count
    """Most turns of an episode; it is then truncated."""
    max_tokens_per_turn: Count
    """Most tokens the policy samples in one turn, its end-of-turn token included; a reply cut off here is taken as
    it is, and its end-of-turn token is given to the policy."""
    stop: tuple[Annotated[str, AfterValidator(_stop_string)], ...] = ()
    """Texts that end a reply before its end-of-turn token, such as ``</answer>``. The reply is kept up to the token
    that completes one, and its end-of-turn token is given to the policy."""


class EnvironmentConfig(Section):
    """The environment: a registered Gymnasium environment whose observations and actions are texts."""

    id: str
    """Gymnasium id; ``module:Id`` imports a module that registers it."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    evaluation_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments added to these, or in place of them, for evaluation."""
    step_timeout_seconds: Seconds = 30.0
    """Longest that one reset or step may take, in seconds; the episode then ends as ``timeout``."""


class ActorsConfig(Section):
    """The rollout workers: processes that play episodes."""

    workers: Count = 1
    """Number of worker processes."""
    episodes_in_flight: Count = 64
    """Episodes that one worker plays at the same time."""
    max_episode_attempts: Count = 3
    """Tries of an episode that fails through no fault of the policy; its group then goes without it, if
    ``buffer.min_group_size`` allows, or is abandoned."""
    environment_threads: Count = 2
    """Threads of one worker in which environments are stepped."""
    cpus: Cpus = 0.5
    """CPUs that Ray sets aside for one worker."""


class BufferConfig(Section):
    """The buffer between the actors and the learner."""

    url: Annotated[str, AfterValidator(_redis_url)] | None = None
    """Redis to use, ``redis://user:password@host:port/db`` (``rediss://`` for TLS); null starts one of our own."""
    payload_urls: tuple[Annotated[str, AfterValidator(_redis_url)], ...] = ()
    """More Redis instances that hold the trajectories' bytes, for when one is not enough; ``url`` keeps the rest."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address of this machine that our own Redis listens on; workers on other machines need one that they reach."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of our own Redis; 0 takes a free one."""
    max_staleness: Annotated[int, Field(ge=0, le=1_000_000)] = 2
    """Oldest that a trajectory may be when it is trained on, in policy versions; 0 is strictly on-policy."""
    max_age_seconds: Annotated[float, Field(ge=0.001, le=1e6)] = 3600.0
    """Oldest that a trajectory may be when it is trained on, in seconds since its group was begun."""
    groups_per_batch: Annotated[int, Field(ge=1, le=4096)]
    """Groups in one training batch."""
    tokens_per_batch: Annotated[int, Field(ge=1, le=1 << 50)] | None = None
    """A batch has fewer groups than that if the next would take it beyond so many tokens; null sets no bound."""
    group_size: Annotated[int, Field(ge=1, le=1024)]
    """Trajectories in one group: episodes of the same task, compared with each other."""
    min_group_size: Annotated[int, Field(ge=2, le=1024)] | None = None
    """Trajectories that a group is trained with if its other episodes failed for good; null means all of them."""
    order: Literal["fifo", "uniform", "priority"] = "fifo"
    """Order in which groups are trained: oldest first, a uniform draw, or a draw by the ``weight`` (0.001 to 1000) in
    the info of an environment's step, corrected for in the gradient."""
    look_ahead: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Under ``fifo``, groups that may be trained before an older one whose episodes still run; beyond, the learner
    waits for it. Null lets its staleness decide."""
    max_uses: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Times that a group may be trained on while it is fresh."""
    max_bytes: Annotated[int, Field(ge=1, le=1 << 50)] = 1 << 30
    """Most bytes of trajectories outstanding in the buffer; no further work is admitted beyond."""
    slot_seconds: Annotated[float, Field(ge=0.001, le=1e6)] = 60.0
    """How long a worker may be silent before the slots it holds are given to others, in seconds."""
    max_attempts: Annotated[int, Field(ge=1, le=1_000_000)] = 3
    """Times a task is issued before it is given up."""
    timeout_seconds: Seconds = 10.0
    """Longest that one Redis call may take, in seconds."""
    outage_seconds: Seconds = 60.0
    """How long Redis may be away before the workers give up, in seconds."""


class MeshConfig(Section):
    """The device mesh of the learner; the product of its axes is the number of devices."""

    data: Count = 1
    """Devices that hold the same parameters and different rows."""
    fsdp: Count = 1
    """Devices that parameters and optimizer state are spread over; rows are, too."""
    tensor: Count = 1
    """Devices that share the heads, the feed-forward channels and the vocabulary of every layer."""

    @property
    def shards(self) -> int:
        """Parts that the rows of a micro-batch are split into."""
        return self.data * self.fsdp

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.shards * self.tensor


class OptimizerConfig(Section):
    """AdamW with a linear warm-up, a decay and gradient clipping by global norm."""

    learning_rate: Annotated[float, Field(gt=0)]
    """Highest learning rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the learning rate rises linearly from 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up, until the last step."""
    final_fraction: Fraction = 0.1
    """Learning rate at the last step, as a fraction of the highest; ``constant`` ignores it."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the gradient's running mean."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the squared gradient's running mean."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients of a larger global norm are scaled down to it."""


class LearnerConfig(Section):
    """The learner: how many steps, in which shapes, on which devices."""

    steps: Count
    """Optimizer steps of the run."""
    mesh: MeshConfig = MeshConfig()
    """Devices of all processes together, and how the work is spread over them."""
    processes: Count = 1
    """Processes that train together, each with an equal share of the devices: one for every host of a TPU slice. A
    process without an accelerator simulates its share of devices on the CPU."""
    resources: CustomResources = Field(default_factory=dict)
    """What one process asks Ray for besides CPUs, such as ``{TPU: 4}`` for the chips of its host."""
    row_lengths: Annotated[tuple[int, ...], Field(min_length=1), AfterValidator(_ascending)]
    """Ladder of row lengths in tokens, ascending; trajectories are packed into rows of these lengths."""
    rows_per_microbatch: Count = 8
    """Rows of one forward and backward pass."""
    optimizer: OptimizerConfig
    """The optimizer of reinforcement learning."""
    cpus: Cpus = 1.0
    """CPUs that Ray sets aside for each process; on a CPU it runs on that many threads, at least one."""
    remat: Literal["none", "dots", "full", "offload"] = "none"
    """What the backward pass computes again to save memory: nothing, all but matrix products, whole layers, or whole
    layers with what enters them kept in the host's memory."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type of matrix products and activations; parameters, moments and log-probabilities are float32 in any case."""
    agreement: AgreementConfig = AgreementConfig()
    """Whether sampler and learner give the same tokens the same log-probabilities."""
    checkpoint_every_steps: Count = 50
    """Steps from one checkpoint to the next."""
    checkpoints_kept: Count = 2
    """Newest checkpoints that are kept."""
    best_checkpoints_kept: Annotated[int, Field(ge=0)] = 1
    """Checkpoints that are kept besides, for the highest mean reward since the one before."""
    publish_timeout_seconds: Seconds = 60.0
    """Longest that the samplers may take to acknowledge new weights, in seconds."""
    lease_timeout_seconds: Seconds = 600.0
    """Longest that the learner waits for one batch before the run fails, in seconds."""


class ArchitectureConfig(Section):
    """A decoder made from scratch, in the words of a Hugging Face ``config.json``; its tokenizer is character-level."""

    hidden_size: Count
    """Width of the residual stream."""
    intermediate_size: Count
    """Width of the feed-forward layer."""
    num_hidden_layers: Count
    """Number of layers."""
    num_attention_heads: Count
    """Query heads."""
    num_key_value_heads: Count
    """Key and value heads; each serves as many query heads."""
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)] = 128
    """Width of one head; SGLang-Jax serves multiples of 128."""
    max_position_embeddings: Count = 4096
    """Longest sequence the model is meant for, in tokens."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    """Base of the rotary position embedding."""
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    """Added to the mean square in every norm."""
    tie_word_embeddings: bool = True
    """Whether the output layer is the embedding table."""


class WarmStartConfig(Section):
    """Supervised training that gives the policy its chat format and a weak idea of the task."""

    conversations: AbsolutePath | None = None
    """JSON-lines file, each ``{"messages": [{"role": ..., "content": ...}, ...]}``; null plays demonstrations."""
    demonstrations: Count = 1024
    """Episodes that the environment's demonstrator plays, unless ``conversations`` is given."""
    noise: Fraction = 0.5
    """Probability that a move of the demonstrator is replaced by a random one."""
    loss_on: Literal["replies", "all"] = "replies"
    """Tokens that are learned: the assistant's replies alone, or everything, so that the policy also learns to foresee
    what its replies lead to."""
    steps: Count
    """Optimizer steps."""
    examples_per_step: Count = 32
    """Conversations in one step."""
    optimizer: OptimizerConfig
    """The optimizer of the warm start."""


class LoraConfig(Section):
    """Low-rank adapters, trained in place of the model itself: W + alpha/rank · A·B for every target W."""

    rank: Count
    """Inner size of the adapters."""
    alpha: Annotated[float, Field(gt=0)]
    """Adapters act by alpha ÷ rank."""
    targets: Annotated[
        tuple[Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], ...],
        Field(min_length=1),
    ] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Weights of every layer that have an adapter."""
    path: AbsolutePath | None = None
    """PEFT folder of adapters of this rank, alpha and targets to start from; null draws new ones, which change nothing
    yet."""


class ModelSection(Section):
    """The policy: an existing checkpoint folder, or a new model of the given architecture."""

    path: AbsolutePath | None = None
    """Hugging Face checkpoint folder (config.json, safetensors, tokenizer.json, chat template) to start from."""
    architecture: ArchitectureConfig | None = None
    """Shape of the new model that is made when ``path`` is null."""
    warm_start: WarmStartConfig | None = None
    """Supervised training before reinforcement learning, always of the whole model; null for none."""
    lora: LoraConfig | None = None
    """Adapters that reinforcement learning trains, while the model stays as it is; null trains the whole model."""


class PlanConfig(Section):
    """What ``headrace plan`` compiles for; nothing else reads it."""

    topology: str | None = None
    """TPU slice, such as ``v5p:4x4x4``: v5e, v5p, v6e or tpu7x, and its chips along each axis."""
    row_length: Annotated[int, Field(ge=128, multiple_of=128)] | None = None
    """Tokens of a row; null takes the longest of ``learner.row_lengths``."""
    tokens_per_chip: Count | None = None
    """Tokens of one micro-batch, divided by the number of chips; null takes ``learner.rows_per_microbatch``."""
    microbatches: Count = 1
    """Micro-batches of one optimizer update."""


class EvaluationConfig(Section):
    """How replies are drawn in evaluation; training draws from the whole policy, at ``sampler.temperature``."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Divides the logits; 0 is greedy."""
    top_k: Count | None = None
    """Sample only from so many of the likeliest tokens; null samples from all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of these, only from the fewest that hold this share of their probability."""
    min_p: Fraction = 0.0
    """Of these, only from what is at least this times as likely as the likeliest."""

    @property
    def filters(self) -> bool:
        """Whether samplers have to serve filters."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0


class TelemetryConfig(Section):
    """What a person sees of the run."""

    display: Literal["auto", "rich", "plain", "none"] = "auto"
    """Progress on the terminal; ``auto`` is ``rich`` on a terminal and ``plain`` elsewhere."""
    plain_every_seconds: Seconds = 10.0
    """Seconds from one line of the plain display to the next."""
    eval_every_steps: Annotated[int, Field(ge=0)] = 0
    """Steps from one evaluation to the next; 0 evaluates before and after training only."""
    dashboard: bool = False
    """Whether the Ray we start ourselves runs its dashboard."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the Prometheus endpoint of the Ray we start ourselves; 0 takes a free one."""


class Config(Section):
    """A whole run. Every impossible combination is refused here, before anything starts."""

    run: RunConfig = RunConfig()
    """The run itself."""
    task: TaskConfig = TaskConfig()
    """Which seeds are played."""
    agent: AgentConfig
    """How the policy talks to the environment."""
    environment: EnvironmentConfig
    """What is played."""
    sampler: SamplerConfig
    """What samples tokens."""
    actors: ActorsConfig = ActorsConfig()
    """What plays episodes."""
    buffer: BufferConfig
    """What joins actors and learner."""
    learner: LearnerConfig
    """What trains."""
    model: ModelSection
    """What is trained."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """Towards what it is trained."""
    plan: PlanConfig = PlanConfig()
    """What a plan is made for."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """How the policy is sampled when it is evaluated."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """What is shown."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        check_combinations(self)
        return self

    def redacted(self) -> dict[str, Any]:
        """The configuration as plain data for printing and storing, passwords of Redis replaced by ``***``."""
        data: dict[str, Any] = self.model_dump(mode="json")
        data["buffer"]["payload_urls"] = [_without_password(url) for url in self.buffer.payload_urls]
        if self.buffer.url is not None:
            data["buffer"]["url"] = _without_password(self.buffer.url)
        return data


def _without_password(url: str) -> str:
    password = urlsplit(url).password
    if password:
        url = url.replace(f":{password}@", f":{REDACTED}@", 1)
    return re.sub(r"([?&]password=)[^&]*", rf"\g<1>{REDACTED}", url)
