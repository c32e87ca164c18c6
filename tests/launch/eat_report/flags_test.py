"""The command line of the report: what is refused, and in which words."""

import argparse

import pytest

from launch import benchmark, command_line
from launch.eat_report import command as eat_report
from launch.eat_report import models


@pytest.mark.slow
@pytest.mark.parametrize(
  ('flags', 'words'),
  [
    (['--time=confidence=0.61'], ['--time', 'confidence=0.61']),
    (['--prune_scales=0,4'], ['--prune_scales', '4']),
    (['--split=validation[:9]', '--limit=3'], ['--limit', 'neither a part']),
  ],
)
def test_flags_that_do_not_fit_the_run(runs, tmp_path, flags, words, capsys):
  with pytest.raises(SystemExit) as stop:
    benchmark.main(
      ['eat', f'--workdir={runs["eat"]}', f'--out={tmp_path}', *flags]
    )
  assert stop.value.code == command_line.USAGE
  message = capsys.readouterr().err.strip()
  assert message.count('\n') == 0
  for word in words:
    assert word in message


@pytest.mark.slow
def test_a_run_on_other_rows_is_refused(runs, tmp_path, capsys):
  other = models.load('x', str(runs['dense']), '', 5, '--dense')
  run = models.load('EAT', str(runs['eat']), '', 0, '--workdir')
  with pytest.raises(ValueError, match='--dense: expected a run on the same'):
    models.check_same_rows(run, other, '--dense')


@pytest.mark.parametrize(
  ('flags', 'words'),
  [
    ([], ['--workdir']),
    (['--workdir=/nowhere', '--out=o'], ['--workdir', 'config.json']),
    (['--workdir=w', '--out=o', '--tau=2'], ['--tau', 'between 0 and 1']),
    (['--workdir=w', '--out=o', '--epsilon=1'], ['--epsilon']),
    (['--workdir=w', '--out=o', '--rows=0'], ['--rows', 'positive integer']),
    (['--workdir=w', '--out=o', '--step=last'], ['--step', 'latest']),
    (['--workdir=w', '--out=o', '--prune_scales=a'], ['--prune_scales']),
    (['--workdir=w', '--out=o', '--ablation=a'], ['--ablation', "'a'"]),
    (['--workdir=w', '--out=o', '--ablation=dense=x'], ['which is taken']),
    (['--workdir=w', '--out=o', '--densee=x'], ['--dense?']),
    (['--workdir=w', f'--out={__file__}'], ['--out', 'is a file']),
  ],
)
def test_bad_command_lines(flags, words, capsys):
  with pytest.raises(SystemExit) as stop:
    benchmark.main(['eat', *flags])
  assert stop.value.code == command_line.USAGE
  message = capsys.readouterr().err.strip()
  assert message.startswith('error: ')
  assert message.count('\n') == 0
  for word in words:
    assert word in message


def test_the_flags_fit_into_another_command():
  parser = argparse.ArgumentParser()
  commands = parser.add_subparsers(dest='command')
  eat_report.add_arguments(commands.add_parser('eat'))
  arguments = parser.parse_args(['eat', '--workdir=w', '--out=o'])
  options = eat_report.check(arguments)
  assert options == {'scales': (0.0, 0.5, 1.0), 'ablation': {}}


@pytest.mark.parametrize('split', ['dev[:9]', 'train+dev', 'dev[:5]+dev[7:]'])
def test_parts_and_sums_have_no_first_rows(split):
  with pytest.raises(command_line.UsageError, match='nor a sum') as error:
    models._limited(split, 3)
  assert repr(split) in str(error.value)
  assert models._limited(split, 0) == split
  assert models._limited('dev', 3) == 'dev[:3]'
