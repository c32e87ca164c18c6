"""Runs of a list that read each other, and their summary over seeds."""

import shutil
from unittest import mock

import pytest

from core import files
from launch import command_line, sweep, sweep_runs
from launch.sweep_runs import Run
from tests import shell
from tests.dataset_lib import corpora
from tests.launch.sweep_test import PARITY, flags


def test_runs_that_differ_only_in_the_seed_are_summarised(tmp_path):
  values = {
    '@y1 c=1': None,
    '@y2 seed=1 c=1': None,
    '@y12 c=3': None,
    '@y12_1 c=3 seed=1': None,
    '@x0 a=@y1 seed=0': 0.5,
    '@x1 a=@y2 seed=1': 0.7,
    'a=2': 0.9,
    '@x2 a=@y1 seed=2': None,
    '@z12 b=@y12': None,
    '@z12_1 b=@y12_1 seed=1': None,
    # Equal but for digits of names: of other lines, or of an equal seed.
    '@w1 d=@y1 seed=0': 0.3,
    '@w2 d=@y12 seed=1': 0.3,
    '@v1 e=1 seed=0': 0.2,
    '@v2 e=1 seed=0': 0.2,
    # Its first seed has no value.
    'f=1 seed=0': None,
    'f=1 seed=1': 0.5,
    'f=1 seed=2': 0.7,
  }
  ranked, named = [], {}
  for line, value in values.items():
    own, *overrides = line.split() if line[0] == '@' else ['', *line.split()]
    needs = [named[o.partition('=')[2]] for o in overrides if '@' in o]
    overrides = [o.replace('@', f'{tmp_path}/') for o in overrides]
    workdir = tmp_path / (own[1:] or line)
    run = Run(line, 'file.py', overrides, workdir, needs=tuple(needs))
    named[own] = run
    ranked.append((run, {'run': line, 'test/x': value}))
  sweep_runs.write_seeds(tmp_path / 'seeds.csv', ranked[6:-3], 'test/x')
  assert not [*tmp_path.iterdir()]
  # The first of the seeds has no `seed=`; these have another metric.
  ranked[8][1]['test/y'], ranked[9][1]['test/y'] = 1.0, 2.0
  ranked[-3][1]['test/y'] = 1.0
  sweep_runs.write_seeds(tmp_path / 'seeds.csv', ranked, 'test/x')
  first, second, third, *others = shell.table(tmp_path / 'seeds.csv')
  assert (first['run'], first['seeds']) == ('@x a=@y', '2')
  assert float(first['test/x mean']) == pytest.approx(0.6)
  # Of two values 0.2 apart.
  assert float(first['test/x deviation']) == pytest.approx(0.02**0.5)
  assert (second['run'], second['seeds']) == ('a=2', '1')
  assert not second['test/x deviation']
  assert (third['run'], third['seeds']) == ('@z b=@y', '2')
  assert (third['test/y mean'], third['test/x mean']) == ('1.5', '')
  assert [row['run'] for row in others] == [*[*values][-7:-3], 'f=1']
  last = others[-1]
  assert (last['seeds'], last['test/x seeds']) == ('3', '2')
  assert float(last['test/x mean']) == pytest.approx(0.6)


NAMED = """
@first :n=4 seed=0
@second --config=configs/adatape/parity.py:n=6 warm_start.workdir=@first
batch_size=$SIZE
"""


def test_a_line_reads_the_directory_of_a_named_one(
  tmp_path, monkeypatch, capsys, refused, trained
):
  monkeypatch.setenv('SIZE', '16')
  given = flags(tmp_path, NAMED)
  first, second, _ = NAMED.strip().splitlines()
  trained.outcomes = {first: 7, second: {'test/accuracy': 0.5}}
  assert sweep.main(given) == 7
  assert "not run, without ['@first" in capsys.readouterr().err
  assert [run.config for run in trained.runs] == [f'{PARITY},n=4', PARITY]
  assert trained.runs[1].overrides == ['batch_size=16']
  trained.outcomes[first] = {'a/b': 0.5}
  assert sweep.main(given) == 0
  run, reader = trained.runs[2:]
  assert (run.workdir.name, reader.workdir.name) == ('first', 'second')
  assert reader.config == 'configs/adatape/parity.py:n=6'
  assert reader.overrides == [f'warm_start.workdir={run.workdir}']
  # Now that the first has finished, its reader is checked before any run.
  (reader.workdir / 'result.json').unlink()
  wrong = flags(tmp_path, NAMED.replace('=@first', '=@first batch_size=0'))
  refused(sweep.main, wrong, ['line 3: batch_size'])
  # A name is of one configuration, also when its run has finished.
  config = command_line.load_config(f'{PARITY},n=4', ['seed=0']).to_dict()
  files.write_json(tmp_path / 'runs' / 'first' / 'config.json', config)
  other = flags(tmp_path, '@first :n=4 seed=1')
  refused(sweep.main, other, ['line 1: @first', 'seed: saved 0, given 1'])
  same = flags(tmp_path, '@first :n=4 seed=0')
  (run,) = sweep.read_runs(sweep.main.parse(same))
  assert run.result() is not None


@pytest.mark.parametrize(
  ('path', 'config', 'metric', 'count'),
  [
    ('recurrent_act/tables.txt', 'recurrent_act/graves.py', 'test/accuracy',
     39),
    ('albert_act/tables.txt',
     'albert_act/pretrain.py:corpus={dir}/corpus,variant=micro,length=32,'
     'steps=3500,tau_from=0.43', 'dev/mlm_accuracy', 146),
    ('eat/tables.txt', 'eat/glue.py', 'dev/score', 18),
    ('eat/ablation.txt', 'eat/glue.py', 'dev/score', 19),
    ('eat/recipes.txt', 'eat/glue.py:pretrained={dir},exits=2-3,data={dir}',
     'dev/score', 11),
  ],
)  # fmt: skip
def test_the_lists_of_tables(
  path, config, metric, count, tmp_path, monkeypatch
):
  model = {'model_type': 'bert', 'num_hidden_layers': 6}
  files.write_json(tmp_path / 'config.json', model)
  for name in ('MINILM', 'GLUE', 'PROBING'):
    monkeypatch.setenv(name, str(tmp_path))
  corpus = corpora.prepare(tmp_path, corpora.documents(20))[0]
  tokenizer = shutil.copy(corpus / 'tokenizer.json', tmp_path)
  corpus.rename(tmp_path / 'corpus')
  given = [f'--workdir={tmp_path / "runs"}', f'--metric={metric}']
  given += [f'--config=configs/{config.format(dir=tmp_path)}']
  given += [f'--overrides=configs/{path}']
  flags = sweep.main.parse(given)
  runs = sweep.read_runs(flags)
  assert len({run.workdir for run in runs}) == len(runs) == count
  assert all(run.is_named for run in runs)
  # Runs that others read have ended: now the lines of the others are checked.
  read = {one.workdir: one for run in runs for one in run.needs}
  for run in read.values():
    run.workdir.mkdir(parents=True)
    saved = command_line.load_config(run.config, run.overrides).to_dict()
    files.write_json(run.workdir / 'config.json', saved)
    files.write_json(run.workdir / 'result.json', {})
    shutil.copy(tokenizer, run.workdir)
  monkeypatch.setattr(sweep_runs, 'read_config', spy := mock.Mock(
    wraps=sweep_runs.read_config
  ))  # fmt: skip
  sweep.read_runs(flags)
  assert spy.call_count == count
