"""The engine under load with texts: every request gets its own answer."""

import functools

import pytest

from albert_act import compaction
from albert_act.model import AlbertClassifier
from albert_act.serving import AlbertChain, AlbertPolicy
from dataset_lib import tokenizer
from serve_lib.engine import Engine
from serve_lib.monitor import Monitor
from serve_lib.text_items import TextReader
from tests.albert_act import tiny_run
from tests.albert_act.small import FIELDS
from tests.dataset_lib import corpora
from tests.load import put_under_load, same_prediction

THREADS, REQUESTS, PENDING = 4, 50, 16
LENGTH = 16
FIELDS_OF_ANSWER = (
  'label', 'depth', 'tokens', 'token_iterations', 'exit_reason'
)  # fmt: skip


def make_engine(words):
  fields = FIELDS | dict(
    num_classes=2, vocab_size=words.vocab_size, max_positions=64
  )
  variables = {'params': tiny_run.parameters(AlbertClassifier)}
  chain = AlbertChain(AlbertClassifier(**fields), variables, words.pad_id, 2)
  monitor = Monitor()
  policy = AlbertPolicy(
    chain, TextReader(words, LENGTH, 2000), ('no', 'yes'), (8, LENGTH), monitor
  )
  return Engine(
    chain, policy, (8, LENGTH), (1, 4), max_pending=PENDING, monitor=monitor
  )


@pytest.mark.nightly
def test_two_hundred_mixed_requests_from_four_threads(tmp_path, monkeypatch):
  # Each size is compiled for every program: few show what all would.
  monkeypatch.setattr(compaction, 'SHARES', (0.5, 1.0))
  monkeypatch.setattr(compaction, 'FEW_TOKENS', (8,))
  words = tokenizer.load(corpora.tokenizer(tmp_path / 'words'))
  texts = [tiny_run.text(number)[0] for number in range(30)]
  with make_engine(words) as engine:
    same = functools.partial(same_prediction, fields=FIELDS_OF_ANSWER)
    load = put_under_load(
      engine, texts, same, threads=THREADS, requests=REQUESTS, bad_share=0.15
    )
    status = engine.status()
    found = engine.monitor.snapshot()
  assert len(load.depths) > 2
  assert status['peak_pending'] <= PENDING
  failed = sum(found['failures'].values())
  assert found['answers'] == len(texts) + THREADS * REQUESTS - failed
  assert failed > 10
