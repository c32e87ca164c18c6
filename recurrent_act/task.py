"""Classification at the steps of sequences, with a cost for pondering.

Graves (2016), equations (14) and (15): `L + tau P`, where P sums the ponder
cost over the inputs of a sequence. `recurrent_act.data` has `valid`, `targets`
and `target_mask` of a batch.
"""

import dataclasses

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from core.errors import ConfigError
from dataset_lib import builder
from eval_lib.metrics import Average, Maximum
from train_lib.classification import Classification
from train_lib.terms import Batch, Metrics, Term, Weight


class SequenceTask(Classification):
  """Cross-entropy of every target + tau times the ponder cost.

  Both are sums over a sequence, as in the paper, divided by the number of steps
  of the whole batch that have a target: tau (`loss.ponder_weight`) is the
  paper's, and the loss does not depend on the lengths.

  Metrics: `accuracy` is the share of sequences without error, of all that have
  a target, `element_accuracy` that of targets; `cross_entropy` in nats is
  summed over the targets of a step; `steps` (N), `cost` (rho) and `skipped` are
  averages over inputs, `skipped` also of `marked` and other inputs.
  """

  @dataclasses.dataclass(frozen=True)
  class Loss(Classification.Loss):
    """Legal fields of `loss`; `ponder_weight` is tau."""

    ponder_weight: Weight = 0.0

  KNOBS = ('ponder_weight',)
  PANELS = (('Repetitions', 'repetitions of the cell', 1.0, {'steps': 'mean'}),)

  @classmethod
  def validate_config(cls, config):
    """Also sets `model.num_targets`, if it is not given, to the data's."""
    if 'num_targets' not in config['model']:
      source = builder.build_source(
        config['dataset'], config['train_split'], is_checked=True
      )
      targets = source.record(0).get('targets')
      if targets is None:
        expected = 'data with targets at their steps; see recurrent_act.data'
        raise ConfigError('dataset', dict(config['dataset']), expected)
      count = targets.shape[-1]
      config['model'] = {'num_targets': count} | dict(config['model'])
    super().validate_config(config)

  def example(self):
    """Returns a sequence whose steps are all valid."""
    valid = jnp.ones((1, self.info.input_shape[0]), jnp.float32)
    return super().example() | {'valid': valid}

  def arguments(self, batch):
    """Returns the inputs and the validity mask."""
    return self.inputs(batch), batch['valid']

  def outputs(self, params, model_state, batch):
    """Returns per-row arrays, of the last target of a sequence.

    'logits' `[B, 1, K]` and 'label' `[B]`, -1 without a target; 'length' in
    inputs, the mean 'difficulty' (numbers other than 0) and 'steps' of an
    input, and 'flops', `[B]`.
    """
    logits, out = self.apply(params, model_state, batch)
    has_target = batch['target_mask'] > 0
    last = has_target.shape[1] - 1 - jnp.argmax(has_target[:, ::-1], axis=1)
    rows, valid = jnp.arange(len(last)), batch['valid']
    label = batch['targets'][rows, last, -1]
    length, steps = valid.sum(1), (out['ponder']['steps'] * valid).sum(1)
    size = self.info.input_shape[1]
    at_0, at_1 = (self.model.flops((1, size), n) for n in (0.0, 1.0))
    return {
      'logits': logits[rows, last, -1:],
      'label': jnp.where(has_target.any(1), label, -1),
      'length': length,
      'difficulty': (batch['inputs'] != 0).sum((1, 2)) / length.clip(1.0),
      'steps': steps / length.clip(1.0),
      'flops': at_0 * length + (at_1 - at_0) * steps,
    }

  def masks(self, batch):
    """Returns also the inputs, and the steps with a target: `[B, T]`."""
    rows = batch['mask'][:, None]
    steps = {'inputs': batch['valid'], 'targets': batch['target_mask']}
    return super().masks(batch) | {k: v * rows for k, v in steps.items()}

  def terms(self, forward):
    """Returns the cross-entropy and the ponder cost; see the class."""
    losses = self.target_loss(forward, forward.logits)
    cost = forward.out['ponder']['cost']
    return (
      Term(losses, over='targets'),
      Term(cost, 'ponder_weight', 'inputs', per='targets', name='cost'),
    )

  def cross_entropy(
    self, logits: Float[Array, 'B T G K'], batch: Batch
  ) -> Float[Array, 'B T']:
    """Cross-entropy of each step in nats, summed over its targets."""
    num_targets, num_logits = batch['targets'].shape[2], logits.shape[2]
    if num_logits != num_targets:
      expected = f"the data's number of targets, {num_targets}"
      raise ConfigError('model.num_targets', num_logits, expected)
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits.astype(jnp.float32), batch['targets']
    )
    return losses.sum(-1)

  def metrics(self, forward):
    """Returns how right the answers are, and the steps; see the class."""
    batch, ponder = forward.batch, forward.out['ponder']
    asked, inputs = (forward.masks[name] for name in ('targets', 'inputs'))
    correct = forward.logits.argmax(-1) == batch['targets']
    of_targets = jnp.broadcast_to(asked[..., None], correct.shape)
    right = jnp.all(correct | (of_targets == 0), axis=(1, 2))
    average = Average.from_values
    losses = self.cross_entropy(forward.logits, batch)
    metrics: Metrics = {
      'accuracy': average(right, asked.max(axis=1)),
      'element_accuracy': average(correct, of_targets),
      'cross_entropy': average(losses, asked),
      'steps': average(ponder['steps'], inputs),
      'steps_max': Maximum.from_values(ponder['steps'], inputs),
      'skipped': average(ponder['skipped'], inputs),
    }
    if 'marked' in batch:
      marked = batch['marked']
      for name, kind in (('marked', marked), ('unmarked', 1.0 - marked)):
        metrics[f'skipped_{name}'] = average(ponder['skipped'], inputs * kind)
    return metrics
