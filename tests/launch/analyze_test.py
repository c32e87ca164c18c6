"""The analysis of a checkpoint as one command, against plain counting."""

import collections
import csv

import jax
import numpy as np
import pytest

from dataset_lib import builder, tokenizer
from launch import analyze, command_line
from tests.albert_act import small, tiny_run
from tests.dataset_lib import corpora
from train_lib import loading, sharding, strict_json

# Words of the made corpus; 'w1ab' is three tokens, '%' is unknown.
TREEBANK = [
  [('w1ab', 'nsubj:pass', 2), ('w7', 'root', 0), ('w30a', 'obj', 2),
   ('.', 'punct', 2)],
  [('w2', 'det', 2), ('w3b', 'nsubj', 3), ('w4ab', 'root', 0), ('%', 'obj', 3),
   ('.', 'punct', 3)],
  [('w5', 'root', 0), ('w6', 'obj', 1)],
]  # fmt: skip


def write_treebank(path):
  blocks = []
  for words in TREEBANK:
    lines = [
      f'{n}\t{form}\t_\t_\t_\t_\t{head}\t{label}\t_\t_'
      for n, (form, label, head) in enumerate(words, 1)
    ]
    blocks.append('\n'.join(lines))
  path.write_text('\n\n'.join(blocks) + '\n')
  return path


def params_of(run):
  """(model, parameters in float64) of a run."""
  task = loading.load_task(run, loading.load_own_config(run))
  mesh = sharding.make_mesh({'data': 1})
  with jax.set_mesh(mesh):
    return task.model, loading.load_params(run, task, mesh).variables['params']


def table(path):
  """The rows of a file by their first column."""
  with path.open(newline='') as file:
    return {next(iter(row.values())): row for row in csv.DictReader(file)}


def assert_counted(path, counted, depths):
  """iterations.csv is what was counted: iterations by kind of token."""
  found = table(path)
  depth = found.pop('executed depth of a row')
  assert set(found) == set(counted)
  for kind, values in (counted | {'depth': depths}).items():
    row = depth if kind == 'depth' else found[kind]
    assert int(row['count']) == len(values)
    assert float(row['mean']) == pytest.approx(np.mean(values), abs=1e-4)
    assert float(row['std']) == pytest.approx(np.std(values), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('halting', ['act', 'fixed'])
def test_a_classifier(tmp_path_factory, tmp_path, capsys, halting):
  run = tiny_run.made(tmp_path_factory, 'glue', halting)
  treebank, out = write_treebank(tmp_path / 'bank.conllu'), tmp_path / 'out'
  flags = [f'--workdir={run}', f'--treebank={treebank}', f'--out={out}']
  assert analyze.main([*flags, '--label_words=1', '--sentences=5']) == 0
  printed = capsys.readouterr().out
  model, params = params_of(run)
  words = tokenizer.load(run / 'tokenizer.json')
  counted, depths = collections.defaultdict(list), []
  for number in range(40):
    row = words.encode([tiny_run.text(number)[0]]).tokens
    _, steps, _, _ = small.encode_by_loop(
      params, row, np.zeros_like(row), model
    )
    depths.append(steps.max())
    counted['all'] += steps.tolist()
    counted['cls'].append(steps[0])
    counted['sep'].append(steps[-1])
    counted['unmasked'] += steps[1:-1].tolist()
  assert_counted(out / 'iterations.csv', counted, depths)
  labels = table(out / 'labels.csv')
  assert labels['executed depth of a row']['count'] == str(len(TREEBANK))
  assert labels['obj']['count'] == '3'
  if halting == 'fixed':
    assert set(counted['all']) == {6}
    assert {float(labels[name]['mean']) for name in ('obj', 'root')} == {6.0}
  else:
    assert np.std(counted['unmasked']) > 0.1
  names = {'iterations.csv', 'similarity.csv', 'labels.csv', 'sentences.html'}
  pictures = {f'{name}.{kind}' for name in ('similarity', 'sentences')
              for kind in ('png', 'pdf')}  # fmt: skip
  assert {path.name for path in out.iterdir()} == names | pictures
  page = (out / 'sentences.html').read_text()
  assert page.count('<h2 ') == 5
  for word in ('Iterations, at most 6', 'all running',
               'executed depth of a row', 'nsubj', 'step 4, written',
               f'{np.mean(depths) / 6:.0%}'):  # fmt: skip
    assert word in printed


@pytest.mark.nightly
def test_a_pretraining_run(tmp_path_factory):
  run = tiny_run.made(tmp_path_factory, 'pretrain')
  assert analyze.main([f'--workdir={run}']) == 0
  model, params = params_of(run)
  config = loading.load_own_config(run)
  data = builder.build(
    config.dataset, split='validation', train=False, seed=config.seed,
    batch_size=4, num_threads=0,
  )  # fmt: skip
  counted, depths = collections.defaultdict(list), []
  for batch in data.batches():
    for row in np.flatnonzero(batch['mask']):
      length = batch['length'][row]
      tokens, types = batch['tokens'][row], batch['token_types'][row]
      _, steps, _, _ = small.encode_by_loop(
        params, tokens[:length], types[:length], model
      )
      depths.append(steps.max())
      for spent, kind in zip(
        steps, kinds_of(batch, row, types[:length]), strict=True
      ):
        counted['all'].append(spent)
        counted[kind].append(spent)
  assert len(counted['mask']) > 10
  assert np.std(counted['all']) > 0.1
  assert_counted(run / 'analysis' / 'iterations.csv', counted, depths)
  found = table(run / 'analysis' / 'similarity.csv')
  assert list(found) == [str(n) for n in range(1, 7)]
  columns = {
    f'{kind}{name}' for kind in counted for name in ('', ' running', ' share')
  }
  assert set(found['1']) == {'iteration', *columns}
  for name, values in counted.items():
    for n, row in found.items():
      share = np.mean(np.array(values) >= int(n))
      assert float(row[f'{name} share']) == pytest.approx(share, abs=1e-4)
  assert not (run / 'analysis' / 'labels.csv').exists()
  assert '[MASK]' in (run / 'analysis' / 'sentences.html').read_text()


def kinds_of(batch, row, types):
  """The kind of each token of [CLS] a [SEP] b [SEP]."""
  kinds = ['unmasked'] * len(types)
  kinds[0] = 'cls'
  for place in range(1, len(types)):
    last = place == len(types) - 1
    if last or types[place + 1] != types[place]:
      kinds[place] = 'sep'
  for slot in np.flatnonzero(batch['mlm_weights'][row]):
    place, kind = (
      batch['mlm_positions'][row, slot],
      batch['mlm_kind'][row, slot],
    )
    kinds[place] = ('mask', 'random', 'original')[kind]
  return kinds


@pytest.mark.nightly
def test_nothing_is_written_when_something_cannot_be_read(
  tmp_path_factory, tmp_path, capsys
):
  run = tiny_run.made(tmp_path_factory, 'pretrain')
  bad = tmp_path / 'bad.conllu'
  bad.write_text('1\tone\n\n')
  for flags, code, word in (
    ([f'--treebank={bad}'], command_line.DATA, 'expected sentences in CoNLL-U'),
    (['--step=7'], command_line.CHECKPOINT, 'step'),
  ):
    with pytest.raises(SystemExit) as stop:
      analyze.main([f'--workdir={run}', f'--out={tmp_path}/out', *flags])
    error = capsys.readouterr().err
    assert stop.value.code == code
    assert word in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / 'out').exists()


def test_a_treebank_with_faults_names_the_first(tmp_path, capsys):
  path = write_treebank(tmp_path / 'bank.conllu')
  path.write_text('1\tone\n\n' + path.read_text())
  assert len(analyze.read_treebank(str(path))) == len(TREEBANK)
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f'1 faults in {path}')
  assert 'line 1' in line
  assert analyze.read_treebank('') == []


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run that has not begun."""
  root = tmp_path_factory.mktemp('bare')
  return tiny_run.bare(root / 'run', corpora.tokenizer(root / 'words'))


@pytest.mark.parametrize(
  ('flags', 'words'),
  [
    ([], ['--workdir', 'required']),
    (['--workdir=/nowhere'], ['--workdir', 'config.json']),
    (['--workdir={run}', '--splt=x'], ['--splt', '--split']),
    (['--workdir={run}', '--split=dev[5'], ['--split', 'validation']),
    (['--workdir={run}', '--rows=0'], ['--rows', 'positive integer']),
    (['--workdir={run}', '--sentences=-1'], ['--sentences', '0 or more']),
    (['--workdir={run}', '--label_words=0'], ['--label_words', 'positive']),
    (['--workdir={run}', '--step=last'], ['--step', 'best']),
    (['--workdir={run}', '--treebank=/nowhere'], ['--treebank', 'CoNLL-U']),
    (['--workdir={run}', '--treebank={run}'], ['--treebank', 'CoNLL-U']),
    (['--workdir={run}', '--out={run}/config.json'], ['--out', 'a directory']),
    (['--workdir={copy}'], ['--workdir', 'tokenizer.json']),
    (['--workdir={bert}'], ['--workdir', 'ALBERT', 'BertClassifier']),
  ],
)
def test_bad_command_lines_are_answered_in_one_line(
  flags, words, run, tmp_path, capsys
):
  places = {'run': run, 'copy': tmp_path / 'copy', 'bert': tmp_path / 'bert'}
  config = strict_json.loads((run / 'config.json').read_text())
  for name, changes in (
    ('copy', {}),
    ('bert', {'name': 'model_lib.bert:BertClassifier', 'variant': 'tiny'}),
  ):
    places[name].mkdir()
    model = config['model'] | changes if name == 'copy' else changes
    strict_json.write(places[name] / 'config.json', config | {'model': model})
  with pytest.raises(SystemExit) as stop:
    analyze.main([flag.format(**places) for flag in flags])
  error = capsys.readouterr().err
  assert stop.value.code == command_line.USAGE
  assert len(error.strip().splitlines()) == 1
  for word in words:
    assert word in error
  assert not (run / 'analysis').exists()
