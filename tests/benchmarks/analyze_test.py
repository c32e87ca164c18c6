"""The analysis of a checkpoint as one command, against plain counting."""

import pytest

from benchmarks import analyze, iteration_report
from core import files
from core.errors import InvalidDataError
from tests.albert_act import tiny_run
from tests.benchmarks.command_test import read
from tests.dataset_lib import corpora

# Words of the made corpus; 'w1ab' is three tokens, '%' is unknown.
TREEBANK = (
  'w1ab:nsubj:pass:2 w7:root:0 w30a:obj:2 .:punct:2',
  'w2:det:2 w3b:nsubj:3 w4ab:root:0 %:obj:3 .:punct:3',
  'w5:root:0 w6:obj:1',
)


def write_treebank(path):
  with path.open('w') as file:
    for words in TREEBANK:
      for n, word in enumerate(words.split(), 1):
        form, _, rest = word.partition(':')
        label, _, head = rest.rpartition(':')
        file.write(f'{n}\t{form}\t_\t_\t_\t_\t{head}\t{label}\t_\t_\n')
      file.write('\n')
  return path


def table(path):
  """The rows of a file by their first column."""
  return {next(iter(row.values())): row for row in read(path)}


@pytest.mark.nightly
@pytest.mark.parametrize('halting', ['act', 'fixed'])
def test_a_classifier(tmp_path_factory, tmp_path, capsys, halting):
  run = tiny_run.made(tmp_path_factory, 'glue', halting)
  treebank, out = write_treebank(tmp_path / 'bank.conllu'), tmp_path / 'out'
  flags = [f'--workdir={run}', f'--treebank={treebank}', f'--out={out}']
  assert analyze.main([*flags, '--label_words=1', '--sentences=5']) == 0
  printed = capsys.readouterr().out
  kinds = table(out / 'iterations.csv')
  depth = float(kinds['executed depth of a row']['mean'])
  assert [int(kinds[kind]['count']) for kind in ('cls', 'sep')] == [40, 40]
  labels = table(out / 'labels.csv')
  assert labels['executed depth of a row']['count'] == str(len(TREEBANK))
  assert labels['obj']['count'] == '3'
  is_fixed = {float(labels[name]['mean']) for name in ('obj', 'root')} == {6.0}
  assert is_fixed == (depth == 6.0) == (halting == 'fixed')
  names = {'iterations.csv', 'similarity.csv', 'labels.csv', 'sentences.html'}
  pictures = {'similarity.png', 'similarity.pdf'}
  assert {path.name for path in out.iterdir()} == names | pictures
  assert (out / 'sentences.html').read_text().count('\nmean ') == 5
  for word in ('Iterations, at most 6', 'all running',
               'executed depth of a row', 'nsubj', 'step 4, written',
               f'{depth / 6:.0%}'):  # fmt: skip
    assert word in printed


def test_a_treebank_with_faults_names_the_first(tmp_path, capsys):
  path = write_treebank(tmp_path / 'bank.conllu')
  path.write_text('1\tone\n\n' + path.read_text())
  assert len(iteration_report.read_treebank(str(path))) == len(TREEBANK)
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f'{path}: 1 sentences with faults are left out')
  assert f'{path}, line 1' in line
  assert iteration_report.read_treebank('') == []
  for text, message in (
    ('Just some text.\n', 'none of its 1 can be used; the first: wrong_col'),
    ('# text = nothing\n', 'first: no_words: .*, line 1: expected a word'),
    ('-DOCSTART- -X- O\n', 'none of its 0 can be used$'),
  ):
    path.write_text(text)
    with pytest.raises(InvalidDataError, match=message):
      iteration_report.read_treebank(str(path))


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run that has not begun."""
  root = tmp_path_factory.mktemp('bare')
  return tiny_run.bare(root / 'run', corpora.tokenizer(root / 'words'))


@pytest.mark.parametrize(
  ('flags', 'words'),
  [
    (['--workdir={run}', '--split=dev[5'], ['--split', 'validation']),
    (['--workdir={run}', '--treebank=/nowhere'], ['--treebank', 'CoNLL-U']),
    (['--workdir={run}', '--treebank={run}'], ['--treebank', 'CoNLL-U']),
    (['--workdir={run}', '--out={run}/config.json'], ['--out', 'a directory']),
    (['--workdir={copy}'], ['--workdir', 'tokenizer.json']),
    (['--workdir={bert}'], ['--workdir', 'ALBERT', 'BertClassifier']),
  ],
)
def test_bad_command_lines_are_answered_in_one_line(
  flags, words, run, tmp_path, refused
):
  config = files.loads((run / 'config.json').read_text())
  bert = {
    'task': 'train_lib.text_classification:TextClassification', 'loss': {},
    'model': {'name': 'model_lib.bert:BertClassifier', 'variant': 'tiny'},
  }  # fmt: skip
  places = {'run': run}
  for name, changes in (('copy', {}), ('bert', bert)):
    places[name] = tmp_path / name
    places[name].mkdir()
    files.write_json(places[name] / 'config.json', config | changes)
  refused(analyze.main, [flag.format(**places) for flag in flags], words)
  assert not (run / 'analysis').exists()
