"""A recurrent network that ponders over each input and predicts at each.

Graves (2016), "Adaptive Computation Time for Recurrent Neural Networks", and
Fojo's straight-through ACT, Skip-ACT and fixed repetitions in its place.
"""

from typing import Annotated, Any, Literal

import flax.linen as nn
import jax.numpy as jnp
from annotated_types import Interval
from jaxtyping import Array, Bool, Float, Key, Num

from model_lib import flops
from model_lib.layers import build
from model_lib.logical import constrain, partitioned
from recurrent_act import cell
from recurrent_act.cell import Pondering

# Number of recurrent matrices, and of input matrices, of a cell.
MATRICES = {'rnn': 1, 'gru': 3, 'lstm': 4}


class RecurrentModel(nn.Module):
  """One pondering cell and a linear layer on its state.

  Two classes have a single output, whose sigmoid is the probability of class 1.
  Halting and logits are float32.
  """

  num_classes: int
  # Targets at each input, G.
  num_targets: Annotated[int, Interval(ge=1, le=2**20)] = 1
  cell: Literal['rnn', 'gru', 'lstm'] = 'lstm'
  width: Annotated[int, Interval(ge=1, le=2**17)] = 128
  # 'fixed' always repeats `max_steps` times.
  rule: Literal['act', 'straight_through', 'skip', 'fixed'] = 'act'
  # Most repetitions at an input.
  max_steps: Annotated[int, Interval(ge=1, le=10_000)] = 20
  # A row halts when its scores sum to `1 - epsilon`.
  epsilon: Annotated[float, Interval(ge=0.0, lt=1.0)] = 0.01
  # Of 'skip', the largest score; an input can skip the `mu - 1` after it.
  mu: Annotated[int, Interval(ge=1, le=10_000)] = 1
  # Initial bias of the score, that of Graves (2016).
  halting_bias: Annotated[float, Interval(ge=-1e3, le=1e3)] = 1.0
  # Stop at every input when all rows of the batch have halted (inference; no
  # gradient) instead of masking `max_steps` repetitions.
  dynamic: bool = False
  dtype: Any = jnp.float32

  def __post_init__(self):
    super().__post_init__()
    self.pondering()

  @nn.nowrap
  def pondering(self) -> Pondering:
    """Returns the fields that describe pondering."""
    return build(Pondering, self)

  @nn.compact
  def __call__(
    self,
    inputs: Float[Array, 'B T E'],
    valid: Bool[Array, 'B T'] | Num[Array, 'B T'] | None = None,
    row_keys: Key[Array, ' B'] | None = None,
  ) -> tuple[Float[Array, 'B T G K'], dict[str, Any]]:
    """Predicts at every input; one whose `valid` is 0 changes nothing.

    `row_keys` is not used, as the model has no noise.

    Returns:
      (logits float32, out): `out['features']` `[B, D]` is the hidden output
      after the last input; `out['ponder']` has `steps` (N, int32), `cost`
      (rho, float32) and `skipped` (bool) of every input, `[B, T]`, 0 for
      padding.
    """
    everywhere = jnp.ones(inputs.shape[:2], bool)
    has_score = self.rule != 'fixed'
    step = build(cell.Repetition, self, has_score=has_score, name='repetition')
    state = cell.start_state(self.cell, inputs.shape[0], self.width)
    if self.is_initializing():
      step(state, jnp.pad(inputs[:, 0], ((0, 0), (0, 1))))
    # Linen modules must not be called in a plain JAX loop.
    pure, variables = step.unbind()
    state, hidden, spent = cell.ponder_sequence(
      lambda state, x: pure.apply(variables, state, x),
      state,
      inputs,
      everywhere if valid is None else valid.astype(bool),
      self.pondering(),
    )
    features = cell.hidden_of(state)
    return self._logits(hidden), {'features': features, 'ponder': vars(spent)}

  def _logits(self, hidden: Float[Array, 'B T D']) -> Float[Array, 'B T G K']:
    """Computes equation (2)."""
    num_outputs = 1 if self.num_classes == 2 else self.num_classes
    outputs = nn.Dense(
      self.num_targets * num_outputs,
      dtype=jnp.float32,
      kernel_init=partitioned(
        nn.initializers.lecun_normal(), 'embed', 'classes'
      ),
      name='head',
    )(hidden)
    shape = (*hidden.shape[:2], self.num_targets, num_outputs)
    logits = outputs.reshape(shape)
    if self.num_classes == 2:
      logits = jnp.pad(logits, ((0, 0), (0, 0), (0, 0), (1, 0)))
    return constrain(logits, 'batch', None, None, None)

  @nn.nowrap
  def flops(
    self, input_shape: tuple[int, ...], steps: float | None = None
  ) -> float:
    """Returns the FLOPs of one sequence, `input_shape` (T, E).

    `steps` is the mean of the repetitions at an input; None for `max_steps`.
    """
    length, size = input_shape
    repetition = MATRICES[self.cell] * flops.dense(
      1, size + 1 + self.width, self.width
    )
    if self.rule != 'fixed':
      repetition += flops.dense(1, self.width, 1)
    num_outputs = 1 if self.num_classes == 2 else self.num_classes
    head = flops.dense(1, self.width, self.num_targets * num_outputs)
    repetitions = self.max_steps if steps is None else steps
    return length * (repetitions * repetition + head)
