"""The engine under load with texts: nobody lost, mixed up or compiled for."""

import threading

import numpy as np
import pytest

from albert_act import compaction
from albert_act.model import AlbertClassifier
from albert_act.policy import AlbertPolicy, Prediction
from albert_act.serving import AlbertChain
from dataset_lib import tokenizer
from serve_lib.chain import Failure
from serve_lib.engine import Engine
from serve_lib.monitor import Monitor
from tests.albert_act import tiny_run
from tests.albert_act.small import FIELDS
from tests.compilations import compilations
from tests.dataset_lib import corpora

BAD = ['', '  ', 'w' * 5000, b'\xff\xfe\xfd', b'\x00' * 50, '\ud800', None, 7]
THREADS, REQUESTS, PENDING = 4, 50, 16
LENGTH = 16


def make_engine(words):
  fields = FIELDS | dict(
    num_classes=2, vocab_size=words.vocab_size, max_positions=64
  )
  variables = {'params': tiny_run.parameters(AlbertClassifier)}
  chain = AlbertChain(AlbertClassifier(**fields), variables, words.pad_id, 2)
  monitor = Monitor()
  policy = AlbertPolicy(chain, words, ('no', 'yes'), LENGTH, monitor, 2000)
  return Engine(
    chain, policy, (8, LENGTH), (1, 4), max_pending=PENDING, monitor=monitor
  )


@pytest.mark.slow
def test_two_hundred_mixed_requests_from_four_threads(tmp_path, monkeypatch):
  # Each size is compiled for every program: two show what ten would.
  monkeypatch.setattr(compaction, 'SHARES', (0.5, 1.0))
  words = tokenizer.load(corpora.tokenizer(tmp_path / 'words'))
  texts = [tiny_run.text(number)[0] for number in range(30)]
  wrong, depths = [], set()
  with make_engine(words) as engine:
    alone = {text: engine.submit(text).result() for text in texts}

    def ask(seed):
      draw = np.random.default_rng(seed)
      items = [
        BAD[draw.integers(len(BAD))] if draw.random() < 0.15
        else texts[draw.integers(len(texts))]
        for _ in range(REQUESTS)
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
      threads = [
        threading.Thread(target=ask, args=(s,)) for s in range(THREADS)
      ]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()
    status = engine.status()
    found = engine.monitor.snapshot()
  assert not wrong
  assert not compiled
  assert len(depths) > 2
  assert status['pending'] == 0
  assert status['peak_pending'] <= PENDING
  failed = sum(found['failures'].values())
  assert found['answers'] == len(texts) + THREADS * REQUESTS - failed
  assert failed > 10


def same(answer, other):
  return (
    (answer.label, answer.depth, answer.token_iterations, answer.exit_reason)
    == (other.label, other.depth, other.token_iterations, other.exit_reason)
  ) and all(
    abs(answer.probabilities[name] - other.probabilities[name]) < 1e-4
    for name in answer.probabilities
  )
