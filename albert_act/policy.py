"""What ALBERT with halting is asked and answers: texts in, labels out."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from albert_act.serving import VARIANT, AlbertChain
from dataset_lib.tokenizer import Tokenizer
from serve_lib.chain import Encoded, Row
from serve_lib.monitor import Monitor
from serve_lib.text_items import TextReader

ALL_HALTED, LAST_ITERATION = 'all tokens halted', 'last iteration'


@dataclasses.dataclass(frozen=True)
class Prediction:
  """The answer to one text.

  Attributes:
    label: name of the class, or the number of a regression.
    probabilities: by class name; empty for a regression.
    depth: iterations that were run for the row: those of its last token.
    iterations: mean over its tokens, what the row cost.
    tokens: of the text as the model read it, [CLS] and [SEP] included.
    token_iterations: of each of them.
    exit_reason: 'all tokens halted' or 'last iteration'.
    truncated: whether the text was longer than the model takes.
  """

  label: Any
  probabilities: Mapping[str, float]
  depth: int
  iterations: float
  tokens: tuple[str, ...]
  token_iterations: tuple[int, ...]
  exit_reason: str
  truncated: bool


class AlbertPolicy:
  """`serve_lib.chain.Policy` for an `AlbertChain`; items as in `text_items`.

  Args:
    chain: the model.
    tokenizer: its tokenizer.
    class_names: of the labels; () for a regression.
    max_length: in tokens; longer texts are truncated.
    monitor: gets the depth of every row.
    max_characters: of one text; a longer one is an error and not truncated.
    num_texts: texts that the task has, 1 or 2; None takes both.

  Attributes:
    class_names: as given.
    max_length: as given.
    warnings: what whoever starts a service should be told: nothing.
  """

  def __init__(
    self,
    chain: AlbertChain,
    tokenizer: Tokenizer,
    class_names: Sequence[str],
    max_length: int,
    monitor: Monitor,
    max_characters: int = 100_000,
    num_texts: int | None = None,
  ):
    self.monitor = monitor
    self.warnings: tuple[str, ...] = ()
    self.class_names, self.max_length = tuple(class_names), max_length
    self._tokenizer = tokenizer
    self._limit = chain.model.sizes().max_iterations
    self._reader = TextReader(tokenizer, max_length, max_characters, num_texts)

  def encode(self, item: Any) -> Encoded:
    """Tokenises an item; see `serve_lib.text_items.TextReader.read`."""
    read = self._reader.read(item)
    return Encoded(
      inputs={'tokens': read.tokens, 'token_types': read.token_types},
      length=len(read.tokens),
      variant=VARIANT,
      context={'truncated': read.truncated},
    )

  def decide(
    self, stage: int, rows: Sequence[Row], outputs: Mapping[str, Any]
  ) -> Bool[np.ndarray, ' b']:
    """Rows leave in which every token has halted."""
    return ~np.asarray(outputs['running'])

  def answer(self, row: Row) -> Prediction:
    """The prediction from the state of [CLS].

    Raises:
      FloatingPointError: the logits are not finite.
    """
    outputs = row.outputs[-1]
    logits = np.asarray(outputs['logits'], np.float64)
    if not np.isfinite(logits).all():
      raise FloatingPointError(
        f'logits: expected finite numbers, got {logits.tolist()}; the '
        'parameters are not finite, or the model overflows in its compute dtype'
      )
    tokens = row.encoded.inputs['tokens']
    steps = outputs['steps'][: len(tokens)]
    depth = int(steps.max())
    prediction = Prediction(
      label=self._label(logits),
      probabilities=self._probabilities(logits),
      depth=depth,
      iterations=float(steps.mean()),
      tokens=tuple(self._tokenizer.names(tokens.tolist())),
      token_iterations=tuple(steps.tolist()),
      exit_reason=LAST_ITERATION if depth == self._limit else ALL_HALTED,
      truncated=row.encoded.context['truncated'],
    )
    share = prediction.iterations / self._limit
    self.monitor.record_exit(depth, prediction.exit_reason, None, share)
    return prediction

  def _label(self, logits: Any) -> Any:
    if not self.class_names:
      return float(logits[0])
    return self.class_names[int(logits.argmax())]

  def _probabilities(self, logits: Any) -> dict[str, float]:
    if not self.class_names:
      return {}
    weights = np.exp(logits - logits.max())
    shares = weights / weights.sum()
    return dict(zip(self.class_names, shares.tolist(), strict=True))
