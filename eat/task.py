"""Fine-tuning with exits: joint loss, distillation, annealed pruning.

EAT, equations (1)-(3): `sum_l lambda_l CE(P_l, y) + mu T^2 KL(P_teacher^T ||
P_L^T)`. The same task trains a dense model (one head) and a distilled student
(one head and a teacher).
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Interval, MinLen
from jaxtyping import Array, Float

from core.errors import ConfigError, InvalidDataError, MissingDataError
from dataset_lib import tokenizer
from eat.policy import read_options
from eat.serving import EatChain, as_adaptive, warnings_of
from eval_lib.calibration import CalibrationFile
from eval_lib.certificate import GUARANTEED, CertificateFile
from eval_lib.metrics import Average
from serve_lib.chain import NO_RUN
from serve_lib.policies import PRUNED, UNPRUNED, ExitPolicy
from train_lib import distillation, loading
from train_lib.distillation import TEACHER, Student
from train_lib.run_directory import TOKENIZER
from train_lib.task import Batch, Weight, construct
from train_lib.text_classification import TextClassification

EXIT_WEIGHT, LAST_WEIGHT = 0.3, 1.0  # EAT, equation (1)
SCALES = (1.25, 1.5, 2.0)  # of the prune ratios, for a certificate


class FineTune(Student, TextClassification):
  """Cross-entropy of all heads, and two distillations.

  The knob `prune_scale` multiplies the model's prune ratios while training,
  `exit_scale` the weights of all heads but the last: ('alternate', 0, 1) trains
  the last head alone in every other step (BERxiT, Xin et al. 2021). The two
  distillation weights override the configuration's.
  """

  @dataclasses.dataclass(frozen=True)
  class Loss(TextClassification.Loss):
    """Legal fields of `loss`; default weights: 0.3 per exit, 1 for the last."""

    exit_weights: Annotated[tuple[Weight, ...], MinLen(1)] | None = None
    temperature: Annotated[float, Interval(ge=0.01, le=100.0)] = 2.0
    teacher: Annotated[str, "the directory of a run, or ''"] = ''
    distill_weight: Weight = 0.5  # distillation from teacher to last head
    self_distill_weight: Weight = 0.0  # from later heads to each exit
    # The last head, or all later ones, which then count the same.
    self_distill_from: Literal['last', 'later'] = 'last'

  KNOBS = 'prune_scale', 'exit_scale', 'distill_weight', 'self_distill_weight'

  @classmethod
  def validate_config(cls, config) -> None:
    """Also checks the teacher, and that there is a weight for each head."""
    teacher = config['loss'].get('teacher')
    if teacher:
      loading.load_config(teacher, key=TEACHER)
      check_tokenizer(teacher, config['dataset'].get('tokenizer', ''))
    super().validate_config(config)
    heads = len(head_layers(construct(config, num_classes=2)))
    weights = config['loss']['exit_weights']
    if weights is None:
      weights = (*(EXIT_WEIGHT,) * (heads - 1), LAST_WEIGHT)
      config['loss']['exit_weights'] = weights
    if len(weights) != heads:
      expected = f'{heads} weights, one for each head of the model'
      raise ConfigError('loss.exit_weights', weights, expected)

  def cheaper(self):
    """Returns larger prune ratios; see `Task.cheaper`."""
    ratios = getattr(self.model, 'prune_ratios', ())
    scaled = [tuple(round(s * r, 4) for r in ratios) for s in SCALES]
    legal = [one for one in scaled if any(one) and max(one) < 1]
    return tuple({'prune_ratios': one} for one in legal)

  def outputs(self, params, model_state, batch):
    """Also returns 'flops' `[B, E]`, of rows that leave at each head."""
    result = super().outputs(params, model_state, batch)
    if hasattr(model := self.model, 'heads'):
      costs = [
        np.cumsum(model.stage_flops(n, model.static_sizes(n), True))
        for n in range(1, batch['tokens'].shape[1] + 1)
      ]
      result['flops'] = jnp.asarray(costs, jnp.float32)[batch['length'] - 1]
    return result

  @property
  def head_layers(self) -> tuple[int, ...]:
    """The layer of each head; see `Task.head_layers`."""
    return head_layers(self.model)

  def loss(self, params, model_state, frozen, batch, norm, row_keys, knobs):
    """Returns the joint loss of the real rows; see the module."""
    options = {k: knobs[k] for k in ('prune_scale',) if k in knobs}
    logits, out = self.apply(params, model_state, batch, row_keys, **options)
    exits, per_head, metrics = self._heads(logits, out, batch)
    weights = jnp.asarray(self.config['loss']['exit_weights'], jnp.float32)
    exit_scale = knobs.get('exit_scale', 1.0)
    weights = weights.at[:-1].multiply(exit_scale)
    rows = (weights[:, None] * per_head).sum(0)
    if self.teacher is not None:
      target = self.teacher_logits(frozen, batch)
      rows += self.loss_weight('distill_weight', knobs) * self.divergence(
        target, exits[-1]
      )
    if exits.shape[0] > 1:
      weight = self.loss_weight('self_distill_weight', knobs) * exit_scale
      rows += weight * self._self_distillation(exits)
    loss = (rows * batch['mask']).sum() / norm['examples']
    return loss, (metrics, model_state)

  def _self_distillation(self, exits: Float[Array, 'E B O']) -> Array:
    """Returns the divergences `[B]` of exits from later heads, summed."""
    targets, rows = jax.lax.stop_gradient(exits), jnp.zeros(exits.shape[1])
    divergences = jax.vmap(self.divergence, (0, None))
    for place, one in enumerate(exits[:-1], 1):
      from_last = self.config['loss']['self_distill_from'] == 'last'
      later = targets[-1:] if from_last else targets[place:]
      rows += divergences(later, one).mean(0)
    return rows

  def _heads(self, logits, out, batch) -> tuple[Array, Array, dict[str, Any]]:
    """Returns logits `[E, B, O]` and cross-entropies `[E, B]`, and metrics."""
    exits = out['exits'] if 'exits' in out else logits[None]
    per_head = jax.vmap(lambda one: self.smoothed(one, batch))(exits)
    entropy = self.cross_entropy(exits[-1], batch)
    metrics = self.quality(exits[-1], entropy, batch)
    for layer, logits in zip(self.head_layers[:-1], exits[:-1], strict=True):
      if not self.is_regression:
        correct = self.correct(logits.argmax(-1), batch)
        metrics[f'accuracy_exit_{layer}'] = Average.from_values(
          correct, batch['mask']
        )
    return exits, per_head, metrics | retention(out, batch)

  def divergence(
    self, target: Float[Array, 'B O'], logits: Float[Array, 'B O']
  ) -> Float[Array, ' B']:
    """Returns `distillation.divergence`, or a squared difference."""
    if self.is_regression:
      return jnp.square(target[:, 0] - logits[:, 0])
    temperature = self.config['loss']['temperature']
    return distillation.divergence(target, logits, temperature)

  def evaluate(self, params, model_state, batch):
    """Returns metrics without noise, with the model's full prune ratios."""
    logits, out = self.apply(params, model_state, batch)
    return self._heads(logits, out, batch)[2] | self.by_class(logits, batch)

  def prepare_serving(self, options, run=NO_RUN):
    """Serves with exits and pruning; options: `eat.policy.Options`.

    Temperatures and the reference of the drift check come from the run's
    `calibration.json`, with tau=guaranteed thresholds, prune ratios and the
    references of each source from its `certificate.json`. `policy.warnings`
    lists what could not be checked and options without effect.
    """
    file, names = CalibrationFile(run.directory, run.step), self.label_names
    certificate = CertificateFile(run.directory, run.step)
    given, rule = read_options(options, certificate.sources, len(names))
    lengths = self.served_lengths(run.lengths)
    longest = self.info.input_shape[0]
    if given.tau == GUARANTEED and lengths[-1] < longest:
      expected = f'{longest} among them with tau={GUARANTEED}'
      why = 'which was certified for texts of that length'
      raise ConfigError('lengths', lengths, f'{expected}, {why}')
    model = as_adaptive(self.model)
    temperatures = file.temperatures(len(self.head_layers), self.head_layers)
    drift, others = file.values.get('drift'), dict[str, Any]()
    monitor = file.monitor({'': drift}, run.on_drift)
    fields: dict[str, Any] = {'monitor': monitor}
    if given.tau == GUARANTEED:
      certificate.check_temperatures(temperatures)
      first = PRUNED if any(model.prune_ratios) else UNPRUNED
      others, fields = certificate.serve(model, first, run.on_drift, drift)

    def serve(variables):
      file.check_parameters(variables)
      if given.tau == GUARANTEED:
        certificate.check_parameters(variables)
      reader = self.text_reader(lengths[-1], given.max_characters)
      with_unpruned = any(given.minimum_retention.values())
      variables = jax.device_put(dict(variables))
      chain = EatChain(model, variables, reader, with_unpruned, others)
      policy = ExitPolicy(
        chain, reader, names, lengths, rule,
        temperatures=temperatures, options=given, **fields,
      )  # fmt: skip
      known = file, certificate
      policy.warnings = tuple(warnings_of(*known, policy, longest))
      return chain, policy

    return serve


def retention(out: Mapping[str, Any], batch: Batch) -> dict[str, Any]:
  """Returns the mean share of tokens kept by all prunings, if there are any."""
  if not len(out.get('kept', ())):
    return {}
  share = out['kept'][-1] / batch['length'].astype(jnp.float32)
  return {'retention': Average.from_values(share, batch['mask'])}


def head_layers(model: Any) -> tuple[int, ...]:
  """Returns the layers with a head; of a dense model the last one."""
  return model.heads() if hasattr(model, 'heads') else (model.depth,)


def check_tokenizer(teacher: str, own: str) -> None:
  """Raises ConfigError if the teacher's tokenizer gives other rows.

  `own` is the student's tokenizer; '' if its data are token ids.
  """
  path = os.path.join(teacher, TOKENIZER)
  if not own or os.path.realpath(own) in map(os.path.realpath, (teacher, path)):
    return
  try:
    ours = tokenizer.load(own)
  except (MissingDataError, InvalidDataError):
    return  # the data set reports it
  expected = f'a run whose {TOKENIZER} gives the ids of {own}'
  try:
    theirs = tokenizer.load(path)
  except (MissingDataError, InvalidDataError) as error:
    wrong = f'{expected} ({error})'
    raise ConfigError(TEACHER, teacher, wrong) from error
  if ours.preprocessing(0) != theirs.preprocessing(0):
    raise ConfigError(
      TEACHER,
      teacher,
      f'{expected}; fine-tune a teacher with this tokenizer, or leave '
      "dataset.tokenizer empty for the teacher's",
    )
