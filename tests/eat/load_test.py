"""The engine under load with texts: nobody lost, mixed up or compiled for."""

import threading

import numpy as np
import pytest

from dataset_lib import tokenizer
from eat.exits import Rule
from eat.policy import EatPolicy, Prediction
from eat.serving import EatChain
from eat.settings import Settings
from serve_lib.chain import Failure
from serve_lib.engine import Engine
from serve_lib.monitor import Monitor
from tests.compilations import compilations
from tests.eat import small

WORDS = [f'w{number}' for number in range(40)]
BAD = ['', '  ', 'w' * 5000, b'\xff\xfe\xfd', b'\x00' * 50, '\ud800', None, 7]
PENDING = 64


def make_engine(words):
  model, variables = small.build()
  chain, monitor = EatChain(model, variables), Monitor()
  chain.variants = ('pruned',)
  settings = Settings(rule=Rule('confidence', tau=0.8), max_characters=2000)
  policy = EatPolicy(chain, words, ('a', 'b', 'c'), 16, settings, monitor)
  return Engine(
    chain, policy, (8, 16), (1, 8), max_pending=PENDING, monitor=monitor
  )


@pytest.mark.slow
def test_ten_thousand_mixed_requests_from_eight_threads(tmp_path):
  vocabulary = tmp_path / 'vocab.txt'
  vocabulary.write_text('\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', *WORDS]))
  rng = np.random.default_rng(0)
  texts = [' '.join(rng.choice(WORDS, rng.integers(1, 30))) for _ in range(200)]
  with make_engine(tokenizer.load(vocabulary)) as engine:
    alone = {text: engine.submit(text).result() for text in texts}
    wrong, depths = [], set()

    def ask(seed):
      draw = np.random.default_rng(seed)
      items = [
        BAD[draw.integers(len(BAD))] if draw.random() < 0.125
        else texts[draw.integers(len(texts))]
        for _ in range(1250)
      ]  # fmt: skip
      answers = list(engine.stream(items))
      if len(answers) != len(items):
        wrong.append(len(answers))
      for item, answer in zip(items, answers, strict=False):
        if isinstance(item, str) and item in alone:
          good = isinstance(answer, Prediction) and same(answer, alone[item])
          depths.add(getattr(answer, 'depth', None))
        else:
          good = isinstance(answer, Failure) and answer.during == 'encode'
        if not good:
          wrong.append((item, answer))

    with compilations() as compiled:
      threads = [threading.Thread(target=ask, args=(s,)) for s in range(8)]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()
    status = engine.status()
    worst_case = engine.warm_up().worst_case_bytes
  assert not wrong
  assert not compiled
  assert len(depths) > 1
  assert status['pending'] == 0
  assert status['peak_pending'] <= PENDING
  # A row of T tokens carries T states, keys and values of 16 float32, T places
  # and a length. 8 rows wait before the second and the third head, for which 16
  # tokens are pruned to 12, and 8 to 6.
  most = 8 * sum(tokens * (3 * 16 * 4 + 4) + 4 for tokens in (16, 12, 8, 6))
  assert worst_case == most
  assert status['peak_pool_bytes'] <= most


def same(answer, other):
  return (
    (answer.label, answer.depth, answer.retention, answer.exit_reason)
    == (other.label, other.depth, other.retention, other.exit_reason)
  ) and all(
    abs(answer.probabilities[name] - other.probabilities[name]) < 1e-4
    for name in answer.probabilities
  )
