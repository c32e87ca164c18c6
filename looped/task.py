"""Puzzles: an answer and a score at every iteration (deep supervision).

`Unrolled` trains all iterations of a row at once. `Carried` trains one
iteration of rows that go on in the next step until they halt, as HRM and TRM
(arXiv 2506.21734, 2510.04871); a halted row costs nothing further.
"""

import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from core.errors import ConfigError
from eval_lib.metrics import Average
from looped.model import LoopedModel, State
from looped.puzzle import puzzle_of
from looped.rules import Share
from model_lib import row_random
from train_lib.classification import Classification
from train_lib.terms import Batch, Term, Weight


class Unrolled(Classification):
  """Cross-entropy and halting loss, means over the iterations.

  Metrics of the last iteration: `accuracy`, the share of rows without a wrong
  symbol, `symbol_accuracy` of the cells that count, `halting_accuracy` (is the
  score right?), `halts_right` and `halts_wrong`, the share of score > 0 among
  right and wrong rows.
  """

  MODEL = LoopedModel
  SERVE = 'looped.chain:serve'
  CERTIFICATE = 'looped.certificate:Evaluator'
  label_names = ()  # an answer is a board
  DECAY = '.*'  # of TRM; few parameters are not matrices
  PANELS = (('Solved', '% of the puzzles', 100.0, {'accuracy': 'all cells'}),)

  @dataclasses.dataclass(frozen=True)
  class Loss(Classification.Loss):
    """Legal fields of `loss`."""

    halting_weight: Weight = 0.5
    # `stablemax` of TRM, or softmax.
    probabilities: Literal['softmax', 'stablemax'] = 'softmax'

  KNOBS = ('halting_weight',)

  def build_model(self):
    """See the base; ConfigError for the puzzle, or blank, of other data."""
    model, data = super().build_model(), self.config['dataset']
    if 'puzzle' not in data:
      return model
    puzzle, info = puzzle_of(data), self.info
    sizes = (puzzle.cells,), len(puzzle.symbols)
    if sizes != (info.input_shape, info.num_classes):
      cells, symbols = math.prod(info.input_shape), info.num_classes
      expected = f'one of {cells} cells and {symbols} tokens, as the data'
      raise ConfigError('dataset.puzzle', data['puzzle'], expected)
    if model.blank not in (0, blank := puzzle.BLANK):
      expected = f'{blank}, the token of the cells to fill in, or 0'
      raise ConfigError('model.blank', model.blank, expected)
    return model

  def apply(self, params, model_state, batch, row_keys=None, **options):
    """Returns logits of the last iteration and `out`; see `LoopedModel`."""
    variables = {'params': params, **model_state}
    return self.model.apply(variables, batch['tokens'], row_keys=row_keys)

  def counted(self, batch: Batch) -> Bool[Array, 'B S']:
    """Returns the cells that the loss and the metrics count."""
    counts = batch['label'] > 0
    blank = self.model.blank
    return counts & (batch['tokens'] == blank) if blank else counts

  def terms(self, forward):
    """Returns cross-entropy and halting loss of all iterations."""
    batch, out = forward.batch, forward.out
    counts = self.counted(batch)
    losses = self.symbol_losses(out['logits'], batch['label'])
    losses = (losses * counts[None]).sum(-1) / counts.sum(-1).clip(1)[None]
    right = self.is_right(out['logits'], batch).astype(out['scores'].dtype)
    halting = optax.sigmoid_binary_cross_entropy(out['scores'], right)
    return (
      Term(losses.mean(0), name='cross_entropy'),
      Term(halting.mean(0), 'halting_weight', name='halting_loss'),
    )

  def symbol_losses(
    self, logits: Float[Array, 'N B S V'], labels: Int[Array, 'B S']
  ) -> Float[Array, 'N B S']:
    """Returns the cross-entropy of each cell in nats, with label smoothing."""
    loss = self.config['loss']
    if loss['probabilities'] == 'stablemax':
      logits = log_stable(logits)
    labels = jnp.broadcast_to(labels, logits.shape[:-1])
    right = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    if not (smoothing := loss.get('label_smoothing')):
      return right
    all_symbols = -jax.nn.log_softmax(logits).mean(-1)
    return (1.0 - smoothing) * right + smoothing * all_symbols

  def is_right(
    self, logits: Float[Array, '*N B S V'], batch: Batch
  ) -> Bool[Array, '*N B']:
    """Returns the rows without a wrong cell, of those that count."""
    label = jnp.where(self.counted(batch), batch['label'], -1)
    answers = logits.argmax(-1)
    label = jnp.broadcast_to(label, answers.shape)
    return ((answers == label) | (label < 0)).all(-1)

  def metrics(self, forward):
    """Returns how right the last iteration and its score are."""
    batch, counts = forward.batch, self.counted(forward.batch)
    mask = batch['mask'] * counts.any(-1)
    right = self.is_right(forward.logits, batch)
    halts = forward.out['scores'][-1] > 0
    same = forward.logits.argmax(-1) == batch['label']
    average = Average.from_values
    return {
      'accuracy': average(right, mask),
      'symbol_accuracy': average(same, counts * mask[:, None]),
      'halting_accuracy': average(halts == right, mask),
      'halts_right': average(halts, mask * right),
      'halts_wrong': average(halts, mask * ~right),
    }

  def outputs(self, params, model_state, batch):
    """Returns what rules read of every iteration.

    'answers' int32 `[B, N, S]`; 'logits' `[B, N, 2]` of the classes wrong (0)
    and right (the score); 'flops' `[B, N]` of a row that stops there.
    """
    _, out = self.apply(params, model_state, batch)
    scores = out['scores'].T
    steps = jnp.arange(1, scores.shape[1] + 1)
    flops = jnp.broadcast_to(self.flops_of_steps(steps), scores.shape)
    return {
      'answers': out['logits'].argmax(-1).swapaxes(0, 1),
      'logits': jnp.stack([jnp.zeros_like(scores), scores], -1),
      'flops': flops,
    }


class Carried(Unrolled):
  """One iteration a step; rows stay in their slot until they halt.

  A row halts after `max_steps` iterations, or at a score > 0; with probability
  `exploration` it goes on for a random number of at least 2 (TRM, spec of HRM).
  Evaluation runs all iterations of its rows.
  """

  @dataclasses.dataclass(frozen=True)
  class Loss(Unrolled.Loss):
    """Legal fields of `loss`."""

    exploration: Share = 0.1

  PANELS: ClassVar[Any] = (
    *Unrolled.PANELS,
    ('Iterations of a finished row', 'iterations', 1.0, {'iterations': 'mean'}),
  )

  def init_carry(self, rows: int) -> dict[str, Any]:
    """Returns slots that all have halted."""
    cells = self.info.input_shape
    tokens = jnp.zeros((rows, *cells), jnp.int32)
    shapes = jax.eval_shape(
      lambda: self.model.init_with_output(
        jax.random.key(0), tokens, method='begin'
      )[0]
    )
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return {
      'state': state,
      'steps': jnp.zeros(rows, jnp.int32),
      'halted': jnp.ones(rows, bool),
      'tokens': tokens,
      'label': tokens,
      'mask': jnp.zeros(rows, jnp.float32),
    }

  def carried(self, carry: dict[str, Any], batch: Batch) -> Batch:
    """Returns the rows of the slots: fresh ones where a slot has halted."""
    fresh = carry['halted']
    rows = {
      name: chosen(fresh, batch[name], carry[name])
      for name in ('tokens', 'label', 'mask')
    }
    return rows | {'carry': carry}

  def apply(self, params, model_state, batch, row_keys=None, **options):
    """Runs one iteration of slots, all of rows without them."""
    if 'carry' not in batch:
      return super().apply(params, model_state, batch, row_keys)
    carry, variables = batch['carry'], {'params': params, **model_state}
    tokens, fresh = batch['tokens'], carry['halted']
    start: State = self.model.apply(variables, tokens, method='begin')
    state = jax.tree.map(
      lambda new, old: chosen(fresh, new, old), start, carry['state']
    )
    state, score = self.model.apply(variables, state, tokens, method='advance')
    steps = jnp.where(fresh, 0, carry['steps']) + 1
    most = self.model.max_steps
    halted = (steps >= most) | (score > 0)
    halted &= steps >= self._least(row_keys, most)
    rows = {name: batch[name] for name in ('tokens', 'label', 'mask')}
    after = {'state': state, 'steps': steps, 'halted': halted, **rows}
    logits = state['logits']
    return logits, {
      'logits': logits[None],
      'scores': score[None],
      'carry': jax.lax.stop_gradient(after),
    }

  def _least(self, row_keys: Any, most: int) -> Int[Array, ' B']:
    """Returns the iterations before which no row may halt."""
    share = self.config['loss']['exploration']
    keys = row_random.fold_rows(row_keys, 'exploration')

    def draw(key: Any) -> Any:
      explores, count = jax.random.split(key)
      least = jax.random.randint(count, (), 2, most + 1)
      return jnp.where(jax.random.uniform(explores) < share, least, 0)

    return jnp.minimum(jax.vmap(draw)(keys), most)

  def metrics(self, forward):
    """Returns also the iterations of the rows that halt in this step."""
    metrics = super().metrics(forward)
    if 'carry' not in forward.out:
      return metrics
    carry = forward.out['carry']
    halted = carry['halted'] * forward.batch['mask']
    iterations = Average.from_values(carry['steps'], halted)
    return metrics | {'iterations': iterations}


def chosen(which: Bool[Array, ' B'], new: Any, old: Any) -> Any:
  """Returns rows of `new` where `which`, else of `old`."""
  return jnp.where(which.reshape(-1, *(1,) * (new.ndim - 1)), new, old)


def log_stable(logits: Float[Array, '*S V']) -> Float[Array, '*S V']:
  """Returns log s(x) of stablemax, whose softmax is `s / sum s`.

  s(x) = x + 1 for x >= 0, else 1 / (1 - x) (Prieto et al. 2025).
  """
  size = jnp.log1p(jnp.abs(logits))
  return jnp.where(logits >= 0, size, -size)
