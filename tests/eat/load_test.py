"""The engine under load with texts: every request gets its own answer."""

import functools

import numpy as np
import pytest

from dataset_lib import tokenizer
from eat.exits import Rule
from eat.policy import EatPolicy
from eat.serving import EatChain
from serve_lib.engine import Engine
from serve_lib.monitor import Monitor
from serve_lib.text_items import TextReader
from tests.eat import small
from tests.load import put_under_load, same_prediction

WORDS = [f'w{number}' for number in range(40)]
PENDING = 64
FIELDS_OF_ANSWER = ('label', 'depth', 'retention', 'exit_reason')


def make_engine(words):
  model, variables = small.build()
  chain, monitor = EatChain(model, variables), Monitor()
  chain.variants = ('pruned',)
  policy = EatPolicy(
    chain, TextReader(words, 16, 2000), ('a', 'b', 'c'), (8, 16),
    Rule('confidence', tau=0.8), monitor=monitor,
  )  # fmt: skip
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
    same = functools.partial(same_prediction, fields=FIELDS_OF_ANSWER)
    load = put_under_load(
      engine, texts, same, threads=8, requests=1250, bad_share=0.125
    )
    status = engine.status()
    worst_case = engine.warm_up().worst_case_bytes
  assert len(load.depths) > 1
  assert status['peak_pending'] <= PENDING
  # A row of T tokens carries T states, keys and values of 16 float32, T places
  # and a length. 8 rows wait before the second and the third head, for which 16
  # tokens are pruned to 12, and 8 to 6.
  most = 8 * sum(tokens * (3 * 16 * 4 + 4) + 4 for tokens in (16, 12, 8, 6))
  assert worst_case == most
  assert status['peak_pool_bytes'] <= most
