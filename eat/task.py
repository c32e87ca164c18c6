"""Fine-tuning with exits: joint loss, distillation, annealed pruning.

EAT, equations (1)-(3): `sum_l lambda_l CE(P_l, y) + mu T^2 KL(P_teacher^T ||
P_L^T)`. The same task trains a dense model (one head) and a distilled student
(one head and a teacher).
"""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dataset_lib.errors import ConfigError
from dataset_lib.fields import (
  Field,
  check_field,
  check_fields,
  check_one_of,
  integer,
  real,
  text,
)
from eat import serving
from eat.heads import place_exits, place_prunes
from eat.teacher import check_tokenizer
from eval_lib.metrics import Average
from model_lib.layers import ACTIVATIONS
from serve_lib.chain import NO_RUN
from train_lib import loading
from train_lib.classification import as_config_error, construct
from train_lib.text_classification import (
  TextClassification,
)

EXIT_WEIGHT, LAST_WEIGHT = 0.3, 1.0  # EAT, equation (1)
# What every encoder here has and checks only when it is traced, too late for
# an error of one line.
ENCODER_FIELDS = {
  'max_positions': integer(1, 2**20),
  'type_vocab_size': integer(0, 2**10),
  'norm_epsilon': real(1e-20, 0.1),
  'attention_dropout': real(0.0, 0.99),
  'classifier_dropout': real(0.0, 0.99),
}


def _weights() -> Field:
  return Field(
    'a tuple of numbers in [0, 1000], one for each head, the last for the '
    'last layer',
    lambda value: (
      isinstance(value, (tuple, list))
      and len(value) > 0
      and all(real(0.0, 1e3).accepts(weight) for weight in value)
    ),
    (1.0,),
  )


class FineTune(TextClassification):
  """Cross-entropy of all heads, and two distillations.

  Configuration, in `loss`: `exit_weights` (lambda, one for each head),
  `temperature` (T), `teacher` (the directory of a finished run, or ''),
  `distill_weight` (mu, of the teacher to the last head) and
  `self_distill_weight` (of the last head to each exit).

  Knobs: `prune_scale` multiplies the model's prune ratios while training,
  and the two distillation weights override the configuration's.
  """

  LOSS_FIELDS = TextClassification.LOSS_FIELDS | {
    'exit_weights': _weights(),
    'temperature': real(0.01, 100.0, default=2.0),
    'teacher': text("the directory of a run, or ''", default=''),
    'distill_weight': real(0.0, 1e3, default=0.5),
    'self_distill_weight': real(0.0, 1e3, default=0.0),
  }
  KNOBS = ('prune_scale', 'distill_weight', 'self_distill_weight')

  @classmethod
  def resolve(cls, config) -> None:
    """Fills in what follows from the depth of the model; finds the teacher.

    Zeros in `model.prune_layers` and `model.exit_layers` ask for so many
    layers by depth, see `place_layers`; empty `loss.exit_weights` for 0.3 for
    each exit and 1 for the last head; empty `layers` of an evaluation for
    those of all heads.
    """
    super().resolve(config)
    if config.loss.get('teacher'):
      loading.load_config(config.loss.teacher, key='loss.teacher')
      check_tokenizer(config.loss.teacher, config.dataset.get('tokenizer', ''))
    _check_directory(config.warm_start.workdir)
    place_layers(config.model)
    layers = _configured_heads(config)
    if config.loss.get('exit_weights', None) == ():
      exits = (EXIT_WEIGHT,) * (len(layers) - 1)
      config.loss.exit_weights = (*exits, LAST_WEIGHT)
    for entry in config.evals.values():
      if getattr(entry, 'layers', None) == ():
        entry.layers = layers

  @classmethod
  def validate(cls, config) -> None:
    """Also checks that there is a weight for each head."""
    super().validate(config)
    given = check_fields(config['loss'], cls.LOSS_FIELDS, 'loss')
    _check_encoder(config['model'])
    heads = len(_configured_heads(config))
    if len(given['exit_weights']) != heads:
      raise ConfigError(
        'loss.exit_weights',
        given['exit_weights'],
        f'{heads} weights, one for each head of the model',
      )

  @functools.cached_property
  def teacher(self) -> Any:
    """The teacher's task, or None; evaluation and serving never ask for it."""
    directory = self.config['loss']['teacher']
    if not directory:
      return None
    config = loading.load_config(directory, key='loss.teacher')
    own = self.config['dataset'].get('tokenizer', '')
    check_tokenizer(directory, own)
    teacher = loading.load_task(directory, config)
    if teacher.info.num_classes != self.info.num_classes:
      raise ConfigError(
        'loss.teacher',
        f'{directory} with {teacher.info.num_classes} classes',
        f'a run with the {self.info.num_classes} classes of the data set',
      )
    names = teacher.info.class_names, self.info.class_names
    if all(names) and names[0] != names[1]:
      raise ConfigError(
        'loss.teacher',
        f'{directory} with the classes {", ".join(names[0])}',
        f'a run with the classes of the data set, {", ".join(names[1])}',
      )
    return teacher

  def init_frozen(self):
    """The teacher's parameters, if there is one."""
    if self.teacher is None:
      return {}
    loaded = loading.load_params(
      self.config['loss']['teacher'], self.teacher, jax.sharding.get_mesh()
    )
    return loaded.variables

  def loss(self, params, model_state, frozen, batch, norm, row_keys, knobs):
    """The joint loss of the real rows; see the module."""
    options = (
      {'prune_scale': knobs['prune_scale']} if 'prune_scale' in knobs else {}
    )
    logits, out = self.apply(params, model_state, batch, row_keys, **options)
    exits = out['exits'] if 'exits' in out else logits[None]
    per_head = jax.vmap(lambda one: self.cross_entropy(one, batch))(exits)
    weights = jnp.asarray(self.config['loss']['exit_weights'], jnp.float32)
    rows = (weights[:, None] * per_head).sum(0)
    metrics = self.head_metrics(exits, per_head, out, batch)
    if self.teacher is not None:
      target = self._teacher_logits(frozen, batch)
      rows += self._weight('distill_weight', knobs) * self.divergence(
        target, exits[-1]
      )
    if exits.shape[0] > 1:
      target = jax.lax.stop_gradient(exits[-1])
      divergences = jax.vmap(lambda one: self.divergence(target, one))
      rows += self._weight('self_distill_weight', knobs) * divergences(
        exits[:-1]
      ).sum(0)
    loss = (rows * batch['mask']).sum() / norm['examples']
    return loss, (metrics, model_state)

  def _weight(self, name: str, knobs) -> Any:
    return knobs.get(name, self.config['loss'][name])

  def _teacher_logits(self, frozen, batch) -> Float[Array, 'B O']:
    logits, _ = self.teacher.apply(
      frozen['params'], frozen['model_state'], batch
    )
    return jax.lax.stop_gradient(logits)

  def divergence(
    self, target: Float[Array, 'B O'], logits: Float[Array, 'B O']
  ) -> Float[Array, ' B']:
    """`T^2 KL(target^T || logits^T)` of each row; regression: the square."""
    if self.is_regression:
      return jnp.square(target[:, 0] - logits[:, 0])
    temperature = self.config['loss']['temperature']
    teacher = jax.nn.log_softmax(target / temperature)
    student = jax.nn.log_softmax(logits / temperature)
    kl = (jnp.exp(teacher) * (teacher - student)).sum(-1)
    return temperature**2 * kl

  def head_metrics(self, exits, per_head, out, batch) -> dict[str, Any]:
    """Quality of the last head, accuracy of each exit, share kept."""
    metrics = self.quality(exits[-1], per_head[-1], batch)
    layers = head_layers(self.model)[:-1]
    for layer, logits in zip(layers, exits[:-1], strict=True):
      if not self.is_regression:
        correct = (logits.argmax(-1) == batch['label']).astype(jnp.float32)
        metrics[f'accuracy_exit_{layer}'] = Average.from_values(
          correct, batch['mask']
        )
    if 'kept' in out and out['kept'].shape[0]:
      share = out['kept'][-1] / batch['length'].astype(jnp.float32)
      metrics['retention'] = Average.from_values(share, batch['mask'])
    return metrics

  def evaluate(self, params, model_state, batch):
    """Metrics without noise, with the model's full prune ratios."""
    logits, out = self.apply(params, model_state, batch)
    exits = out['exits'] if 'exits' in out else logits[None]
    per_head = jax.vmap(lambda one: self.cross_entropy(one, batch))(exits)
    return self.head_metrics(exits, per_head, out, batch)

  def serve(self, variables, options, run=NO_RUN):
    """Exits, pruning and calibration; options: `eat.policy.Options`."""
    return serving.serve(self, variables, options, run)


def head_layers(model: Any) -> tuple[int, ...]:
  """The layers that have a head; of a dense model the last one."""
  return model.heads() if hasattr(model, 'heads') else (model.sizes().depth,)


def place_layers(model: Any) -> None:
  """Replaces zeros in `prune_layers` and `exit_layers` by layers, in place.

  What does not fit a shallow model is left out, prunings with their ratios.

  Args:
    model: `config.model`, whose depth is known.
  """
  depth = model.get('depth', 0)
  exits = model.get('exit_layers', ())
  if exits and not any(exits) and depth > 0:
    model.exit_layers = place_exits(depth, len(exits))
  prunes = model.get('prune_layers', ())
  if prunes and not any(prunes) and depth > 0:
    model.prune_layers = place_prunes(depth, len(prunes))
    if len(model.prune_ratios) == len(prunes):
      model.prune_ratios = model.prune_ratios[: len(model.prune_layers)]


def _check_directory(workdir: str) -> None:
  if workdir and not os.path.isdir(workdir):
    expected = "the directory of another run, or ''"
    raise ConfigError('warm_start.workdir', workdir, expected)


def _check_encoder(model: Any) -> None:
  """Checks the fields that are read only when the model is traced."""
  for name, field in ENCODER_FIELDS.items():
    if name in model:
      check_field(f'model.{name}', model[name], field)
  for name in ('activation', 'pooler_activation'):
    if name in model:
      check_one_of(f'model.{name}', model[name], ACTIVATIONS)


def _configured_heads(config: Any) -> tuple[int, ...]:
  """The layers with a head of the model that a configuration describes."""
  # A wrong dtype is another check's affair.
  only_model = {'model': config['model'], 'dtype': 'float32'}
  model = construct(only_model, num_classes=2)
  try:
    sizes = model.sizes()
    layers = head_layers(model)
  except ValueError as error:
    raise as_config_error(error, 'model', config['model']) from error
  if sizes.width % sizes.num_heads:
    raise ConfigError(
      'model.num_heads', sizes.num_heads, f'a divisor of width {sizes.width}'
    )
  return layers
