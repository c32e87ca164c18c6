"""A recurrent network that ponders over its inputs and answers at each.

Graves (2016), "Adaptive Computation Time for Recurrent Neural Networks", and
Fojo's straight-through ACT, Skip-ACT and fixed repetitions in its place.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, Num

from model_lib import flops
from model_lib.logical import constrain, partitioned
from recurrent_act import cell
from recurrent_act.cell import Pondering

# Square matrices, and as many for the input, in a cell.
MATRICES = {'rnn': 1, 'gru': 3, 'lstm': 4}


class RecurrentModel(nn.Module):
  """One pondering cell and a linear layer on its state.

  Attributes:
    num_classes: classes of a target; for two of them the layer has a single
      output, whose sigmoid is the probability of class 1.
    num_targets: targets at each input, G.
    cell: 'rnn' (tanh), 'gru' or 'lstm'.
    width: width of the cell, D.
    rule: 'act', 'straight_through', 'skip', or 'fixed' for always `max_steps`
      repetitions.
    max_steps: most repetitions at an input.
    epsilon: a row halts when its scores sum to `1 - epsilon`.
    mu: of 'skip', the largest score, a positive integer; an input can make the
      `mu - 1` after it be skipped.
    halting_bias: initial bias of the score; Graves (2016) takes 1.
    dynamic: stop at every input when all rows of the batch have halted
      (inference; no gradient) instead of masking `max_steps` repetitions.
    dtype: compute dtype; parameters, halting and logits are float32.

  Raises:
    ValueError: at construction, naming the field, for an illegal value.
  """

  num_classes: int
  num_targets: int = 1
  cell: str = 'lstm'
  width: int = 128
  rule: str = 'act'
  max_steps: int = 20
  epsilon: float = 0.01
  mu: int = 1
  halting_bias: float = 1.0
  dynamic: bool = False
  dtype: Any = jnp.float32

  def __post_init__(self):
    super().__post_init__()
    if self.cell not in cell.CELLS:
      raise ValueError(
        f'cell: expected one of {tuple(cell.CELLS)}, got {self.cell!r}'
      )
    for name in ('num_targets', 'width'):
      if getattr(self, name) < 1:
        raise ValueError(
          f'{name}: expected at least 1, got {getattr(self, name)}'
        )
    self.pondering()

  @nn.nowrap
  def pondering(self) -> Pondering:
    """How the cell ponders, as the fields describe."""
    return Pondering(
      rule=self.rule,
      max_steps=self.max_steps,
      epsilon=self.epsilon,
      mu=self.mu,
      dynamic=self.dynamic,
    )

  @nn.compact
  def __call__(
    self,
    inputs: Float[Array, 'B T E'],
    valid: Bool[Array, 'B T'] | Num[Array, 'B T'] | None = None,
    row_keys: Key[Array, ' B'] | None = None,
  ) -> tuple[Float[Array, 'B T G K'], dict[str, Any]]:
    """Answers at every input.

    Args:
      inputs: sequences of vectors.
      valid: non-zero where an input stands; None if all do. The others change
        nothing, and the answer there is that of the input before.
      row_keys: not used; the model has no noise.

    Returns:
      (logits float32, out): `out['features']` `[B, D]` is the hidden output
      after the last input; `out['ponder']` has `steps` (N, int32), `cost`
      (rho, float32) and `skipped` (bool) of every input, `[B, T]`, 0 where
      none stands.
    """
    everywhere = jnp.ones(inputs.shape[:2], bool)
    step = cell.Repetition(
      cell=self.cell,
      width=self.width,
      has_score=self.rule != 'fixed',
      halting_bias=self.halting_bias,
      dtype=self.dtype,
      name='repetition',
    )
    state = cell.start_state(self.cell, inputs.shape[0], self.width)
    if self.is_initializing():
      step(state, jnp.pad(inputs[:, 0], ((0, 0), (0, 1))))
    # The loops are plain JAX: Linen modules may not be called inside one.
    pure, variables = step.unbind()
    state, hidden, spent = cell.ponder_sequence(
      lambda state, x: pure.apply(variables, state, x),
      state,
      inputs,
      everywhere if valid is None else valid.astype(bool),
      self.pondering(),
    )
    ponder = {
      'steps': spent.steps,
      'cost': spent.cost,
      'skipped': spent.skipped,
    }
    features = cell.hidden_of(state)
    return self._logits(hidden), {'features': features, 'ponder': ponder}

  def _logits(self, hidden: Float[Array, 'B T D']) -> Float[Array, 'B T G K']:
    """Equation (2)."""
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
    """FLOPs of one sequence `[T, E]`.

    Args:
      input_shape: (T, E).
      steps: mean repetitions at an input; None for `max_steps`.
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
