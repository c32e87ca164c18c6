"""Batches for pretraining: hosts, resuming, epochs, splits, configurations."""

import gzip

import numpy as np
import pytest

from dataset_lib import (
  builder,
  corpus,
  tokenizer,
)
from dataset_lib.errors import ConfigError, MissingDataError
from tests.dataset_lib import batches, corpora
from tests.dataset_lib.batches import assert_same, joined, take
from tests.dataset_lib.corpora import (
  PRETRAINING_KEYS as KEYS,
)
from tests.dataset_lib.corpora import (
  draw,
  pretraining_config,
  pretraining_source,
)


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
  root = tmp_path_factory.mktemp('pretraining')
  return corpora.prepare(root, corpora.documents(80, seed=7))[0]


def build(directory, train=True, host=0, hosts=1, **others):
  return batches.build(
    pretraining_config(directory, **others),
    'train' if train else 'validation', train, 24, seed=3, host_index=host,
    host_count=hosts,
  )  # fmt: skip


def test_hosts_and_a_resumed_run_read_the_same(directory):
  whole = take(build(directory), 12)
  assert set(whole[0]) == KEYS | {'mask', 'index'}
  assert len({tuple(batch['index']) for batch in whole}) == 12
  assert_same(take(build(directory), 3, 7), whole[7:10])
  hosts = [take(build(directory, host=host, hosts=2), 12) for host in (0, 1)]
  assert_same([joined(step) for step in zip(*hosts, strict=True)], whole)


def test_masks_differ_between_epochs(directory):
  data = build(directory)
  steps = data.info.num_examples // 24 * 2
  seen: dict[int, list[bytes]] = {}
  for batch in take(data, steps + 2):
    for row, index in enumerate(batch['index']):
      masks = batch['mlm_positions'][row].tobytes()
      seen.setdefault(int(index), []).append(masks)
  again = [masks for masks in seen.values() if len(masks) > 1]
  assert len(again) > 20
  assert np.mean([len(set(masks)) == len(masks) for masks in again]) > 0.9


def test_evaluation_is_epoch_0_in_order(directory):
  data = build(directory, train=False)
  read = list(data.batches())
  given = pretraining_source(directory, 'validation')
  expected = draw(given, epoch=0, seed=3)
  real = sum(int(batch['mask'].sum()) for batch in read)
  assert real == len(given)
  rest = -len(given) % 24
  assert rest  # or the padding is not tested
  for name in KEYS:
    got = np.concatenate([batch[name] for batch in read])
    np.testing.assert_array_equal(got[:real], expected[name])
    assert not got[real:].any()


def test_splits_share_no_document(directory):
  train, validation = (
    pretraining_source(directory, split) for split in corpus.SPLITS
  )
  assert len(train._rows.documents) + len(validation._rows.documents) == 82
  rows = {tuple(validation.record(i)['tokens']) for i in range(len(validation))}
  others = {tuple(train.record(i)['tokens']) for i in range(len(train))}
  # Rows of two tokens may recur by chance.
  assert not {row for row in rows & others if len(row) > 4}
  assert train.where(0).endswith('split train, document 0')
  last = train.where(len(train) - 1)
  assert last.endswith(f'document {len(train._rows.documents) - 2}')


@pytest.mark.parametrize(
  ('changes', 'key'),
  [
    (dict(max_length=64), 'dataset.max_length'),
    (dict(max_length=4), 'dataset.max_length'),
    (dict(mask_share=0.0), 'dataset.mask_share'),
    (dict(mask_share=0.95), 'dataset.mask_share'),
    (dict(max_ngram=0), 'dataset.max_ngram'),
    (dict(short_share=1.5), 'dataset.short_share'),
    (dict(directory=''), 'dataset.directory'),
    (dict(tokenizer='x'), 'dataset.tokenizer'),
  ],
)
def test_illegal_configurations(directory, changes, key):
  with pytest.raises(ConfigError) as error:
    builder.build_source(pretraining_config(directory) | changes, 'train')
  assert error.value.field == key


def test_illegal_splits_and_directories(directory, tmp_path):
  with pytest.raises(ConfigError) as error:
    builder.validate(pretraining_config(directory), 'test')
  assert error.value.field == 'split'
  with pytest.raises(MissingDataError, match=r'launch\.prepare_corpus'):
    pretraining_source(tmp_path)


def test_a_part_of_the_real_corpus(shared_data, tmp_path):
  path = shared_data / 'corpus_eltec_eng' / 'valid.txt.gz'
  if not path.is_file():
    pytest.skip(f'no {path}')
  with gzip.open(path, 'rt', encoding='utf-8') as file:
    lines = [next(file).strip() for _ in range(400)]
  texts = [lines[:200], lines[200:]]
  out, manifest = corpora.prepare(
    tmp_path, texts, tokenizer='', vocab_size=1000, max_length=128,
    validation_share=0.5,
  )  # fmt: skip
  assert not manifest['faults']
  counts = manifest['splits']['train']
  assert counts['unknown_tokens'] < 1e-3 * counts['tokens']
  # Rows are mostly full, and words are of 1.6 tokens.
  assert counts['tokens'] / counts['rows'] > 100
  assert 1.2 < counts['tokens'] / counts['words'] < 2.0
  given = builder.build_source(
    dict(name='pretraining', directory=str(out)), 'train'
  )
  batch = draw(given, indices=range(64))
  masked = batch['mlm_weights'].sum(axis=1)
  assert abs(masked / batch['length'] - 0.2).mean() < 0.01
  names = tokenizer.load(out).names(given.record(0)['tokens'].tolist())
  start = ''.join(names).replace('▁', ' ').strip()
  # The first document is of the validation split.
  assert start[:40] == lines[200].lower()[:40]
