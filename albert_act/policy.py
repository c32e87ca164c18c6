"""Policy and options of a served ALBERT with halting."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval
from jaxtyping import Bool

from serve_lib.chain import Row
from serve_lib.decisions import ClassifierPolicy, Setting
from serve_lib.items import Count, TextOptions


@dataclasses.dataclass(frozen=True)
class Options(TextOptions):
  """Options of serving an ALBERT."""

  iterations: Annotated[int, Interval(ge=1, le=1000)] = 12  # in a visit
  setting: Setting = 'trained'  # 'guaranteed' is that of the certificate


@dataclasses.dataclass(eq=False)
class HaltingPolicy(ClassifierPolicy):
  """Rows of tokens leave when all of their tokens have halted."""

  _: dataclasses.KW_ONLY
  limit: Count = 0  # iterations; 0 for the chain's
  rule: str = ''  # of the trained model, for people
  FIELDS = {
    **ClassifierPolicy.FIELDS, 'depth': 'integer', 'iterations': 'number',
    'tokens': 'array', 'token_iterations': 'array',
  }  # fmt: skip

  def __post_init__(self):
    self.limit = self.limit or self.chain.limit

  def decide(
    self, stage: int, rows: Sequence[Row], outputs: Mapping[str, Any]
  ) -> Bool[np.ndarray, ' b']:
    """Returns the rows in which every token has halted."""
    return ~np.asarray(outputs['running'])

  def describe(self, row: Row) -> tuple[int, float, dict[str, Any]]:
    """Returns (depth, mean share of iterations, answer fields)."""
    tokens = row.encoded.inputs['tokens']
    steps = row.outputs[-1]['steps'][: len(tokens)]
    depth, mean, limit = int(steps.max()), float(steps.mean()), self.limit
    tokenizer = self.reader.tokenizer
    answer = dict(
      depth=depth,
      exit_reason='last iteration' if depth == limit else 'all tokens halted',
      truncated=row.encoded.context['truncated'],
      iterations=mean,
      tokens=tokenizer and tuple(tokenizer.names(tokens.tolist())),
      token_iterations=tuple(steps.tolist()),
    )
    return depth, mean / limit, answer
