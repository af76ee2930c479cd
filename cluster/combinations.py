"""Options that are fine alone and impossible together: each is refused with the option to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.samplers.sglang.release import HEAD_DIM_MULTIPLE
from cluster.sampler_config import PUBLISH_ATTEMPTS

if TYPE_CHECKING:
    from cluster.config import Config

BYTES_PER_TOKEN = 13
"""Size of one token of a stored trajectory: id, log-probability, version (4 bytes each) and mask (1 byte)."""
BYTES_PER_TRAJECTORY = 1024
"""Allowance for what else a stored trajectory holds: header, rewards, and metadata as JSON."""


def check_combinations(config: Config) -> None:
    """Refuse an impossible combination.

    Raises:
        ValueError: one line that names an option, its value, what is expected and the remedy.
    """
    for check in (
        _check_tasks,
        _check_lengths,
        _check_sampler,
        _check_evaluation,
        _check_batch,
        _check_agreement,
        _check_model,
        _check_objective,
        _check_buffer,
    ):
        check(config)


def _check_tasks(config: Config) -> None:
    task = config.task
    train_end, eval_end = task.train_seed_start + task.train_tasks, task.eval_seed_start + task.eval_tasks
    if task.train_seed_start < eval_end and task.eval_seed_start < train_end:
        raise ValueError(
            f"task.eval_seed_start={task.eval_seed_start}: evaluation seeds {task.eval_seed_start}..{eval_end - 1} "
            f"overlap training seeds {task.train_seed_start}..{train_end - 1}; move one range away from the other"
        )


def _check_lengths(config: Config) -> None:
    context, rows = config.sampler.context_length, config.learner.row_lengths
    if config.agent.max_tokens_per_turn >= context:
        raise ValueError(
            f"agent.max_tokens_per_turn={config.agent.max_tokens_per_turn}: one reply must be shorter than "
            f"sampler.context_length={context}; lower it or raise the context length"
        )
    if rows[-1] < context:
        raise ValueError(
            f"learner.row_lengths={list(rows)}: the longest row must hold sampler.context_length={context} tokens; "
            f"add a row length ≥ {context}"
        )
    architecture = config.model.architecture
    if architecture is not None and architecture.max_position_embeddings < context:
        raise ValueError(
            f"model.architecture.max_position_embeddings={architecture.max_position_embeddings}: expected at least "
            f"sampler.context_length={context}; raise it or lower the context length"
        )


SAMPLER_READS = {
    "urls": ("sglang",),
    "replicas": ("local", "sglang_jax"),
    "tokens_in_flight": ("local", "sglang_jax"),
    "precision": ("sglang_jax", "sglang"),
    "tensor": ("sglang_jax",),
    "resources": ("local", "sglang_jax"),
}
"""Kinds of sampler that read a setting."""


def _check_sampler(config: Config) -> None:
    sampler = config.sampler
    for setting, kinds in SAMPLER_READS.items():
        value, default = (
            getattr(sampler, setting),
            type(sampler).model_fields[setting].get_default(call_default_factory=True),
        )
        if value != default and sampler.kind not in kinds:
            shown = list(value) if isinstance(value, tuple) else value
            raise ValueError(
                f"sampler.{setting}={shown}: sampler.kind={sampler.kind} does not read it; leave it out, or use "
                f"sampler.kind={' or '.join(kinds)}"
            )
    if (sampler.weights_folder is not None) != (sampler.transport == "folder"):
        raise ValueError(
            f"sampler.weights_folder={sampler.weights_folder or 'null'}: sampler.transport={sampler.transport} "
            f"{'needs' if sampler.transport == 'folder' else 'does not use'} one; set both or neither"
        )
    if sampler.tokens_in_flight is not None and sampler.tokens_in_flight < sampler.context_length:
        raise ValueError(
            f"sampler.tokens_in_flight={sampler.tokens_in_flight}: one request may hold sampler.context_length="
            f"{sampler.context_length} tokens and would never be taken up; use at least that"
        )
    _check_patience(config)
    if sampler.kind == "sglang":
        if not sampler.urls:
            raise ValueError("sampler.urls=[]: sampler.kind=sglang needs the servers' addresses; set them")
        if sampler.transport != "folder":
            raise ValueError(
                f"sampler.transport={sampler.transport}: sampler.kind=sglang finds weights in a folder; "
                "use sampler.transport=folder with sampler.weights_folder"
            )
        if len(set(sampler.urls)) < len(sampler.urls):
            raise ValueError(f"sampler.urls={list(sampler.urls)}: one is there twice; expected each server once")
        if sampler.on_update == "continue":
            raise ValueError(
                "sampler.on_update=continue: sampler.kind=sglang cannot tell which token came from which version; "
                "use recompute or drain"
            )
    shape = config.model.architecture
    served = shape if sampler.kind == "sglang_jax" and config.model.path is None else None
    if served is not None and served.head_dim % HEAD_DIM_MULTIPLE:
        raise ValueError(
            f"model.architecture.head_dim={served.head_dim}: sampler.kind=sglang_jax serves multiples of "
            f"{HEAD_DIM_MULTIPLE}; use one, or sampler.kind=local"
        )


def _check_patience(config: Config) -> None:
    """A publication must outlast what a sampler may take to acknowledge it, or to be found out."""
    sampler = config.sampler
    seconds = PUBLISH_ATTEMPTS * config.learner.publish_timeout_seconds
    if sampler.stall_seconds > seconds:
        raise ValueError(
            f"sampler.stall_seconds={sampler.stall_seconds:g}: learner.publish_timeout_seconds="
            f"{config.learner.publish_timeout_seconds:g}, {PUBLISH_ATTEMPTS} times, would have ended the run before a "
            "stalled sampler is started anew; raise that, or lower sampler.stall_seconds"
        )
    if sampler.on_update == "drain" and sampler.request_timeout_seconds > seconds:
        raise ValueError(
            f"sampler.request_timeout_seconds={sampler.request_timeout_seconds:g}: sampler.on_update=drain lets "
            "requests end before an update, and learner.publish_timeout_seconds="
            f"{config.learner.publish_timeout_seconds:g}, {PUBLISH_ATTEMPTS} times, would have ended the run by then; "
            "raise that, or lower the request's"
        )


def _check_evaluation(config: Config) -> None:
    evaluation = config.evaluation
    for setting in ("top_k", "top_p", "min_p"):
        value = getattr(evaluation, setting)
        if value == type(evaluation).model_fields[setting].default:
            continue
        if evaluation.temperature == 0:
            raise ValueError(
                f"evaluation.{setting}={value}: evaluation.temperature=0 is greedy and does not read it; raise the "
                "temperature, or leave it out"
            )
        if config.sampler.kind == "sglang":
            raise ValueError(
                f"evaluation.{setting}={value}: a server under sampler.kind=sglang reports log-probabilities of the "
                "unfiltered distribution; leave it out, or use sampler.kind=local or sglang_jax"
            )


def _check_batch(config: Config) -> None:
    learner, shards = config.learner, config.learner.mesh.shards
    if shards % learner.processes:
        raise ValueError(
            f"learner.processes={learner.processes}: they share the rows, which learner.mesh.data × fsdp = {shards} "
            "devices are spread over; use a divisor of it, or a larger mesh"
        )
    if learner.rows_per_microbatch % shards:
        raise ValueError(
            f"learner.rows_per_microbatch={learner.rows_per_microbatch}: rows are spread over learner.mesh.data × fsdp "
            f"= {shards} devices; use a multiple of {shards}"
        )
    if config.buffer.group_size == 1 and config.objective.advantage in COMPARES_GROUP:
        raise ValueError(
            f"buffer.group_size=1: objective.advantage={config.objective.advantage} compares the trajectories of "
            "a group, and one alone has advantage 0; use at least 2, or objective.advantage=reinforce, gae or vtrace"
        )


def _check_agreement(config: Config) -> None:
    agreement = config.learner.agreement
    if agreement.every_steps:
        return
    for setting in ("max_mean", "max_outside_fraction", "on_alarm"):
        value, default = getattr(agreement, setting), type(agreement).model_fields[setting].default
        if value != default:
            raise ValueError(
                f"learner.agreement.{setting}={value}: learner.agreement.every_steps=0 checks nothing; leave it out, "
                "or check every so many steps"
            )


def _check_model(config: Config) -> None:
    model = config.model
    if model.path is None and model.architecture is None:
        raise ValueError(
            "model.path=null: model.architecture is null, too; "
            "give the folder of an existing model or the shape of a new one"
        )
    if model.lora is not None and model.lora.path is not None and (model.path is None or model.warm_start is not None):
        other = "makes a new one" if model.path is None else "would be changed by model.warm_start"
        raise ValueError(
            f"model.lora.path={model.lora.path}: adapters go with the model that they were trained beside, and "
            f"model.path={model.path or 'null'} {other}; set model.path to that model and model.warm_start to null"
        )
    shape = model.architecture
    if shape is not None and shape.num_attention_heads % shape.num_key_value_heads:
        raise ValueError(
            f"model.architecture.num_attention_heads={shape.num_attention_heads}: expected a multiple of "
            f"num_key_value_heads={shape.num_key_value_heads}, because each key/value head serves as many query heads"
        )


COMPARES_GROUP = ("grpo", "dr_grpo", "rloo")
"""Advantages that compare the trajectories of a group with each other, and with nothing else."""
VALUES_STATES = ("gae", "vtrace")
"""Advantages that need a value head."""

READ_BY = {
    "clip_low": ("ppo_clip", "gspo", "cispo", "decoupled_ppo"),
    "clip_high": ("ppo_clip", "gspo", "cispo", "decoupled_ppo"),
    "dual_clip": ("ppo_clip",),
    "divergence": ("dppo",),
    "proximal": ("decoupled_ppo",),
}
"""Policy losses that read a setting."""


def _check_objective(config: Config) -> None:
    objective = config.objective
    for setting, losses in READ_BY.items():
        value = getattr(objective, setting)
        if value is not None and objective.name not in losses:
            raise ValueError(
                f"objective.{setting}={value}: objective.name={objective.name} does not read it; "
                f"set it to null, or use {' or '.join(losses)}"
            )
    if objective.truncation is not None and objective.name not in ("reinforce", "decoupled_ppo"):
        raise ValueError(
            f"objective.truncation.cap={objective.truncation.cap:g}: objective.name={objective.name} weighs by its own "
            "ratio, and would be weighted twice; set objective.truncation to null, or use reinforce or decoupled_ppo"
        )
    if objective.entropy_cap is not None and not objective.entropy_bonus:
        raise ValueError(
            f"objective.entropy_cap={objective.entropy_cap:g}: it caps objective.entropy_bonus, which is 0; "
            "raise the bonus or set the cap to null"
        )
    if (objective.sequence_tokens is None) == (objective.aggregation == "sequence_sum"):
        raise ValueError(
            f"objective.sequence_tokens={objective.sequence_tokens or 'null'}: objective.aggregation=sequence_sum "
            f"divides by it, and objective.aggregation is {objective.aggregation}; set both or neither"
        )
    if objective.advantage == "reinforce" and config.learner.processes > 1:
        raise ValueError(
            f"objective.advantage=reinforce: learner.processes={config.learner.processes} would each compare with the "
            "mean of its own shard of the batch; use gae or vtrace, or learner.processes=1"
        )
    _check_credit(config)
    _check_value(config)
    _check_overlong(config)
    _check_zero_variance(config)


def _check_credit(config: Config) -> None:
    objective = config.objective
    if objective.credit == "turn" and objective.advantage == "rloo":
        raise ValueError(
            "objective.credit=turn: objective.advantage=rloo leaves out what it judges, and the other turns of the "
            "same trajectory would stay in; use objective.credit=trajectory, or dr_grpo"
        )
    if objective.credit == "turn" and objective.advantage in VALUES_STATES:
        raise ValueError(
            f"objective.credit=turn: objective.advantage={objective.advantage} does not read it, because it judges "
            "every turn by itself; leave it out"
        )
    if objective.discount != 1 and objective.credit == "trajectory" and objective.advantage not in VALUES_STATES:
        raise ValueError(
            f"objective.discount={objective.discount:g}: objective.credit=trajectory adds up rewards as they are; "
            f"set it to 1, or use objective.credit=turn or objective.advantage={' or '.join(VALUES_STATES)}"
        )


def _check_value(config: Config) -> None:
    objective = config.objective
    if objective.value is not None and objective.advantage not in VALUES_STATES:
        setting = min(objective.value.model_fields_set, default="decay")
        raise ValueError(
            f"objective.value.{setting}={getattr(objective.value, setting)}: objective.advantage={objective.advantage} "
            f"has no value head; set objective.value to null, or use {' or '.join(VALUES_STATES)}"
        )
    if objective.advantage == "vtrace" and objective.name == "reinforce" and objective.truncation is not None:
        raise ValueError(
            f"objective.truncation.cap={objective.truncation.cap:g}: under objective.name=reinforce the advantages of "
            "vtrace hold their importance weights, and would be weighted twice; set objective.truncation to null, or "
            "use gae"
        )


def _check_overlong(config: Config) -> None:
    overlong, context = config.objective.overlong, config.sampler.context_length
    if overlong.treatment != "penalty":
        for name in ("limit", "buffer"):
            if getattr(overlong, name) is not None:
                raise ValueError(
                    f"objective.overlong.{name}={getattr(overlong, name)}: only objective.overlong.treatment=penalty "
                    f"reads it, and it is {overlong.treatment}; set it to null"
                )
        return
    limit = context if overlong.limit is None else overlong.limit
    if limit > context:
        raise ValueError(
            f"objective.overlong.limit={limit}: no trajectory is longer than sampler.context_length={context}; "
            "use at most that"
        )
    if overlong.buffer is None or overlong.buffer > limit:
        raise ValueError(
            f"objective.overlong.buffer={overlong.buffer or 'null'}: the penalty rises over so many tokens up to "
            f"{limit}; use 1 to {limit}"
        )


def _check_zero_variance(config: Config) -> None:
    objective, staleness = config.objective, config.buffer.max_staleness
    if objective.zero_variance != "keep" and objective.advantage not in COMPARES_GROUP:
        raise ValueError(
            f"objective.zero_variance={objective.zero_variance}: objective.advantage={objective.advantage} compares "
            "with more than the group, so that groups of equal rewards have advantages, too; use keep"
        )
    if objective.zero_variance != "refill":
        if objective.refill_leases is not None:
            raise ValueError(
                f"objective.refill_leases={objective.refill_leases}: only objective.zero_variance=refill reads it, and "
                f"it is {objective.zero_variance}; set it to null"
            )
        return
    if staleness == 0:
        raise ValueError(
            "objective.zero_variance=refill: with buffer.max_staleness=0 nothing more is sampled before the batch in "
            "hand was trained; raise buffer.max_staleness, or use drop"
        )
    if config.learner.processes > 1:
        raise ValueError(
            f"objective.zero_variance=refill: learner.processes={config.learner.processes} would each decide for "
            "itself what to lease; use objective.zero_variance=drop, or one process"
        )
    if objective.refill_leases is not None and objective.refill_leases > staleness:
        raise ValueError(
            f"objective.refill_leases={objective.refill_leases}: the buffer holds buffer.max_staleness + 1 = "
            f"{staleness + 1} batches, and one is leased already; use at most {staleness}"
        )


def _check_buffer(config: Config) -> None:
    buffer = config.buffer
    if buffer.url is not None and buffer.port:
        raise ValueError(
            f"buffer.port={buffer.port}: it is the port of our own Redis, but buffer.url names another; remove one"
        )
    if buffer.url is None and buffer.payload_urls:
        raise ValueError(
            f"buffer.payload_urls={len(buffer.payload_urls)} URLs: they go with a Redis of yours, but buffer.url is "
            "null; set it, or remove them"
        )
    if buffer.url is not None and buffer.host != "127.0.0.1":
        raise ValueError(
            f"buffer.host={buffer.host}: it is where our own Redis listens, but buffer.url names another; remove one"
        )
    if buffer.host in ("0.0.0.0", "::"):
        raise ValueError(
            f"buffer.host={buffer.host}: workers are told this address, and it means their own machine; give the "
            "address by which they reach this one"
        )
    if buffer.min_group_size is not None and buffer.min_group_size > buffer.group_size:
        raise ValueError(
            f"buffer.min_group_size={buffer.min_group_size}: expected at most buffer.group_size={buffer.group_size}; "
            "lower it, or set it to null"
        )
    if buffer.look_ahead is not None and buffer.order != "fifo":
        raise ValueError(
            f"buffer.look_ahead={buffer.look_ahead}: under buffer.order={buffer.order} nothing is overtaken; "
            "use buffer.order=fifo, or set it to null"
        )
    if buffer.max_uses > 1 and buffer.max_staleness == 0:
        raise ValueError(
            f"buffer.max_uses={buffer.max_uses}: with buffer.max_staleness=0 a group is too old once it was trained "
            "on; raise buffer.max_staleness or use 1"
        )
    trajectory = config.sampler.context_length * BYTES_PER_TOKEN + BYTES_PER_TRAJECTORY
    batch = buffer.groups_per_batch * buffer.group_size * trajectory
    if buffer.max_bytes < batch:
        raise ValueError(
            f"buffer.max_bytes={buffer.max_bytes}: one batch of {buffer.groups_per_batch} × {buffer.group_size} "
            f"trajectories of {config.sampler.context_length} tokens may take {batch} bytes "
            "and would never be complete; use at least that"
        )
