"""Numbers without end, and names of others where they are shown."""

import functools
import re
from types import SimpleNamespace

import numpy as np
import pytest
import rich

from benchmarks import analyze, budgets
from core import errors, files
from launch import command_line, evaluate, export, predict, train
from tests.dataset_lib import corpora, word_rows

LONG = {
  '400 digits': '9' * 400, 'negative': '-' + '9' * 400,
  'hex': '0x' + 'f' * 9999,
  '5,000 digits': '9' * 5000, 'signs': '-' * 9999 + '1',
  'not': '~' * 9999 + '1',
  'brackets': '[' * 9999, 'sum': '1+' * 9999 + '1', 'float': '1e400',
  'tuple': '(' + '9' * 400 + ',)', 'plus': '+' * 9999 + '1',
}  # fmt: skip
NUMBERS = {
  train: 'config.seed config.optimizer.lr config.model.depth '
  'config.phases.0.steps num_processes process_id',
  evaluate: 'step batch_size config.seed',
  analyze: 'rows images',
  export: 'step lengths',
  predict: 'max_pending batches log_every',
  budgets: 'rows',
}


@pytest.mark.parametrize('text', LONG.values(), ids=LONG)
@pytest.mark.parametrize(
  ('command', 'flag'),
  [(command, flag) for command in NUMBERS for flag in NUMBERS[command].split()],
)
def test_a_number_without_end_is_one_line(
  command, flag, text, trained, refused
):
  given = '--config=configs/adatape/parity.py', '--dry_run'
  where = given if command is train else [f'--workdir={trained}']
  more = ['--bundle=x'] if command is export else []
  line = refused(command.main, [*where, *more, f'--{flag}={text}'])
  name = flag.removeprefix('config.')
  assert re.match(rf'error: (--)?(config\.)?{name}: expected', line), line[:200]
  assert len(line) < 2500


def message_of(function, *arguments):
  with pytest.raises(Exception) as caught:
    function(*arguments)
  return str(caught.value)


def test_messages_of_long_values_are_short(tmp_path, capsys):
  long, number = 'a' * 10**6, 10**5000
  messages = []
  for value in (long, number, [number], long.encode(), {'a': long}):
    messages.append(str(errors.ConfigError('field', value, 'a number')))
  for kind in (
    functools.partial(errors.BadRecord, 'a', 'b'), errors.InvalidDataError,
    errors.MissingDataError, command_line.UsageError,
  ):  # fmt: skip
    messages.append(str(kind(long)))
  messages.append(str(errors.ConfigError(long, 1, long)))
  for text in ('1' * 5000, '1' * 400, '1' * 5000 + '.5', f'1, "{long}": 1'):
    path = tmp_path / 'a.json'
    path.write_text(f'{{"{long}": 1, "a": {text}}}')
    messages.append(message_of(files.read_json, path))
  # All of a file without line ends is its header.
  corpora.tokenizer(tmp_path / 'vocabulary', word_rows.VOCABULARY)
  given = word_rows.config(tmp_path / 'data', 'sst2')
  for end in ('\r', '\t'):
    path = tmp_path / 'data' / 'SST-2' / 'train.tsv'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(end.join(f'column{n}' for n in range(9999)))
    messages.append(message_of(word_rows.opened, given))
  assert max(map(len, messages)) < 1500
  with pytest.raises(SystemExit):
    command_line.fail('\x1b' * 10**6)
  assert len(capsys.readouterr().err) < 5000


def test_a_name_twice_in_a_flag_is_refused():
  with pytest.raises(
    errors.ConfigError, match=r'--thresholds\.a: expected one'
  ):
    command_line.parse_fields('--thresholds', 'a=0.5,b=1,a=0.6')


HOSTILE = {
  'dollar': '$0_to_$10', 'mathematics': r'$\frac{$', 'newline': 'a\nb',
  'escape': '\x1b[2J\x1b]0;t\x07', 'nul': 'a\0b', 'surrogate': 'a\udc80',
  'direction': 'a\u202eb', 'backslash': '\\', 'percent': '%s{x}$^_',
  'markup': '[red]a[/red]', 'long': 'a$' * 5000, 'lines': '\n' * 5000,
}  # fmt: skip


@pytest.mark.filterwarnings('ignore:constrained_layout not applied')
def test_names_are_drawn(tmp_path):
  pytest.importorskip('matplotlib')
  from benchmarks import pictures as plots
  from eval_lib import run_plots

  names, name = [*HOSTILE.values()], r'$\frac{$' + '\x1b\n\0\udc80'
  plots.plot_bars(tmp_path / 'bars', {k: {name: 1.0} for k in names}, name)
  points = {k: {k: (1.0, 2.0), 'b': (2.0, 3.0)} for k in names}
  plots.plot_frontier(tmp_path / 'lines', points, name, name)
  columns = {name: [1.0] * len(names), 'x$\0': names}
  columns['lr'] = [10.0**-n for n in range(len(names))]
  run_plots.plot_trials(tmp_path / 'trials', columns, 'max', logs=['lr'])
  plots.plot_examples(tmp_path / 'texts', {name: [(k, k) for k in names]})
  plots.plot_heatmap(tmp_path / 'map', np.ones((2, 2)), name, name)
  assert len([*tmp_path.glob('*.png'), *tmp_path.glob('*.pdf')]) == 10


ACTS = re.compile('[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\udc80]')


@pytest.mark.parametrize('name', HOSTILE.values(), ids=HOSTILE)
def test_a_name_does_not_act_on_the_terminal(name, capsys):
  from eval_lib import report
  from launch import serving
  from train_lib import console

  report.print_table(name, [{name: name}], name)
  serving.log(name)
  rich.print(console._table({name: name}))
  with pytest.raises(SystemExit):
    command_line.fail(name)
  shown = capsys.readouterr()
  assert not ACTS.search(shown.out + shown.err)
  assert files.printable(name) == name or ACTS.search(name)


@pytest.mark.parametrize(
  'point', [{'model.name': 'evil:Model'}, {'x': 'evil:Model'}, {'y': 1}]
)
def test_a_point_of_a_study_names_no_code(point):
  search = pytest.importorskip('launch.search', exc_type=ValueError)
  trial = SimpleNamespace(params=point, user_attrs={'place': 0})
  own = SimpleNamespace(space={'x': ('choice', ('1', '2'))})
  with pytest.raises(command_line.UsageError, match='trial 0 of the study'):
    search.Search.run_of(own, trial)
