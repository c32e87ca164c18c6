"""The command line that prepares corpora."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool

import pytest

from core import files
from dataset_lib import builder
from dataset_lib.corpus import preparation
from launch import command_line, prepare_corpus
from tests import shell
from tests.launch.refused import TABLE

SENTENCES = [f'The cat number {n} sat on mat {n * n}.' for n in range(40)]


@pytest.fixture
def texts(tmp_path):
  folder = tmp_path / 'texts'
  folder.mkdir()
  for name in ('a', 'b', 'c'):
    lines = [f'{" ".join(SENTENCES[n : n + 3])}\n' for n in range(30)]
    (folder / f'{name}.txt').write_text('\n'.join(lines))
  return folder


def run(*flags):
  return prepare_corpus.main(list(flags))


def errors_of(code, capsys, *flags):
  """The lines on stderr of a command that ends with an exit code."""
  with pytest.raises(SystemExit) as stop:
    run(*flags)
  assert stop.value.code == code
  return capsys.readouterr().err.strip().splitlines()


def test_from_texts_to_batches(texts, tmp_path, capsys):
  (texts / 'd.txt').write_bytes(b'Broken \xff byte. And \0 more.\n')
  (texts / 'e.txt').touch()
  out = tmp_path / 'new' / 'out'
  left, killed = out.parent / '.out.abc.tmp', out.parent / '.out.def.tmp'
  for folder in (left, killed):
    folder.mkdir(parents=True)
  held = files.lock_directory(left)  # by a run that goes on
  flags = f'--input={texts}', f'--out={out}', '--vocab_size=50'
  assert run(*flags, '--validation_share=0.1', '--processes=1') == 0
  printed, errors = capsys.readouterr()
  for words in ('documents', 'validation', 'broken bytes', 'd.txt, line 1',
                'empty file', 'left out', f'{out}/faults.jsonl',
                f'written: {out}'):  # fmt: skip
    assert words in printed
  assert 'encoding' in errors
  assert f'note: {left} belongs to another' in errors
  os.close(held)
  assert left.exists()
  assert not killed.exists()
  manifest = json.loads((out / 'corpus.json').read_text())
  assert set(manifest['faults']) == {'broken_bytes', 'nul_bytes', 'empty_file'}
  assert manifest['vocab_size'] == 50
  data = builder.build(
    dict(name='pretraining', directory=str(out)),
    split='train', train=True, seed=0, batch_size=8, num_threads=0,
  )  # fmt: skip
  assert next(data.batches())['tokens'].shape == (8, 128)


def test_a_given_tokenizer_and_validation_at_home(texts, monkeypatch, capsys):
  monkeypatch.setenv('HOME', str(texts))
  first = '--input=~/a.txt,~/b.txt,~/c.txt', '--processes=1', '--max_length=64'
  assert run(*first, '--out=~/one', '--vocab_size=50') == 0
  flags = '--tokenizer=~/one', '--validation=~/b.txt'
  assert run(*first, '--out=~/two', *flags) == 0
  assert 'no faults in the text' in capsys.readouterr().out
  one, two = (
    json.loads((texts / name / 'tokenizer.json').read_text())['model']['vocab']
    for name in ('one', 'two')
  )
  assert [piece for piece, _ in one] == [piece for piece, _ in two]
  counts = json.loads((texts / 'two' / 'corpus.json').read_text())['splits']
  assert counts['validation']['documents'] == 30
  assert counts['train']['documents'] == 60
  flags = '--input=tfds:x', '--out=~/three', '--data_dir=~/tfds'
  assert f'{texts}/tfds' in errors_of(command_line.USAGE, capsys, *flags)[-1]


@pytest.mark.parametrize(('flags', 'words'), TABLE['prepare_corpus usage'])
def test_bad_command_lines_are_answered_in_one_line(
  flags, words, texts, tmp_path, capsys
):
  out = tmp_path / 'out'
  places = {'in': texts, 'out': out, 'good': f'--input={texts} --out={out}'}
  errors = errors_of(
    command_line.USAGE, capsys, *flags.format(**places).split()
  )
  # A bar may stand before the error that only the texts show.
  assert [line.startswith('error: ') for line in errors].count(True) == 1
  assert errors[-1].startswith('error: ')
  assert all(word in errors[-1] for word in words)
  assert [path.name for path in tmp_path.iterdir()] == ['texts']


@pytest.mark.parametrize(('flags', 'words'), TABLE['prepare_corpus data'])
def test_what_is_no_text_or_tokenizer_is_a_data_error(
  flags, words, texts, tmp_path, capsys
):
  (texts / 'notes').mkdir()
  special = '[PAD]\n[UNK]\n[CLS]\n[SEP]\n'
  for name, text in {
    'empty.txt': '', 'notes/note.md': '', 'one.txt': 'a a. A a.',
    'vocab.txt': f'{special}[MASK]\na', 'unmasked.txt': f'{special}a',
  }.items():  # fmt: skip
    (texts / name).write_text(text)
  given = flags.format(**{'in': texts}).split()
  out = f'--out={tmp_path}/out'
  errors = errors_of(command_line.DATA, capsys, *given, out, '--processes=1')
  assert all(word in errors[-1] for word in words)
  assert not (tmp_path / 'out').exists()


@pytest.fixture
def heard():
  """SIGINT as in a terminal: a shell ignores it in what it starts with `&`."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize('stage', ['blocks', 'encoded'])
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
@pytest.mark.usefixtures('heard')
def test_a_stop_leaves_nothing(
  number, stage, texts, tmp_path, monkeypatch, capsys
):
  def stopped(*arguments):
    signal.raise_signal(number)
    raise AssertionError('the signal comes first')
    yield

  monkeypatch.setattr(preparation, stage, stopped)
  flags = f'--input={texts}', f'--out={tmp_path}/out', '--vocab_size=50'
  errors = errors_of(command_line.INTERRUPTED, capsys, *flags)
  assert errors[-1] == 'error: interrupted'
  assert [path.name for path in tmp_path.iterdir()] == ['texts']


@pytest.mark.slow
def test_a_killed_run_leaves_what_the_next_start_removes(texts, tmp_path):
  out, flags = tmp_path / 'out', [f'--input={texts}', '--vocab_size=50']
  command = [sys.executable, '-m', 'launch.prepare_corpus', f'--out={out}']
  process = subprocess.Popen(
    [*command, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
  )
  while not (left := list(tmp_path.glob('.out.*.tmp/out'))):
    assert process.poll() is None
    time.sleep(0.001)
  process.kill()
  process.wait()
  assert left[0].exists()
  assert run(f'--out={out}', *flags, '--processes=1') == 0
  assert {path.name for path in tmp_path.iterdir()} == {'texts', 'out'}


@pytest.mark.parametrize(
  ('error', 'words'),
  [
    (OSError(errno.ENOSPC, 'No space left on device'), '/out: No space left'),
    (OSError(errno.EIO, 'I/O error', 'file'), 'error: file: I/O error'),
    (BrokenProcessPool('a process'), 'error: --processes=3: '),
  ],
)
def test_what_the_machine_lacks_is_one_line(
  error, words, texts, tmp_path, monkeypatch, capsys
):
  def failing(*arguments):
    raise error

  monkeypatch.setattr(preparation, 'encoded', failing)
  flags = f'--input={texts}', f'--out={tmp_path}/out', '--vocab_size=50'
  errors = errors_of(
    prepare_corpus.NOT_WRITTEN, capsys, *flags, '--processes=3'
  )
  assert words in errors[-1]
  assert [path.name for path in tmp_path.iterdir()] == ['texts']


def peak_memory(*flags):
  """MiB that a process took at most to prepare a corpus."""
  measure = """if True:
    import resource, sys
    from launch import prepare_corpus
    prepare_corpus.main(sys.argv[1:])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
  """
  done = shell.python(
    '-c', measure, '--validation_share=0', '--processes=1', *flags,
    env=os.environ | {'TOKENIZERS_PARALLELISM': 'false'},
  )  # fmt: skip
  return int(done.stdout.split()[-1]) / 1024


@pytest.mark.nightly
def test_a_line_of_100_megabytes(texts, tmp_path):
  vocabulary, out = tmp_path / 'vocabulary', tmp_path / 'out'
  run(f'--input={texts}', f'--out={vocabulary}', '--vocab_size=50',
      '--processes=1')  # fmt: skip
  flags = f'--input={texts}', f'--tokenizer={vocabulary}'
  small = peak_memory(*flags, f'--out={tmp_path}/small')
  with (texts / 'long.txt').open('w') as file:
    for unit in ('The cat sat on mats ', 'x'):
      for _ in range(50):
        file.write(unit * (10**6 // len(unit)))
  # A block and its encoding take some memory; the line would take all.
  assert peak_memory(*flags, f'--out={out}') - small < 400
  manifest = json.loads((out / 'corpus.json').read_text())
  assert manifest['faults']['long_line']['count'] == 1
  assert manifest['splits']['train']['characters'] > 0.99e8
  # A sample for the vocabulary takes about 20 bytes for each character.
  # There are few words in it.
  trained = flags[0], f'--out={tmp_path}/trained', '--vocab_size=28'
  assert peak_memory(*trained) - small < 2400
