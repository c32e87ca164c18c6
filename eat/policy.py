"""Policy and options of a served EAT.

Thresholds, minimum retention and the switch to full depth (EAT, sections 7.4
and 10) are values of the host; changing them never recompiles.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Interval
from jaxtyping import Bool, Float

from core import fields, registry
from core.errors import ConfigError
from halting.row_rules import (
  ClassRule,
  Confidence,
  Limit,
  Never,
  RowRule,
  ThresholdRule,
  Tolerance,
  margin,
  scale,
)
from serve_lib.chain import Encoded, InputError, Row
from serve_lib.decisions import GUARANTEED, ClassifierPolicy, source_of
from serve_lib.items import Count, TextOptions

PRUNED, UNPRUNED = 'pruned', 'unpruned'  # variants of a chain
_RULES = 'confidence', 'entropy', 'margin', 'patience', 'combined', 'never'
# Options that are fields of many rules.
_BESIDE = 'tau', 'patience', 'tolerance', 'veto_margin'

Share = Annotated[float, Interval(ge=0.0, le=1.0)]


@dataclasses.dataclass(eq=False)
class ExitPolicy(ClassifierPolicy):
  """Rows leave at the heads of a chain, by a rule of `halting.row_rules`.

  An item may have a 'minimum_retention' of its own; the chain needs the variant
  'unpruned' for it. See `Options` for the fields. While the monitor finds
  drift, all rows run to full depth.
  """

  rule: RowRule = dataclasses.field(default_factory=Confidence)
  _: dataclasses.KW_ONLY
  ensemble_margin: Share = 0.0
  thresholds: dict[str, Limit] = dataclasses.field(default_factory=dict)
  minimum_retention: dict[str, Share] = dataclasses.field(default_factory=dict)
  heads: tuple[Count, ...] = ()  # layers; () for the chain's
  # Of a row of 1, 2, ... tokens, by the variant 'pruned'; () for the chain's.
  kept_tokens: tuple[Count, ...] = ()
  FIELDS = {**ClassifierPolicy.FIELDS, 'depth': 'integer',
            'retention': 'number'}  # fmt: skip

  def __post_init__(self):
    stages, longest = self.chain.num_stages, self.lengths[-1]
    self.temperatures = tuple(self.temperatures) or (1.0,) * stages
    self.heads = self.heads or self.chain.heads
    if PRUNED in self.chain.variants and not self.kept_tokens:
      kept = map(self.chain.kept, range(1, longest + 1))
      self.kept_tokens = tuple(kept)
    if len(self.heads) != stages:
      raise ConfigError('policy.heads', self.heads, f'one for each of {stages}')
    if self.thresholds and not isinstance(self.rule, ThresholdRule):
      expected = f'none with the rule {self.rule.name}'
      raise ConfigError('policy.thresholds', self.thresholds, expected)
    if PRUNED in self.chain.variants and len(self.kept_tokens) < longest:
      expected = f'{longest} numbers'
      raise ConfigError('policy.kept_tokens', len(self.kept_tokens), expected)

  def encode(self, item: Any) -> Encoded:
    """Tokenises an item; see `serve_lib.items.TextReader`."""
    least = None  # an item may have its own
    if isinstance(item, Mapping) and 'minimum_retention' in item:
      item, expected = {**item}, 'a share in [0, 1]'
      least = item.pop('minimum_retention')
      if self.certified:
        expected = 'none: the certificates hold without it'
      elif PRUNED not in self.chain.variants:
        expected = 'none: the model prunes no tokens'
      if expected.startswith('none') or not fields.accepts(Share, least):
        expected = f'minimum_retention: expected {expected}'
        raise InputError(f'{expected}, got {least!r}')
    encoded = super().encode(item)
    if least is None:
      least = self.minimum_retention.get(source_of(encoded), 0.0)
    if not least or encoded.variant != PRUNED:
      return encoded
    kept = self.kept_tokens[encoded.length - 1] / encoded.length
    if kept >= least:
      return encoded
    if UNPRUNED not in self.chain.variants:
      compiled = f'at most {kept:.4f} in a model compiled with pruning only'
      raise InputError(f'minimum_retention: expected {compiled}')
    return dataclasses.replace(encoded, variant=UNPRUNED)

  def decide(
    self, stage: int, rows: Sequence[Row], outputs: Mapping[str, Any]
  ) -> Bool[np.ndarray, ' b']:
    """Returns which rows leave by the rule; see `serve_lib.chain.Policy`."""
    rule: Any = self.rule
    if self.thresholds:
      sources = [row.encoded.context['source'] for row in rows]
      taus = [self.thresholds.get(source, rule.tau) for source in sources]
      rule = dataclasses.replace(rule, tau=np.asarray(taus, np.float32))
    willing = rule.leaves_at(self._calibrated(rows))
    for row, leaves in zip(rows, willing, strict=True):
      if leaves:
        row.encoded.context.setdefault('exit_stage', stage)
    # During drift the rule is evaluated only so that `exit_reason` says 'full
    # depth' for rows that would have left.
    drifted = [self.monitor.full_depth(source_of(r.encoded)) for r in rows]
    return willing & ~np.array(drifted)

  def _calibrated(self, rows: Sequence[Row]) -> Float[np.ndarray, 'E b O']:
    """Returns the heads so far, divided by temperatures."""
    logits = np.array([[out['logits'] for out in r.outputs] for r in rows])
    temperatures = self.temperatures[: logits.shape[1]]
    return scale(logits.swapaxes(0, 1), temperatures)

  def logits(self, row: Row) -> Float[np.ndarray, 'E O']:
    """Returns the calibrated logits of all heads that the row passed."""
    return self._calibrated([row])[:, 0]

  def combine(self, heads: Float[np.ndarray, 'E C']) -> Float[np.ndarray, ' C']:
    """Returns the last head, or the mean of all if its margin is low."""
    least = self.ensemble_margin
    return heads.mean(0) if least and margin(heads[-1]) < least else heads[-1]

  def describe(self, row: Row) -> tuple[int, float, dict[str, Any]]:
    """Returns layers, retention, and fields such as the exit reason."""
    stage, context = len(row.outputs) - 1, row.encoded.context
    if stage < self.chain.num_stages - 1:
      reason = self.rule.name
    else:
      reason = 'full depth' if 'exit_stage' in context else 'last layer'
    depth = self.heads[stage]
    retention = int(row.outputs[-1]['kept']) / row.encoded.length
    answer = dict(depth=depth, retention=retention, exit_reason=reason)
    return depth, retention, answer | {'truncated': context['truncated']}


@dataclasses.dataclass(frozen=True)
class Options(TextOptions):
  """Options of serving an EAT.

  `tau`, `patience` and `veto_margin` are fields of the rule if it has them, and
  `rule.NAME` is any field of it; a regression reads `tolerance` and `patience`.
  None is the rule's own default.
  """

  # confidence, entropy, margin, patience, combined, never, or
  # 'package.module:Class'.
  rule: str = 'confidence'
  # 'guaranteed' is that of the certificate of the run; None is 0.9 with
  # rule=confidence.
  tau: (
    Annotated[float, Interval(ge=0.0, le=100.0)] | Literal['guaranteed'] | None
  ) = None
  patience: Annotated[int, Interval(ge=1, le=1000)] | None = None
  tolerance: Annotated[float, Interval(ge=0.0, le=1e6)] | None = None
  veto_margin: Share | None = None
  # Below this margin an answer is the mean of the probabilities of all heads
  # that the row passed; 0 for never.
  ensemble_margin: Share = 0.0
  # By source, instead of `tau`.
  thresholds: dict[str, Any] = dataclasses.field(default_factory=dict)
  # By source. If the model keeps fewer tokens than this share, the row is
  # served unpruned, and the drift check skips the row.
  minimum_retention: dict[str, Share] = dataclasses.field(default_factory=dict)


def read_options(
  given: Mapping[str, Any],
  certified: Mapping[str, Any],
  classes: int,
  spread: float = 1.0,
) -> tuple[Options, RowRule]:
  """Checks the options; returns them and the exit rule they describe.

  `certified` has certificates by source; `classes` is 0 for a regression, of
  labels with the standard deviation `spread`.
  """
  own = {k[5:]: v for k, v in given.items() if k.startswith('rule.')}
  given = {k: v for k, v in given.items() if not k.startswith('rule.')}
  if twice := own.keys() & given.keys():
    raise ConfigError('serve', sorted(twice), 'each field of a rule once')
  given |= {name: own.pop(name) for name in _BESIDE if name in own}
  kind = _class_of(str(given.get('rule', Options.rule)))
  if not classes and issubclass(kind, ClassRule):
    kind = Tolerance
  _check_names(given, kind)
  options = Options(**fields.check(Options, given, 'serve'))
  if not classes:
    why = 'for a regression, whose heads give a number: rows leave by tolerance'
    _refuse(options, 'veto_margin ensemble_margin thresholds', f'nothing {why}')
  if options.tau == GUARANTEED:
    if own:
      raise ConfigError('serve.rule', own, f'no fields with tau={GUARANTEED}')
    return _guaranteed(options, kind, certified)
  if issubclass(kind, ThresholdRule):
    _check_taus(options, kind, classes)
  else:
    why = f'none with the rule {options.rule!r}, which has no threshold tau'
    _refuse(options, 'thresholds', why)
  stated = {n: getattr(options, n) for n in _BESIDE if n in fields.hints(kind)}
  beside = {n: v for n, v in stated.items() if v is not None}
  if issubclass(kind, Tolerance):
    beside.setdefault('tolerance', spread * kind.tolerance)
  described = {'name': registry.name_of(kind), **beside, **own}
  rule = registry.named(described, 'serve.rule', RowRule)
  check_rows(rule, max(classes, 1))
  return options, rule


def check_rows(rule: RowRule, classes: int) -> None:
  """Raises ConfigError unless a row leaves by its own logits alone."""
  scales = np.linspace(0.1, 9.0, 9)[:, None]  # from unsure to sure
  draws = np.random.default_rng(0).normal(size=(3, 9, classes))
  logits = (scales * draws).astype(np.float32)
  left, is_legal = np.asarray(rule.leaves_at(logits)), False
  if left.shape == (9,) and left.dtype == bool:
    alone = [rule.leaves_at(logits[:, [row]])[0] for row in range(9)]
    is_legal = np.array_equal(left, alone)
  if not is_legal:
    given = f'{rule.name}: {left.dtype} {[*left.shape]} of 9 rows'
    raise ConfigError('serve.rule', given, 'bool [B], for each row by itself')


def _class_of(name: str) -> type[RowRule]:
  expected = f"one of {', '.join(_RULES)}, or 'package.module:Class'"
  full = f'halting.row_rules:{name.title()}' if name in _RULES else name
  return registry.locate(full, 'serve.rule', RowRule, expected)


def _check_names(given: Mapping[str, Any], kind: type[RowRule]) -> None:
  """Raises ConfigError for a field of a rule under another name, or of none."""
  own = {field.name for field in dataclasses.fields(kind)}
  for name in own & given.keys() - fields.hints(Options).keys():
    expected = f'rule.{name}, as it is a field of the rule'
    raise ConfigError(f'serve.{name}', given[name], expected)
  if kind.__module__ == RowRule.__module__:
    return  # they ignore what they lack
  for name in {n for n in _BESIDE if given.get(n) is not None} - own:
    expected = f'none: {kind.__name__} has no such field'
    raise ConfigError(f'serve.{name}', given[name], expected)


def _guaranteed(
  options: Options, kind: type[RowRule], certified: Mapping[str, Any]
) -> tuple[Options, RowRule]:
  if not certified or kind is not Confidence:
    command = 'python -m launch.evaluate --workdir=... --evals=certificate'
    expected = f'rule=confidence and a certificate.json: run {command}'
    raise ConfigError('serve.tau', options.tau, expected)
  # The certificate holds for the plain confidence rule only: with a veto a
  # row would leave at a later head than was certified.
  others = 'ensemble_margin veto_margin thresholds minimum_retention'
  why = f'none with tau={options.tau}, certified without it'
  _refuse(options, others, why)
  taus = {source: one.tau for source, one in certified.items()}
  # Rows of a source without a certificate run to full depth.
  tau = taus.pop('', math.inf)
  never = min([tau, *taus.values()]) == math.inf
  if never:
    return options, Never()
  return dataclasses.replace(options, thresholds=taus), Confidence(tau)


def _refuse(options: Options, names: str, expected: str) -> None:
  for name in names.split():
    if value := getattr(options, name):
      raise ConfigError(f'serve.{name}', value, expected)


def _check_taus(
  options: Options, kind: type[ThresholdRule], classes: int
) -> None:
  """Raises ConfigError for a threshold that is missing or cannot be."""
  most, words = kind.legal(classes)
  taus = {f'thresholds.{name}': x for name, x in options.thresholds.items()}
  if options.tau is not None:
    taus['tau'] = options.tau
  elif kind.__dataclass_fields__['tau'].default is dataclasses.MISSING:
    expected = f'{words}: rule={options.rule} has no default, add tau=...'
    raise ConfigError('serve.tau', 'nothing', expected)
  for name, tau in taus.items():
    is_legal = fields.accepts(float, tau) and 0 <= tau <= most
    if tau != kind.NEVER and not is_legal:
      raise ConfigError(f'serve.{name}', tau, words)
