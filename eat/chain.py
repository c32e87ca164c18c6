"""EAT as a chain of stages whose shapes shrink, and how a run is served.

A stage ends at a head. Pruned tokens are cropped at static sizes. At a head
only [CLS] goes through the last block (about a sixth of its FLOPs); its keys
and values are kept for the next stage, which computes the other tokens of the
rows that continue.
"""

import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from core.errors import ConfigError
from dataset_lib.text_tasks import REPEATED_TEXTS
from eat.model import Adaptive, EatClassifier, EatModernBert
from eat.policy import PRUNED, UNPRUNED, ExitPolicy, Options, read_options
from eval_lib.calibration import CalibrationFile
from model_lib.bert import BertClassifier
from model_lib.layers import build
from model_lib.modern_bert import ModernBertClassifier
from serve_lib import classifier
from serve_lib.chain import Resizable, Stage
from serve_lib.classifier import CertificateFile
from serve_lib.decisions import GUARANTEED
from serve_lib.items import TOKEN_IDS, TextReader


class EatChain(Resizable):
  """An `eat.model.Adaptive` as `serve_lib.chain.Chain`.

  The variant 'unpruned' keeps all tokens, for sources that must not lose any
  and for models that prune nothing. `with_unpruned=False` compiles only
  'pruned'. `others` are variants with other prune ratios.
  """

  alone = True

  def __init__(
    self,
    model: Adaptive,
    variables: Mapping[str, Any],
    reader: TextReader = TOKEN_IDS,
    with_unpruned: bool = True,
    others: Mapping[str, Adaptive] = types.MappingProxyType({}),
  ):
    self.model, self.variables, self._others = model, variables, others
    self.reader, self.pad = reader, reader.pad
    self.heads = model.heads()
    self.num_stages = len(self.heads)
    self.variants: tuple[str, ...] = (UNPRUNED,)
    if any(model.prune_ratios):
      self.variants = (PRUNED, UNPRUNED) if with_unpruned else (PRUNED,)
    self.variants += tuple(others)

  def sized(
    self, index: int, variant: str, sizes: tuple[Any, ...], alone: bool = False
  ) -> Stage:
    """Returns the stage for lengths after each pruning, maybe symbolic.

    A short row `alone` goes through the block of a head with all of its tokens:
    reading its weights takes longer than computing with them, and the next
    stage would read them again. So do all rows if heads read all tokens.
    Outputs are 'logits' float32 `[B, O]` and 'kept' int32 `[B]`, the valid
    tokens at the end.
    """
    first, last = (1, *self.heads)[index], self.heads[index]
    reads_all = self.model.pooling == 'mean'
    first += (alone or reads_all) and index > 0
    is_whole = reads_all or (alone and index < self.num_stages - 1)

    def run(module: Adaptive, carry: Any) -> Any:
      if index == 0:
        inputs = (carry[key] for key in ('tokens', 'token_types', 'length'))
        tokens, known = module.embed(*inputs), None
      else:
        tokens, known = carry
      until: Any = dict(sizes=sizes, keys_values=known)
      tokens = module.run_blocks(tokens, first, last - 1, **until).tokens
      kept = tokens.length
      if is_whole:
        end = module.run_blocks(tokens, last, last, heads=(last,), sizes=sizes)
        cls, tokens, known = end.cls[last], end.tokens, None
      else:
        cls, known = module.cls_after(tokens, last)
      logits = module.head_logits(cls, last)
      return (tokens, known), {'logits': logits, 'kept': kept}

    model = self._others.get(variant, self.model)
    return functools.partial(model.apply, method=run)

  def sizes(self, variant: str, length: int) -> tuple[int, ...]:
    """Returns the static lengths after each pruning; none for 'unpruned'."""
    model = self._others.get(variant, self.model)
    return () if variant == UNPRUNED else model.static_sizes(length)

  def kept(self, length: int) -> int:
    """Returns the tokens that 'pruned' keeps of `length`."""
    return self.model.static_sizes(length)[-1]


def as_adaptive(model: Any) -> Adaptive:
  """Returns a dense encoder as an `Adaptive` of one stage."""
  if isinstance(model, Adaptive):
    return model
  if not isinstance(model, BertClassifier):
    legal = 'eat.model:EatClassifier or EatModernBert, or the same dense'
    raise ConfigError('model.name', type(model).__name__, legal)
  none: Any = dict(prune_layers=(), prune_ratios=(), exit_layers=())
  kind: Any = type(model)
  if kind is ModernBertClassifier:
    return build(EatModernBert, model, **none)
  if kind is BertClassifier:
    return build(EatClassifier, model, window=0, **none)
  return build(_whole(kind), model, **none)


@functools.cache
def _whole(kind: type[BertClassifier]) -> Any:
  """Returns an `Adaptive` that computes as a class of a user does."""
  return types.new_class('Whole', (Adaptive, kind), {'kw_only': True})


def serve(
  task: Any, options: Mapping[str, Any], run: Any, column: str = ''
) -> Any:
  """Serves with exits and pruning; options: `eat.policy.Options`.

  Temperatures and the reference of the drift check come from the run's
  `calibration.json`; with tau=guaranteed thresholds, prune ratios and the
  references of each source from its `certificate.json`. `column` is one of
  several that have labels, with files of its own.
  """
  place, names = (run.directory, run.step, column), task.label_names
  file, certificate = CalibrationFile(*place), CertificateFile(*place)
  if names and options.get('tau') == GUARANTEED:
    if not isinstance(task.model, Adaptive):
      expected = 'a number, or none: this model has no exits to certify'
      raise ConfigError('serve.tau', GUARANTEED, expected)
    if not certificate.sources:
      expected = f'the file {certificate.path}; {certificate.repair()}'
      raise ConfigError('serve.tau', GUARANTEED, expected)
  spread = task.info.label_scale[1]
  given, rule = read_options(options, certificate.sources, len(names), spread)
  lengths = classifier.text_lengths(task, run.lengths)
  longest = task.info.input_shape[0]
  if given.tau == GUARANTEED and lengths[-1] < longest:
    expected = f'{longest} among them with tau={GUARANTEED}'
    why = 'which was certified for texts of that length'
    raise ConfigError('lengths', lengths, f'{expected}, {why}')
  model = as_adaptive(task.model)
  temperatures = file.temperatures(len(task.head_layers), task.head_layers)
  drift, others = file.values.get('drift'), dict[str, Any]()
  monitor = classifier.monitor(file, {'': drift}, run.on_drift)
  fields: dict[str, Any] = {'monitor': monitor}
  about = classifier.about(task, run)
  if given.tau == GUARANTEED:
    certificate.check_temperatures(temperatures)
    first = PRUNED if any(model.prune_ratios) else UNPRUNED
    others, fields = certificate.serve(model, first, run.on_drift, drift)
    about = classifier.about(task, run, certificate)

  def serve_variables(variables: Any) -> tuple[EatChain, ExitPolicy]:
    file.check_parameters(variables)
    if given.tau == GUARANTEED:
      certificate.check_parameters(variables)
    reader = classifier.text_reader(task, lengths[-1], given.max_characters)
    with_unpruned = any(given.minimum_retention.values())
    variables = jax.device_put(dict(variables))
    chain = EatChain(model, variables, reader, with_unpruned, others)
    policy = ExitPolicy(
      chain, reader, names, lengths, rule, temperatures=temperatures,
      ensemble_margin=given.ensemble_margin, thresholds=given.thresholds,
      minimum_retention=given.minimum_retention,
      about=about, **fields,
    )  # fmt: skip
    warnings = warnings_of(file, certificate, policy, given, longest)
    policy.warnings = tuple(warnings)
    return chain, policy

  return serve_variables


def warnings_of(
  file: CalibrationFile,
  certificate: CertificateFile,
  policy: ExitPolicy,
  given: Options,
  longest: int,
) -> Iterator[str]:
  """Yields what could not be checked, and options without effect.

  `longest` is the row that the run was trained on, in tokens.
  """
  values, repair = file.values, file.repair()
  if values and 'parameters' not in values:
    yield f'{file.path} does not name its checkpoint; {repair}'
  if not policy.class_names:
    yield 'no drift check: a regression has no confidences'
  elif policy.monitor.drift is None:
    what = 'has no statistics for it' if values else 'does not exist'
    yield f'no drift check: {file.path} {what}; {repair}'
  elif UNPRUNED in policy.chain.variants[1:]:
    sources = ', '.join(sorted(given.minimum_retention))
    yield (
      f'no drift check of rows that are served without pruning ({sources}): '
      'the calibration split was measured with it'
    )
  if values and policy.lengths[-1] < longest:
    yield (
      f'texts are cut off after {policy.lengths[-1]} tokens, in the '
      f'calibration after {longest}: temperatures and drift check may not fit'
    )
  rule, early = policy.rule, policy.heads[:-1]
  needed = rule.heads_needed or 0
  if needed > len(early):
    name = f'rule={rule.name}' if policy.class_names else 'a regression'
    where = f'are before the last layer (at {", ".join(map(str, early))})'
    why = f'{name} needs {needed} heads, and {len(early)} {where}'
    if not early:
      why = 'the model has no head before its last layer'
    yield f'no row will ever leave early: {why}'
  if given.tau != GUARANTEED:
    return
  yield from certificate.warnings()
  entries = certificate.values['sources'].values()
  data = [entry.get('dataset', {}) for entry in entries]
  if any(d.get('task') in REPEATED_TEXTS or d.get('group') for d in data):
    yield (
      'the rows that the threshold was certified on share texts and are not '
      'independent: the bound may fail more often than its delta says'
    )
