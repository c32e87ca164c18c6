"""`launch.benchmark eat_speed`: equal contenders, flags, a tiny run.

No test depends on a measured time.
"""

import csv
import gzip
import importlib.util
import json
import re

import jax
import numpy as np
import pytest

from dataset_lib.errors import InvalidDataError, MissingDataError
from launch import benchmark, peers
from launch.eat_speed import engine_cases, lineup, race, text_lengths
from launch.eat_speed.lineup import Settings

TINY = Settings(
  variant='tiny', depth=6, length=8, batches=(1, 4), exit_rates=(0, 50), fill=2
)
TINY_FLAGS = [
  '--variant=tiny', '--depth=6', '--length=8', '--batch=1,2',
  '--exit_rates=0,50', '--rounds=2', '--warmup=1', '--min_seconds=0.01',
  '--fill=1', '--timeout=300',
]  # fmt: skip


@pytest.fixture(scope='module')
def weights(tmp_path_factory):
  directory = tmp_path_factory.mktemp('weights')
  lineup.write_weights(TINY, directory)
  return directory


def specification(build, weights, group='dense', kind='bert'):
  one = lineup.Contender('x', group, 'x', build, kind)
  text = json.dumps(lineup.specification(one, TINY, weights))
  return json.loads(text)  # as a process gets it


@pytest.mark.slow
@pytest.mark.parametrize('form', lineup.DENSE_FORMS)
def test_dense_forms_compute_the_same(form, weights):
  from launch.eat_speed import contender, forms

  wanted = specification(f'jax:{form}', weights)
  wanted['batches'] = [4]
  built = forms.build(form, wanted)
  model, params = forms.load(wanted)
  tokens = contender.token_rows(wanted, model.vocab_size)
  inputs = jax.device_put(forms.inputs(tokens))
  logits, _ = model.apply({'params': params}, **inputs)
  expected = contender.score(np.asarray(logits))
  assert expected.std() > 0.01  # the rows differ
  np.testing.assert_allclose(built.scores, expected, atol=1e-5)
  assert built.cases['4']() == 4


@pytest.mark.slow
def test_the_engine_computes_what_its_chain_does(weights):
  from launch.eat_speed import forms

  wanted = specification('jax:engine', weights)
  bare = forms.build('bare chain', wanted)
  built = engine_cases.build(wanted)
  np.testing.assert_allclose(built.scores, bare.scores, atol=1e-4)
  rows = lineup.rows_per_call(4, (0, 50), 2)
  for case in ('1/0', '1/50', '4/0', '4/50'):
    assert built.cases[case]() == (rows if case[0] == '4' else 2)


@pytest.mark.parametrize('rate', [0, 5, 50, 80, 95, 100])
def test_exits_are_exact_and_spread(rate):
  numbers = np.arange(200)
  left = engine_cases.leaves(numbers, rate)
  assert left.sum() == 2 * rate
  # Of any 20 rows in a row, so many leave too, or one more or less.
  windows = np.convolve(left, np.ones(20), 'valid')
  assert abs(windows - rate / 5).max() <= 1


@pytest.mark.parametrize(
  ('batch', 'rates', 'fill', 'rows'),
  [
    (1, (0, 50, 80, 95), 8, 20),
    (16, (0, 50, 80, 95), 8, 160),
    (32, (0, 50, 80, 95), 8, 320),
    (32, (0,), 8, 256),
    (16, (50,), 1, 16),
    (1, (0, 100), 8, 1),
    (3, (33,), 8, 300),
  ],
)
def test_rows_of_a_call(batch, rates, fill, rows):
  assert lineup.rows_per_call(batch, rates, fill) == rows
  assert all(rows * rate % 100 == 0 for rate in rates)
  assert rows % batch == 0


def test_missing_peers_are_said(monkeypatch):
  find = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util, 'find_spec', lambda n: None if n == 'onnx' else find(n)
  )
  reasons = lineup.missing(Settings(groups=('dense', 'onnx')))
  assert list(reasons) == ['onnx']
  assert re.search(r'onnx.* not installed: pip install .*\[peers\]',
                   reasons['onnx'])  # fmt: skip


def test_different_results_are_reported():
  contenders = {one.worker: one for one in lineup.contenders(TINY)}

  def lines(**scores):
    answers = {
      name.replace('_', ' '): {'scores': values}
      for name, values in scores.items()
    }
    return race.disagreements(contenders, answers, 1e-4)

  same = dict(dense_unrolled=[0.1, 0.2], dense_scanned=[0.10001, 0.2])
  # EAT and DistilBERT are other models; one row is as good as two.
  others = dict(EAT_engine=[0.5, 0.2], distil_scanned=[0.3], PyTorch_BERT=[0.1])
  assert lines(**same, **others) == []
  (line,) = lines(**same, PyTorch_BERT=[0.1, 0.3])
  assert 'PyTorch BERT and dense unrolled' in line
  assert '0.1 apart' in line
  assert len(lines(**same, PyTorch_BERT=[float('nan')])) == 1


def test_synthetic_lengths():
  lengths = text_lengths.synthetic(1000, 64)
  assert len(lengths) == 1000
  assert np.median(lengths) == text_lengths.MEDIAN_LENGTH
  assert max(lengths) == 64
  assert min(lengths) >= 3
  assert sorted(lengths) != list(lengths)


def test_lengths_of_a_file(tmp_path):
  words = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'a', '"']
  (tmp_path / 'vocab.txt').write_text('\n'.join(words))
  # A quote is a character; a broken row is none.
  text = 'label\tsentence\n0\ta a\n1\t"a\nbroken\n1\ta a a a a a a a\n'
  path = tmp_path / 'dev.tsv.gz'
  path.write_bytes(gzip.compress(text.encode()))
  vocabulary = str(tmp_path / 'vocab.txt')
  lengths = text_lengths.of_file(str(path), ['sentence'], vocabulary, 9, 8)
  assert sorted(lengths) == [4, 4, 8]
  with pytest.raises(InvalidDataError, match=r'columns label, sentence.*text'):
    text_lengths.of_file(str(path), ['text'], vocabulary, 9, 8)
  with pytest.raises(MissingDataError, match=r'absent\.tsv: expected a TSV'):
    text_lengths.of_file('absent.tsv', ['sentence'], vocabulary, 9, 8)


def test_help_teaches(capsys):
  with pytest.raises(SystemExit) as caught:
    benchmark.main(['eat_speed', '--help'])
  assert caught.value.code == 0
  text = capsys.readouterr().out
  for words in ('--batch', '--exit_rates', 'best dense', '[peers]', 'example:',
                'default: 1,16,32', 'taskset'):  # fmt: skip
    assert words in text


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--variant=huge'], "--variant: .*'base'.*'huge'"),
    (['--variant=tiny'], '--depth: .*even number above 4.*got 2'),
    (['--depth=7'], '--depth: .*even'),
    (['--length=1000'], '--length: .*512'),
    (['--window=3'], '--window: .*even'),
    (['--batch=0'], '--batch: .*list of positive'),
    (['--exit_rates=50,101'], '--exit_rates: .*0 to 100'),
    (['--contenders=eat'], '--contenders: .*dense'),
    (['--min_seconds=0'], '--min_seconds: .*positive'),
    (['--lengths_from=a.tsv'], '--vocabulary: '),
    (['--length_buckets=16,1024'], '--length_buckets: .*512'),
    (['--out=/no/such/folder/a.csv'], '--out: .*exists'),
    (['--bach=1'], '--bach: no such flag'),
  ],
)
def test_mistakes_are_one_line(flags, message, capsys):
  with pytest.raises(SystemExit) as caught:
    benchmark.main(['eat_speed', *flags])
  assert caught.value.code == 2
  text = capsys.readouterr().err
  assert text.count('\n') == 1
  assert re.search(message, text)


@pytest.mark.slow
def test_tiny_run(tmp_path, capsys):
  out = tmp_path / 'rows.csv'
  flags = ['--contenders=dense,eat', '--length_buckets=4,8', '--length_rows=6']
  assert benchmark.main(['eat_speed', *TINY_FLAGS, *flags, f'--out={out}']) == 0
  text = capsys.readouterr().out
  assert 'left out' not in text
  assert 'WARNING' not in text
  assert 'batch 2; best dense form: dense' in text
  with out.open(newline='') as file:
    lines = list(csv.DictReader(file))
  names = [
    one.name
    for one in lineup.contenders(
      Settings(exit_rates=(0, 50), groups=('dense', 'eat'))
    )
  ]
  assert [(line['batch'], line['contender']) for line in lines] == [
    *[(batch, name) for batch in '12' for name in names],
    ('', 'padded'),
    ('', 'buckets'),
  ]
  assert all(float(line['seconds']) > 0 for line in lines)


@pytest.mark.slow
@pytest.mark.peers
def test_peers_compute_the_same(capsys):
  for name in peers.PACKAGES['onnx']:
    if importlib.util.find_spec(name) is None:
      pytest.skip(f'{name} is not installed')
  flags = ['--contenders=dense,distil,torch,onnx', '--length_buckets=none']
  assert benchmark.main(['eat_speed', *TINY_FLAGS, *flags]) == 0
  text = capsys.readouterr().out
  assert 'left out' not in text
  assert 'WARNING' not in text  # their logits are ours
  for peer in ('PyTorch BERT', 'ONNX Runtime DistilBERT'):
    assert text.count(peer) >= 3  # started, and in both tables
