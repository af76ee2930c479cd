"""The training step, sharded: accumulate over micro-batches, then update once.

The forward pass and the loss run under ``shard_map``; the gradient is taken outside of it, where its
meaning does not depend on which values are replicated. Gradients are those of the *summed* loss:
they add up over micro-batches, and are divided once, by what the objective counts over the whole batch.

What is trained is called parameters. Those are all of the decoder's, or its adapters; then the decoder's own, its base,
are frozen: constants of the step, with no gradient and no moments.

Axes: R = rows, T = tokens of a row, M = R·T.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from learner.mesh import DATA, FSDP, ROWS, TENSOR, WHOLE, gather, held, shardings
from learner.models.attention import KERNELS, Kernel
from learner.models.config import ModelConfig
from learner.models.decoder import Parallel, Remat
from learner.models.logprobs import TokenScores, token_scores
from learner.models.lora import Lora, merge
from learner.models.value_head import VALUE_HEAD, ValueGradient, abstract_value_head, with_value_head
from learner.models.weights import abstract_adapted, abstract_model
from learner.objectives import Objective, Terms
from learner.optimizer import Optimizer
from learner.packing import Ladder, Rows, empty_rows


class TrainState(NamedTuple):
    """All that training changes.

    Attributes:
        params: the decoder's parameters, or those of its adapters; and those of its value head if it has one.
        moments: the optimizer's state.
        step: int32, updates made so far.
    """

    params: nnx.State
    moments: optax.OptState
    step: jax.Array


class Programs(NamedTuple):
    """What runs on the devices for micro-batches of one shape, lowered and not yet compiled.

    Attributes:
        add: forward and backward pass of one micro-batch, added to what came before.
        update: the optimizer's update, once per step.
        score: log-probabilities of one micro-batch.
    """

    add: jax.stages.Lowered
    update: jax.stages.Lowered
    score: jax.stages.Lowered


class TrainStep:
    """The compiled training step of one model on one mesh.

    Every shape of the ladder is compiled by :meth:`warm_up`, or else when it is first met.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        ladder: Ladder,
        optimizer: Optimizer,
        objective: Objective,
        *,
        temperature: float,
        remat: Remat = "none",
        dtype: Any = jnp.float32,
        kernel: Kernel = "xla",
        value_gradient: ValueGradient | None = None,
        lora: Lora | None = None,
    ) -> None:
        """Make a step; nothing is compiled.

        Args:
            config: the model.
            mesh: devices, see ``learner.mesh``.
            ladder: shapes of micro-batches.
            optimizer: how gradients become updates.
            objective: what is maximised.
            temperature: of the sampler.
            remat: what the backward pass computes again.
            dtype: of matrix products and activations. Parameters, moments, norms, scores of attention,
                log-probabilities and gradients between micro-batches are float32.
            kernel: of attention; ``splash`` for TPUs, whose rows are multiples of 128 long.
            value_gradient: how far the gradient of the value loss flows; None for a model without a value head.
            lora: train adapters like this, not the decoder; before anything runs, call :meth:`freeze`.
        """
        self.model = config
        self._graph, self._abstract_base, self._abstract_params = _abstract_parts(config, lora)
        self._frozen: nnx.State | None = nnx.State({}) if lora is None else None
        self._value_gradient = value_gradient
        if value_gradient is not None:
            self._head_graph, head = abstract_value_head(config)
            self._abstract_params = with_value_head(self._abstract_params, head)
        self._mesh, self._ladder = mesh, ladder
        self._optimizer, self._objective = optimizer, objective
        self._temperature, self._remat, self._dtype = temperature, remat, jnp.dtype(dtype)
        self._kernel: Kernel = kernel
        self._split = shardings(mesh, self._abstract_params)
        self._whole, self._by_rows = NamedSharding(mesh, WHOLE), NamedSharding(mesh, ROWS)
        self._zeros = self._jit_zeros()
        self._add = self._jit_add()
        self._update = self._jit_update()
        self._score = jax.jit(self._scores, out_shardings=self._by_rows)
        self._merge = None if lora is None else self._jit_merge(lora)
        self._copy = jax.jit(partial(jax.tree.map, jnp.copy), out_shardings=self._split)
        self._cast = jax.jit(_cast, static_argnums=1)

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self._mesh

    @property
    def abstract_state(self) -> TrainState:
        """Shapes and shardings of the state, for restoring a checkpoint."""
        state: TrainState = self._placed(jax.eval_shape(self._initial, self._abstract_params))
        return state

    @property
    def abstract_base(self) -> nnx.State:
        """Shapes and shardings of what is frozen."""
        base: nnx.State = self._placed(self._abstract_base)
        return base

    @property
    def base_shardings(self) -> nnx.State:
        """Where each frozen parameter lives."""
        split: nnx.State = shardings(self._mesh, self._abstract_base)
        return split

    def freeze(self, base: nnx.State) -> None:
        """Put the decoder's parameters under the adapters on the devices; needed where there are any.

        They are not copied where they are on the devices already, as in a gang they must be.
        """
        self._frozen = jax.device_put(base, self.base_shardings)

    @property
    def shardings(self) -> nnx.State:
        """Where each parameter lives that is trained."""
        return self._split

    def place(self, params: nnx.State) -> nnx.State:
        """A copy of parameters, on the devices. In a gang they must be there already, see ``weights.read_params``."""
        placed: nnx.State = self._copy(jax.device_put(params, self._split))
        return placed

    def initialise(self, params: nnx.State) -> TrainState:
        """The state before the first step; ``params`` are copied."""
        params = self.place(params)
        place = jax.jit(self._initial, out_shardings=shardings(self._mesh, self.abstract_state), donate_argnums=0)
        return place(params)

    def put(self, rows: Rows) -> Rows:
        """Place a micro-batch on the devices, split by rows; in a gang, the rows of this process on its own."""
        return jax.tree.map(partial(jax.make_array_from_process_local_data, self._by_rows), rows)

    def merged(self, params: nnx.State) -> nnx.State:
        """The decoder's parameters, and its value head: ``params`` themselves, or adapters merged into a copy."""
        if self._merge is None:
            return params
        merged: nnx.State = self._merge(self._base, params)
        return with_value_head(merged, params[VALUE_HEAD]) if VALUE_HEAD in params else merged

    def snapshot(self, params: nnx.State, dtype: Any = jnp.float32) -> nnx.State:
        """The decoder's parameters as ``dtype``, as a copy on the devices that later steps do not overwrite."""
        copied: nnx.State = self._copy(params) if self._merge is None else self._merge(self._base, params)
        return copied if dtype == jnp.float32 else self._cast(copied, jnp.dtype(dtype))

    def set_aside(self, params: nnx.State) -> nnx.State:
        """A copy of what is trained, in the hosts' memory, so that the devices have as much room as without it."""
        hosted = jax.tree.map(lambda sharding: sharding.with_memory_kind("pinned_host"), self._split)
        kept: nnx.State = jax.device_put(params, hosted, may_alias=False)
        return kept

    def bring_back(self, kept: nnx.State) -> nnx.State:
        """What was set aside, on the devices."""
        params: nnx.State = jax.device_put(kept, self._split)
        return params

    def warm_up(self, state: TrainState) -> TrainState:
        """Compile and run the step for every shape of the ladder; ``state`` is consumed, and comes back as it was.

        The step runs on the state itself, because a device may have no room for another. Rows of padding have no
        gradient, and without one an update changes nothing but the count.
        """
        step = jax.device_put(np.int32(state.step), self._whole)
        batch = [self.put(empty_rows(shape)) for shape in self._ladder.part(jax.process_count()).shapes]
        warm, metrics = self(state, batch, version=0)
        if metrics["grad_norm"] != 0:
            raise RuntimeError(f"rows of padding have a gradient of norm {metrics['grad_norm']}; expected 0")
        return jax.block_until_ready(warm._replace(step=step))

    def __call__(
        self, state: TrainState, batch: Sequence[Rows], version: int, *, skipped: float = 0.0
    ) -> tuple[TrainState, dict[str, Any]]:
        """One optimizer update; ``state`` is consumed.

        Args:
            state: what to update.
            batch: micro-batches from :meth:`put`, each of a shape of the ladder.
            version: the policy version being trained.
            skipped: what sequences that were left out of ``batch``, because they have no gradient, would have added to
                the divisor of the loss; so leaving them out changes nothing.

        Returns:
            The new state, and scalars still on the device: loss, the objective's
            diagnostics, grad_norm (before clipping), learning_rate and trained_tokens.
        """
        skipped_on_device = jax.device_put(np.float32(skipped), self._whole)
        return self._update(state, *self._accumulate(state.params, batch, version), skipped_on_device)

    def gradients(self, params: nnx.State, batch: Sequence[Rows], version: int) -> tuple[nnx.State, dict[str, Any]]:
        """Gradient of the batch's mean loss, and the objective's summary."""
        gradient, terms = self._accumulate(params, batch, version)
        return jax.tree.map(lambda g: g / terms.divisor, gradient), terms.summary()

    def logprobs(self, params: nnx.State, rows: Rows) -> TokenScores:
        """Scores[R, T] of the targets of one micro-batch."""
        return self._score(self._base, params, rows)

    def lower(self, shape: tuple[int, int]) -> Programs:
        """The step's own programs for one shape of micro-batches (rows, tokens of a row), from shapes alone.

        Nothing is allocated or run, so the devices of the mesh need not exist here.
        """
        state, gradient_and_terms = self.abstract_state, jax.eval_shape(self._zeros)
        gradient, terms = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            gradient_and_terms,
            (self._split, jax.tree.map(lambda _: self._whole, gradient_and_terms[1])),
        )
        rows = jax.tree.map(
            lambda x_RT: jax.ShapeDtypeStruct(x_RT.shape, x_RT.dtype, sharding=self._by_rows), empty_rows(shape)
        )
        version = jax.ShapeDtypeStruct((), jnp.int32, sharding=self._whole)
        skipped = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._whole)
        return Programs(
            add=self._add.lower(gradient, terms, self.abstract_base, state.params, rows, version),
            update=self._update.lower(state, gradient, terms, skipped),
            score=self._score.lower(self.abstract_base, state.params, rows),
        )

    @property
    def _base(self) -> nnx.State:
        """The frozen parameters; none where everything is trained."""
        if self._frozen is None:
            raise RuntimeError("the step trains adapters of a decoder that it was not given; call freeze first")
        return self._frozen

    def _placed(self, abstract: Any) -> Any:
        """A tree of shapes with the sharding of each."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            abstract,
            shardings(self._mesh, abstract),
        )

    def _accumulate(self, params: nnx.State, batch: Sequence[Rows], version: int) -> tuple[nnx.State, Terms]:
        """Gradient of the summed loss, and the terms, of all micro-batches."""
        total = self._zeros()
        version_on_device = jax.device_put(np.int32(version), self._whole)
        for rows in batch:
            total = self._add(*total, self._base, params, rows, version_on_device)
        return total

    def _initial(self, params: nnx.State) -> TrainState:
        return TrainState(params, self._optimizer.rule.init(params), jnp.zeros((), jnp.int32))

    def _local_scores(self, base: nnx.State, params: nnx.State, rows: Rows) -> TokenScores:
        """Scores of this device's rows; runs under ``shard_map``."""
        params = nnx.merge_state(base, params)
        whole = partial(gather, dtype=self._dtype)
        tensor = TENSOR if self._mesh.shape[TENSOR] > 1 else None
        outer = nnx.State({name: part for name, part in params.items() if name not in ("layers", VALUE_HEAD)})
        model = nnx.merge(self._graph, nnx.State({**whole(outer), "layers": params["layers"]}))
        attend = KERNELS[self._kernel](rows.segments)
        hidden_RTH, _ = model(rows.tokens, rows.positions, attend, parallel=Parallel(whole, tensor), remat=self._remat)
        hidden_MH = hidden_RTH.reshape(-1, hidden_RTH.shape[-1])
        scores_M = token_scores(
            hidden_MH,
            model.output_VH,
            rows.targets.reshape(-1),
            temperature=self._temperature,
            softcap=model.config.final_logit_softcapping,
            tensor=tensor,
        )
        if self._value_gradient is not None:
            if self._value_gradient == "head":
                hidden_MH = jax.lax.stop_gradient(hidden_MH)
            head = nnx.merge(self._head_graph, gather(params[VALUE_HEAD], jnp.float32))
            scores_M = scores_M._replace(value=head(hidden_MH))
        return jax.tree.map(lambda x_M: x_M.reshape(rows.targets.shape), scores_M)

    def _scores(self, base: nnx.State, params: nnx.State, rows: Rows) -> TokenScores:
        specs = (held(self._mesh, base), held(self._mesh, params), ROWS)
        return self._sharded(self._local_scores, specs, ROWS)(base, params, rows)

    def _loss(self, params: nnx.State, base: nnx.State, rows: Rows, version: jax.Array) -> tuple[jax.Array, Terms]:
        """Loss summed over the micro-batch on all devices, and its terms."""

        def local(params: nnx.State, base: nnx.State, rows: Rows, version: jax.Array) -> Terms:
            return self._objective(self._local_scores(base, params, rows), rows, version).over_devices((DATA, FSDP))

        specs = (held(self._mesh, params), held(self._mesh, base), ROWS, WHOLE)
        terms = self._sharded(local, specs, WHOLE)(params, base, rows, version)
        return terms.loss, terms

    def _sharded(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        # Attention kernels of TPUs do not support check_vma; the gradient is right without it because it is
        # taken outside.
        return jax.shard_map(function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _jit_merge(self, lora: Lora) -> Any:
        return jax.jit(partial(merge, lora=lora), out_shardings=self.base_shardings)

    def _jit_zeros(self) -> Any:
        rows = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, empty_rows(self._ladder.shapes[0])))
        version = jax.ShapeDtypeStruct((), jnp.int32)
        _, terms = jax.eval_shape(self._loss, self._abstract_params, self._abstract_base, rows, version)
        abstract = (self._abstract_params, terms)
        zeros = partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
        return jax.jit(zeros, out_shardings=(self._split, self._whole))

    def _jit_add(self) -> Any:
        def add(
            gradient: nnx.State, terms: Terms, base: nnx.State, params: nnx.State, rows: Rows, version: jax.Array
        ) -> tuple[nnx.State, Terms]:
            new_gradient, new_terms = jax.grad(self._loss, has_aux=True)(params, base, rows, version)
            return jax.tree.map(jnp.add, gradient, new_gradient), terms + new_terms

        return jax.jit(add, out_shardings=(self._split, self._whole), donate_argnums=(0, 1))

    def _jit_update(self) -> Any:
        def update(
            state: TrainState, gradient: nnx.State, terms: Terms, skipped: jax.Array
        ) -> tuple[TrainState, dict[str, jax.Array]]:
            gradient = jax.tree.map(lambda g: g / jnp.maximum(terms.divisor + skipped, 1.0), gradient)
            norm = optax.global_norm(gradient)
            change, moments = self._optimizer.rule.update(gradient, state.moments, state.params)
            metrics = terms.summary(skipped) | {
                "grad_norm": norm,
                "learning_rate": jnp.asarray(self._optimizer.schedule(state.step)),
                "trained_tokens": terms.tokens,
            }
            params = optax.apply_updates(state.params, change)
            # A batch without a gradient says nothing: momentum and weight decay alone must not move the policy. A norm
            # that is not a number counts as one, so that it is seen.
            params, moments = jax.tree.map(
                partial(jnp.where, norm != 0), (params, moments), (state.params, state.moments)
            )
            return TrainState(params, moments, state.step + 1), metrics

        out = (shardings(self._mesh, self.abstract_state), self._whole)
        return jax.jit(update, out_shardings=out, donate_argnums=0)


def _cast(params: nnx.State, dtype: Any) -> nnx.State:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def _abstract_parts(config: ModelConfig, lora: Lora | None) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """The decoder's graph, what is frozen and what is trained, as shapes."""
    if lora is not None:
        return abstract_adapted(config, lora)
    graph, params = abstract_model(config)
    return graph, nnx.State({}), params
