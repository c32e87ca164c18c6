"""What EAT is asked and answers: texts in, labels with depth and reason out.

The host's side of the engine. Thresholds, minimum retention and the switch to
full depth act row by row on data, so none of them ever compiles anything
(EAT, sections 7.4 and 10).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from dataset_lib.errors import ConfigError
from dataset_lib.tokenizer import Tokenizer
from eat import exits
from eat.serving import FULL, PRUNED, EatChain
from eat.settings import Settings, expected_in
from serve_lib.chain import Encoded, Row
from serve_lib.monitor import Monitor
from serve_lib.text_items import TextReader


@dataclasses.dataclass(frozen=True)
class Prediction:
  """The answer to one text.

  Attributes:
    label: name of the class, or the number of a regression.
    probabilities: by class name, calibrated; empty for a regression.
    depth: layers that were run.
    retention: share of the tokens that were left at the end.
    exit_reason: the rule that let it leave, for a regression 'tolerance';
      'last layer', or 'full depth' when exits were switched off.
    truncated: whether the text was longer than the model takes.
  """

  label: Any
  probabilities: Mapping[str, float]
  depth: int
  retention: float
  exit_reason: str
  truncated: bool


class EatPolicy:
  """`serve_lib.chain.Policy` for an `EatChain`.

  An item is a text, a pair of texts, or a mapping with 'text' and optionally
  'pair' and 'source'; texts may be UTF-8 bytes.

  Args:
    chain: the model.
    tokenizer: its tokenizer.
    class_names: of the labels; () for a regression.
    max_length: in tokens; longer texts are truncated.
    settings: see `Settings`.
    monitor: gets every exit; while it finds drift, all rows go to full depth.
    num_texts: texts that the task has, 1 or 2; None takes both.

  Attributes:
    class_names: as given.
    max_length: as given.
    warnings: what whoever starts a service should be told, a line each.

  Raises:
    ConfigError: the settings do not fit the model.
  """

  def __init__(
    self,
    chain: EatChain,
    tokenizer: Tokenizer,
    class_names: Sequence[str],
    max_length: int,
    settings: Settings,
    monitor: Monitor,
    num_texts: int | None = None,
  ):
    self.settings, self.monitor = settings, monitor
    self.warnings: tuple[str, ...] = ()
    self._chain = chain
    self.class_names, self.max_length = tuple(class_names), max_length
    self._reader = TextReader(
      tokenizer, max_length, settings.max_characters, num_texts
    )
    self._temperatures = _temperatures(settings, chain.num_stages)
    if settings.thresholds and not class_names:
      raise ConfigError(
        'thresholds',
        dict(settings.thresholds),
        'none for a regression, whose rows leave by `tolerance`',
      )

  def encode(self, item: Any) -> Encoded:
    """Tokenises an item; see `serve_lib.chain.Policy`.

    Raises:
      InputError: it is no text, not UTF-8, empty, or too long, or one text
        where the task has two.
    """
    read = self._reader.read(item)
    length = len(read.tokens)
    return Encoded(
      inputs={'tokens': read.tokens, 'token_types': read.token_types},
      length=length,
      variant=self._variant(read.source, length),
      context={'source': read.source, 'truncated': read.truncated},
    )

  @property
  def _usual_variant(self) -> str:
    """The one that the calibration split was measured with."""
    return PRUNED if PRUNED in self._chain.variants else FULL

  def _variant(self, source: str, length: int) -> str:
    least = self.settings.minimum_retention.get(source, 0.0)
    if not least or self._usual_variant == FULL:
      return self._usual_variant
    kept = self._chain.sizes(PRUNED, length)[-1] / length
    return FULL if kept < least else PRUNED

  def decide(
    self, stage: int, rows: Sequence[Row], outputs: Mapping[str, Any]
  ) -> Bool[np.ndarray, ' b']:
    """Which rows the rule lets out; see `serve_lib.chain.Policy`."""
    rule = self.settings.rule
    if self.settings.thresholds:
      taus = [
        self.settings.thresholds.get(row.encoded.context['source'], rule.tau)
        for row in rows
      ]
      rule = dataclasses.replace(rule, tau=np.asarray(taus, np.float32))
    willing = exits.should_exit(rule, self._calibrated(rows))
    for row, leaves in zip(rows, willing, strict=True):
      if leaves:
        row.encoded.context.setdefault('exit_stage', stage)
    # On drift the rule is still asked, so that it can be seen to end.
    return np.zeros(len(rows), bool) if self.monitor.full_depth else willing

  def _calibrated(self, rows: Sequence[Row]) -> np.ndarray:
    """Logits `[E, b, O]` of the heads so far, over their temperatures."""
    heads = len(rows[0].outputs)
    logits = np.stack(
      [
        np.stack([row.outputs[head]['logits'] for row in rows])
        for head in range(heads)
      ]
    )
    # `exits.calibrate` would check them every time.
    return logits / self._temperatures[:heads, None, None]

  def answer(self, row: Row) -> Prediction:
    """The prediction of the last head that the row has passed.

    Raises:
      FloatingPointError: a head gave NaN or infinity.
    """
    logits = self._calibrated([row])
    self._check_finite(logits)
    stage = len(logits) - 1
    length = len(row.encoded.inputs['tokens'])
    last = stage == self._chain.num_stages - 1
    label: Any = float(logits[-1, 0, 0])
    probabilities: dict[str, float] = {}
    confidence = None
    if self.class_names:
      heads = exits.softmax(logits)[:, 0]
      label, probabilities = self._label(heads)
      if row.encoded.variant == self._usual_variant:
        confidence = float(heads[0].max())
    prediction = Prediction(
      label=label,
      probabilities=probabilities,
      depth=self._chain.heads[stage],
      retention=int(row.outputs[-1]['kept']) / length,
      exit_reason=self._reason(row, last),
      truncated=row.encoded.context['truncated'],
    )
    self.monitor.record_exit(
      prediction.depth,
      prediction.exit_reason,
      confidence,
      prediction.retention,
    )
    return prediction

  def _check_finite(self, logits: Float[np.ndarray, 'E 1 C']) -> None:
    finite = np.isfinite(logits).all((1, 2))
    if not finite.all():
      head = int(finite.argmin())
      raise FloatingPointError(
        f'logits: expected finite numbers, got {logits[head, 0].tolist()} at '
        f'the head of layer {self._chain.heads[head]}; the parameters are not '
        'finite, or the model overflows in its compute dtype'
      )

  def _reason(self, row: Row, last: bool) -> str:
    if not last:
      return exits.reason(self.settings.rule, not self.class_names)
    return 'full depth' if 'exit_stage' in row.encoded.context else 'last layer'

  def _label(
    self, heads: Float[np.ndarray, 'E C']
  ) -> tuple[str, dict[str, float]]:
    """The class and all probabilities, from those of the heads so far."""
    probabilities = heads[-1]
    if self.settings.ensemble_margin:
      ordered = np.sort(probabilities)
      if ordered[-1] - ordered[-2] < self.settings.ensemble_margin:
        probabilities = heads.mean(0)
    named = zip(self.class_names, probabilities.tolist(), strict=True)
    return self.class_names[int(probabilities.argmax())], dict(named)


def _temperatures(settings: Settings, heads: int) -> np.ndarray:
  """Float32 `[E]`; see `Settings.temperatures`."""
  if not len(settings.temperatures):
    return np.ones(heads, np.float32)
  given = list(settings.temperatures)
  try:  # only to see that they are legal
    exits.calibrate(np.zeros((heads, 1, 1), np.float32), given)
  except ValueError as error:
    raise ConfigError('temperatures', given, expected_in(error)) from error
  return np.asarray(given, np.float32)
