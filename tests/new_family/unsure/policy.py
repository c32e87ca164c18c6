"""Marks answers of a small margin."""

import dataclasses
from typing import Annotated

from annotated_types import Interval

from halting.row_rules import margin, softmax
from serve_lib import classifier
from serve_lib.decisions import ClassifierPolicy


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of serving."""

  margin: Annotated[float, Interval(ge=0.0, le=1.0)] = 0.5


@dataclasses.dataclass(eq=False)
class Marking(ClassifierPolicy):
  """Says that an answer is unsure."""

  _: dataclasses.KW_ONLY
  margin: Annotated[float, Interval(ge=0.0, le=1.0)] = 0.5

  def describe(self, row):
    depth, share, fields = super().describe(row)
    found = float(margin(softmax(self.logits(row)[-1])))
    return depth, share, fields | {'unsure': found < self.margin}


def serve(task, options, run):
  """Returns chain and policy of a run."""
  given = classifier.read_options(Options, options)
  reader = classifier.item_reader(task)

  def serve_variables(variables):
    chain, _ = classifier.one_stage(task, reader, (1,), run, variables)
    names = task.label_names
    return chain, Marking(chain, reader, names, (1,), margin=given.margin)

  return serve_variables
