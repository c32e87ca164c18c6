"""Policies of adaptive models: exits at heads, halting of tokens, tapes.

The host's side of the engine, built from data alone. Thresholds, minimum
retention and the switch to full depth (EAT, sections 7.4 and 10) are host
values; changing them never recompiles.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval
from jaxtyping import Bool, Float

from core import fields
from halting.row_rules import Confidence, RowRule, margin
from serve_lib.chain import Encoded, InputError, Row
from serve_lib.decisions import ClassifierPolicy, scale, source_of

PRUNED, UNPRUNED = 'pruned', 'unpruned'  # variants of a chain

Share = Annotated[float, Interval(ge=0.0, le=1.0)]


@dataclasses.dataclass(frozen=True)
class ExitOptions:
  """Options of an `ExitPolicy`."""

  # Below this margin an answer is the mean of the probabilities of all heads
  # that the row passed; 0 for never.
  ensemble_margin: Share = 0.0
  # By source, instead of `tau`.
  thresholds: dict[str, Any] = dataclasses.field(default_factory=dict)
  # By source. If the model keeps fewer tokens than this share, the row is
  # served unpruned, and the drift check skips the row.
  minimum_retention: dict[str, Share] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class ExitPolicy(ClassifierPolicy):
  """Rows leave at the heads of a chain, by a rule of `halting.row_rules`.

  An item may have 'minimum_retention', its own instead of that of its source;
  the chain needs the variant 'unpruned' for it.

  While the monitor finds drift, all rows run to full depth. `rule` may be set
  between batches. Its fields apply, not the equally named ones of `options`.
  """

  rule: RowRule = dataclasses.field(default_factory=Confidence)
  _: dataclasses.KW_ONLY
  options: Any = dataclasses.field(default_factory=ExitOptions)

  def __post_init__(self):
    given = list(self.temperatures) or [1.0] * self.chain.num_stages
    self.temperatures = np.asarray(given, np.float32)

  def encode(self, item: Any) -> Encoded:
    """Tokenises an item; see `serve_lib.items.TextReader`."""
    least = None  # an item may have its own
    if isinstance(item, Mapping) and 'minimum_retention' in item:
      item, expected = {**item}, 'a share in [0, 1]'
      least = item.pop('minimum_retention')
      if self.certified:
        expected = 'none: the certificates hold without it'
      if self.certified or not fields.accepts(Share, least):
        expected = f'minimum_retention: expected {expected}'
        raise InputError(f'{expected}, got {least!r}')
    encoded = super().encode(item)
    if least is None:
      least = self.options.minimum_retention.get(source_of(encoded), 0.0)
    if not least or encoded.variant != PRUNED:
      return encoded
    kept = self.chain.kept(encoded.length) / encoded.length
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
    thresholds = self.options.thresholds
    if thresholds:
      taus = [
        thresholds.get(row.encoded.context['source'], rule.tau) for row in rows
      ]
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
    least = self.options.ensemble_margin
    return heads.mean(0) if least and margin(heads[-1]) < least else heads[-1]

  def describe(self, row: Row) -> tuple[int, float, dict[str, Any]]:
    """Returns layers, retention, and fields such as the exit reason."""
    stage, context = len(row.outputs) - 1, row.encoded.context
    if stage < self.chain.num_stages - 1:
      reason = self.rule.name
    else:
      reason = 'full depth' if 'exit_stage' in context else 'last layer'
    depth = self.chain.heads[stage]
    retention = int(row.outputs[-1]['kept']) / row.encoded.length
    answer = dict(depth=depth, retention=retention, exit_reason=reason)
    answer['truncated'] = context['truncated']
    return depth, retention, answer


class HaltingPolicy(ClassifierPolicy):
  """Rows of tokens leave when all of their tokens have halted."""

  def decide(
    self, stage: int, rows: Sequence[Row], outputs: Mapping[str, Any]
  ) -> Bool[np.ndarray, ' b']:
    """Returns the rows in which every token has halted."""
    return ~np.asarray(outputs['running'])

  def describe(self, row: Row) -> tuple[int, float, dict[str, Any]]:
    """Returns (depth, mean share of iterations, answer fields)."""
    tokens = row.encoded.inputs['tokens']
    steps = row.outputs[-1]['steps'][: len(tokens)]
    depth, mean, limit = int(steps.max()), float(steps.mean()), self.chain.limit
    words = self.reader.tokenizer
    answer = dict(
      depth=depth,
      iterations=mean,
      tokens=words and tuple(words.names(tokens.tolist())),
      token_iterations=tuple(steps.tolist()),
      exit_reason='last iteration' if depth == limit else 'all tokens halted',
      truncated=row.encoded.context['truncated'],
    )
    return depth, mean / limit, answer


class TapePolicy(ClassifierPolicy):
  """Rows read a tape, then are encoded with it; every row runs both stages."""

  def describe(self, row: Row) -> tuple[int, float, dict[str, Any]]:
    """Returns (tape length, length / largest bucket, fields of the answer)."""
    length = int(row.outputs[0]['length'])
    answer = {'tape_length': length, 'exit_reason': 'tape read'}
    return length, length / self.lengths[-1], answer
