"""The analysis of tapes against counting row by row, and of a trained run."""

import collections

import jax
import numpy as np
import pytest

from benchmarks import analyze, budgets, tape_report
from core.errors import ConfigError
from dataset_lib import builder
from launch import command_line
from tests.adatape import serving_test
from tests.albert_act import tiny_run
from tests.benchmarks import command_test
from tests.dataset_lib import corpora
from train_lib import trainer

IMAGES = {**serving_test.DATA['image'], 'test_examples': 30}
NIGHTLY = pytest.mark.nightly
LEARNED = {**serving_test.IMAGE, 'bank': 'learnable', 'bank_size': 20}


def read(model, dataset, rows):
  task, variables = serving_test.build(model, dataset)
  data = tape_report.spread_rows(dataset, 'test', rows)
  return task, variables, tape_report.read(task, variables, data)


def one_by_one(task, variables, dataset, indices):
  """(tape length, tokens read, right answer) of each row alone."""
  source = builder.build_source(dataset, 'test')
  key = task.info.input_key
  apply = jax.jit(task.apply)
  for index in indices:
    record = source.record(int(index))
    batch = {key: record[key][None]}
    logits, out = apply(variables['params'], {}, batch)
    tape, length = out['tape'], int(out['tape']['length'][0])
    picks = np.asarray(tape['indices'])[0, :length].ravel().tolist()
    yield length, picks, int(logits[0].argmax()) == record['label']


@pytest.mark.parametrize(
  ('model', 'dataset', 'grid'),
  [
    pytest.param(serving_test.IMAGE, IMAGES, (4, 4), marks=NIGHTLY),
    (LEARNED, IMAGES, (0, 0)),
    pytest.param(
      serving_test.PARITY, serving_test.DATA['tokens'], (1, 8), marks=NIGHTLY
    ),
  ],
  ids=['input', 'learnable', 'symbols'],
)
def test_equals_counting_row_by_row(model, dataset, grid):
  task, variables, tapes = read(model, dataset, 15)
  total = len(builder.build_source(dataset, 'test'))
  indices = [n * total // 15 for n in range(15)]
  assert tapes.index.tolist() == indices
  lengths, picks, right = zip(
    *one_by_one(task, variables, dataset, indices), strict=True
  )
  counted = collections.Counter(token for row in picks for token in row)
  assert tapes.length.tolist() == list(lengths)
  assert tapes.correct.tolist() == list(right)
  assert {n: c for n, c in enumerate(tapes.counts) if c} == counted
  assert tape_report.bank_grid(task.model, task.info.input_shape) == grid

  names = task.label_names
  summary, by_length, classes, bank = tape_report.tables(tapes, grid, names)
  (tape, sequence), inputs = summary.rows, tapes.input_tokens
  assert inputs == (1 if grid == (1, 8) else 4)
  assert tape['mean'] == pytest.approx(np.mean(lengths), abs=1e-4)
  assert tape['variance'] == pytest.approx(np.var(lengths), abs=1e-4)
  for name in ('minimum', 'maximum', 'limit'):
    assert sequence[name] == tape[name] + inputs
  assert tape['limit'] == task.model.max_steps
  found = {row['tape length']: row['rows'] for row in by_length.rows}
  assert found == collections.Counter(lengths)
  assert [row['rows'] for row in bank.rows] == sorted(tapes.counts)[::-1]
  for row in bank.rows:
    assert row['rows'] == counted[row['token']]
    assert row['share'] == pytest.approx(row['rows'] / 15, abs=1e-6)
    assert ('x' in row) == bool(grid[1])
    if grid[1]:
      assert row['token'] == grid[1] * row['y'] + row['x']
  of_class = {name: [] for name in names}
  for label, length in zip(tapes.label, lengths, strict=True):
    of_class[names[label]].append(length)
  for row in classes.rows:
    assert row['mean'] == pytest.approx(np.mean(of_class[row['class']]), 1e-4)
  means = [row['mean'] for row in classes.rows]
  assert means == sorted(means)


def test_examples_are_the_shortest_and_longest():
  task, _, tapes = read(serving_test.IMAGE, IMAGES, 20)
  source = builder.build_source(IMAGES, 'test')
  names = task.label_names
  rows, shown = tape_report.examples(tapes, source, 3, names)
  lengths = sorted(tapes.length.tolist())
  assert lengths[0] < lengths[-1]
  found = [row['tape length'] for row in rows]
  assert found == lengths[:3] + lengths[::-1][:3]
  assert len({row['index'] for row in rows}) == 6
  pictures = shown['shortest tapes'] + shown['longest tapes']
  for row, (picture, title) in zip(rows, pictures, strict=True):
    record = source.record(row['index'])
    np.testing.assert_array_equal(picture, record['image'])
    assert row['class'] == f'fake_{record["label"]}'
    assert title == f'{row["class"]}\ntape {row["tape length"]}'
  _, shown = tape_report.examples(tapes, source, 99, ('a',) * 3)
  assert [len(group) for group in shown.values()] == [10, 10]


def test_patches_have_the_number_of_their_step(made, tmp_path, capsys):
  task, variables, tapes = read(serving_test.IMAGE, IMAGES, 20)
  source = builder.build_source(IMAGES, 'test')
  _, shown = tape_report.examples(tapes, source, 1, task.label_names)
  tape_report.draw(tmp_path, tapes, (4, 4), shown)
  assert len(made) == 5
  ends = np.argsort(tapes.length, kind='stable')[[0, -1]]
  read_alone = one_by_one(task, variables, IMAGES, tapes.index[ends])
  for axes, (length, picks, _) in zip(made[-1].axes, read_alone, strict=True):
    places = [(n % 4 + 0.5, n // 4 + 0.5) for n in picks]
    steps = np.repeat(np.arange(1, length + 1), len(picks) // length)
    assert {t.get_position(): t.get_text() for t in axes.texts} == dict(
      zip(places, map(str, steps), strict=True)
    )
    assert f'tape {length} tokens' in axes.get_title(loc='left')
  tape_report.draw(tmp_path, tapes, (0, 0), shown)
  assert len(made) == 8  # without a heatmap and a tape
  assert "bank='learnable' reads trained vectors" in capsys.readouterr().out


def test_symbols_are_written_in_lines():
  tokens = np.array([0, 1, 2, 0, 3, 28], np.int32)
  assert tape_report._lines(tokens) == '1 - 0 1\na z'


def test_without_a_bank_there_is_nothing_to_analyse():
  with pytest.raises(ConfigError, match='nothing to analyse'):
    read({**serving_test.IMAGE, 'bank': 'none'}, IMAGES, 4)


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


@NIGHTLY
def test_the_analysis_writes_tables_and_pictures(run, tmp_path, capsys):
  flags = [f'--workdir={run}', '--rows=30', '--images=2']
  assert analyze.main([*flags, f'--out={tmp_path}/out']) == 0
  names = {f'{name}.csv' for name in TABLES}
  names |= {f'{n}.{end}' for n in PICTURES for end in ('png', 'pdf')}
  assert {path.name for path in (tmp_path / 'out').iterdir()} == names
  pdf = (tmp_path / 'out/lengths.pdf').read_bytes()
  assert b'/FontFile2' in pdf  # text stays text
  tape, sequence = command_test.read(tmp_path / 'out/summary.csv')
  assert int(tape['limit']) == 6
  assert float(sequence['mean']) == pytest.approx(float(tape['mean']) + 16)
  assert len(command_test.read(tmp_path / 'out/bank.csv')) == 64
  assert len(command_test.read(tmp_path / 'out/examples.csv')) == 4
  printed = capsys.readouterr().out
  for word in ('30 rows', 'sequence length', tape['variance'], 'bank tokens',
               'step 6, written'):  # fmt: skip
    assert word in printed


@NIGHTLY
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
  rows = {
    row['candidate']: row for row in command_test.read(tmp_path / 'budgets.csv')
  }
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


@NIGHTLY
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
