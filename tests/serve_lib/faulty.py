"""A policy that breaks, or holds the worker, for items that ask for it."""

import threading

from tests.serve_lib import toy

VARIABLES = toy.make_variables()
GOOD = ('full', [2, 0])  # runs through all stages
WAIT = 20.0
BREAKS = [1, 0]  # leaves at stage 1, unless the policy breaks


class FaultyPolicy(toy.Policy):
  """Breaks, or holds the worker, for items that ask for it."""

  def __init__(self):
    super().__init__()
    self.reached, self.open = threading.Event(), threading.Event()
    self.broken_stage = None

  def decide(self, stage, rows, outputs):
    contexts = [row.encoded.context for row in rows]
    if [5, 5] in contexts:
      self.reached.set()
      assert self.open.wait(WAIT)
    if stage == self.broken_stage and BREAKS in contexts:
      raise ZeroDivisionError('decide')
    return super().decide(stage, rows, outputs)

  def answer(self, row):
    if row.encoded.context == [7]:
      raise ZeroDivisionError('answer')
    return super().answer(row)
