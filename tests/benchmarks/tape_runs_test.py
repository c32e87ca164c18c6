"""A trained AdaTape: its analysis and its budgets as commands."""

import pytest

from benchmarks import analyze, budgets
from launch import command_line
from tests.albert_act import tiny_run
from tests.benchmarks.command_test import read
from tests.dataset_lib import corpora
from train_lib import trainer

TINY = [
  'batch_size=64', 'mesh.data=1', 'model.depth=2', 'model.width=16',
  'model.mlp_dim=16', 'phases.0.steps=6', 'phases.0.epochs=0',
  'optimizer.lr=0.01', 'log_every=3', 'tensorboard=false',
]  # fmt: skip
PICTURES = ('heatmap', 'distribution', 'lengths', 'examples', 'tape')
TABLES = ('summary', 'lengths', 'classes', 'bank', 'examples')


def train(tmp_path_factory, model, *changes):
  flag = f'configs/adatape/digits.py:model={model}'
  config = command_line.load_config(flag, [*TINY, *changes])
  directory = tmp_path_factory.mktemp('runs') / model
  trainer.train(config, str(directory))
  return directory


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  return train(tmp_path_factory, 'input', 'model.query_dim=16')


@pytest.fixture(scope='module')
def dense(tmp_path_factory):
  return train(tmp_path_factory, 'vit')


@pytest.mark.nightly
def test_the_analysis_writes_tables_and_pictures(run, tmp_path, capsys):
  flags = [f'--workdir={run}', '--rows=30', '--images=2']
  assert analyze.main([*flags, f'--out={tmp_path}/out']) == 0
  names = {f'{name}.csv' for name in TABLES}
  names |= {f'{n}.{end}' for n in PICTURES for end in ('png', 'pdf')}
  assert {path.name for path in (tmp_path / 'out').iterdir()} == names
  pdf = (tmp_path / 'out/lengths.pdf').read_bytes()
  assert b'/FontFile2' in pdf  # text stays text
  tape, sequence = read(tmp_path / 'out/summary.csv')
  assert int(tape['limit']) == 6
  assert float(sequence['mean']) == pytest.approx(float(tape['mean']) + 16)
  assert len(read(tmp_path / 'out/bank.csv')) == 64
  assert len(read(tmp_path / 'out/examples.csv')) == 4
  printed = capsys.readouterr().out
  for word in ('30 rows', 'sequence length', tape['variance'], 'bank tokens',
               'step 6, written'):  # fmt: skip
    assert word in printed


@pytest.mark.nightly
def test_budgets_of_a_run_beside_a_sweep(run, dense, tmp_path, capsys):
  names = [(f':model=vit seed={seed}', dense) for seed in (0, 1)]
  names += [(':model=input', run), (':model=ut', tmp_path / 'failed')]
  lines = [f'{n},{w}' for n, w in names]
  (tmp_path / 'sweep.csv').write_text('\n'.join(['run,workdir', *lines]))
  flags = [
    f'--workdir={run}', f'--sweep={tmp_path}', f'--out={tmp_path}',
    '--thresholds=0.5,2', '--max_steps=3,30', '--bank_shares=0.25,1',
    '--rows=40', '--batch_size=4', '--rounds=1', '--warmup=0',
  ]  # fmt: skip
  assert budgets.main(flags) == 0
  rows = {row['candidate']: row for row in read(tmp_path / 'budgets.csv')}
  names = {f'tau {tau}, T 3, bank {share} %'
           for tau in (0.5, 2) for share in (25, 100)}  # fmt: skip
  own = 'tau 2, T 6, bank 100 %'
  assert set(rows) == {own, *names, 'vit', 'input'}
  # The second seed is as fast as the first, and is not timed.
  assert rows.pop('vit')['images_per_second'] == ''
  for row in rows.values():
    assert 0 <= float(row['quality']) <= 1
    assert float(row['images_per_second']) > 0
    assert row['baseline'] == 'vit 0'
  # The run of the sweep is that of the settings; it has its own results too.
  assert rows['input']['flops'] == rows[own]['flops']
  assert 0 < float(rows['input']['test/accuracy']) <= 1
  for name in names:
    assert float(rows[name]['tape_length_max']) <= 3
    assert float(rows[name]['flops']) < float(rows[own]['flops'])
  printed = capsys.readouterr().out
  assert 'left out: :model=ut: it has no result' in printed
  # Of 64 tokens, 3 * 30 cannot be read.
  assert 'left out: tau 2, T 30, bank 100 %: bank_size' in printed
  for name in ('frontier_flops', 'frontier_speed'):
    assert (tmp_path / f'{name}.pdf').is_file()
    assert (tmp_path / f'{name}.png').is_file()


@pytest.mark.nightly
def test_runs_that_have_no_tape_are_refused(run, dense, tmp_path, refused):
  given = [f'--workdir={dense}', f'--out={tmp_path}']
  refused(budgets.main, given, ['--workdir', 'AdaTape', 'ViT'])
  refused(analyze.main, [f'--workdir={dense}'], ['--workdir', 'AdaTape', 'ViT'])
  for flag in ('--treebank=x', '--sentences=9', '--label_words'):
    given = [f'--workdir={run}', *flag.split('=')]
    words = [flag.partition('=')[0]]
    refused(analyze.main, given, words)
  refused(
    analyze.main, [f'--workdir={run}', '--sentences=9'],
    ['--sentences', 'AdaTapeViT'],
  )  # fmt: skip
  refused(
    analyze.main, [f'--workdir={run}', '--split=dev'], ['--split', 'test']
  )
  assert not (run / 'analysis').exists()


def test_a_flag_of_an_adatape_is_refused_for_an_albert(tmp_path, refused):
  words = corpora.tokenizer(tmp_path / 'words')
  albert = tiny_run.bare(tmp_path / 'run', words)
  given = [f'--workdir={albert}', '--images=6']
  refused(analyze.main, given, ['--images', 'albert_act'])
