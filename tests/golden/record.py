"""Records what the program computes and prints, as JSON files.

Run it by its path, in the root of the checkout that is recorded, which may be
another one than this file's:

  PYTHONPATH=. python tests/golden/record.py --out=/tmp/records

`compare.py` prints the differences of two such directories as one table.
"""

import argparse
import contextlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zlib
from typing import Any

import jax
import numpy as np

from launch import train
from train_lib import trainer

if __package__:
  from tests.golden import adapter, standin
else:
  import adapter
  import standin

RECORDS = pathlib.Path(__file__).parent / 'records'
# The same for every recording, or reductions have another order.
XLA_FLAGS = (
  '--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0'
)
TIMES = ('seconds', 'share_waiting', 'steps_this_process')
TEXTS = [
  'w1 w2 w3',
  {'text': 'w4 w5', 'id': 'named'},
  {'text': 'w6 w7 w8 w9', 'source': 'forum'},
  {'text': 'w1', 'pair': 'w2 w3 unknown'},
  {'text': ''},
  {'text': ' '.join(standin.WORDS * 2)},
  'w10 ##a W11',
  {'id': 3},
  17,
  *(' '.join(standin.WORDS[n : 2 * n]) for n in range(2, 20, 3)),
  *({'text': 'w3 w7', 'pair': f'w{n} w{2 * n}'} for n in range(3)),
]


def rounded(values: Any) -> Any:
  """Numbers with nine digits, which is what float32 has."""
  array = np.asarray(values, np.float64)
  if array.ndim:
    return [rounded(item) for item in array]
  return float(f'{float(array):.9g}')


def clean(text: str, *folders: str) -> str:
  """A text without the places of this machine."""
  for folder in (*folders, os.getcwd(), tempfile.gettempdir()):
    text = text.replace(str(folder), '<tmp>')
  return re.sub(r'<tmp>/tmp\w+', '<tmp>', text)


# Runs of each config.


def record_config(
  name: str, folders: dict[str, str], workdir: pathlib.Path
) -> dict[str, Any]:
  """Trains `adapter.STEPS` steps of one config; returns its record."""
  flag, overrides = adapter.configs()[name]
  config = adapter.load(flag, overrides, folders)
  record = record_model(config)
  quiet = contextlib.redirect_stdout(io.StringIO())
  with adapter.fixed_parameters(config), quiet:
    result = trainer.train(config, str(workdir))
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  rows = [row for row in map(json.loads, lines) if 'train/loss' in row]
  record['losses'] = [rounded(row['train/loss']) for row in rows]
  record['last step'] = {
    key: rounded(value)
    for key, value in rows[-1].items()
    if key.startswith('train/')
  }
  record['result'] = {
    key: rounded(value)
    for key, value in result.items()
    if isinstance(value, (int, float)) and not key.startswith(TIMES)
  }
  return record


def record_model(config: Any) -> dict[str, Any]:
  """Parameters, and what the model computes of its first batch."""
  task, batch = adapter.first_batch(config)
  params, state = adapter.initial_parameters(task)
  record: dict[str, Any] = {
    'parameters': adapter.parameter_shapes(params),
    'first batch': {
      key: [str(value.dtype), list(value.shape), zlib.crc32(value.tobytes())]
      for key, value in sorted(batch.items())
    },
  }
  rows = {key: value[:4] for key, value in batch.items()}
  if 'image' in rows:
    rng = np.random.default_rng(0)
    shape = rows['image'].shape
    rows['image'] = rng.integers(0, 255, shape, dtype=np.uint8)
  record['rows'] = {
    key: [str(value.dtype), rounded(value)]
    for key, value in rows.items()
    if key != 'image'
  }
  rows = jax.tree.map(jax.numpy.asarray, rows)
  logits = adapter.logits(task, params, state, rows)
  loss, norm = adapter.loss_and_gradient(task, params, state, rows)
  return record | {
    'logits': {key: digest(np.asarray(v)) for key, v in logits.items()},
    'loss of rows': rounded(loss),
    'gradient norm': rounded(norm),
  }


def digest(values: np.ndarray) -> Any:
  """The values; of more than 64, some and the moments of all."""
  if values.size <= 64:
    return rounded(values)
  flat = values.ravel()
  some = flat[:: -(-flat.size // 32)]
  return {
    'shape': list(values.shape),
    'some': rounded(some),
    'mean': rounded(flat.mean(dtype=np.float64)),
    'rms': rounded(np.sqrt(np.square(flat, dtype=np.float64).mean())),
  }


# Commands.


def call(module: str, arguments: list[str], text: str | None = None) -> Any:
  """Runs a command of launch in a process of its own."""
  return subprocess.run(
    [sys.executable, '-m', f'launch.{module}', *arguments],
    input=text,
    capture_output=True,
    text=True,
    check=False,
    env=os.environ | {'COLUMNS': '80', 'PYTHONPATH': '.'},
  )


def record_answers(workdir: pathlib.Path, serve: str) -> list[Any]:
  """Answers of `launch.predict` to `TEXTS`."""
  lines = '\n'.join(map(json.dumps, TEXTS)) + '\n{"text": \n'
  arguments = [f'--workdir={workdir}', f'--serve={serve}', '--batches=1,2,4']
  done = call('predict', [*arguments, '--compilation_cache=none'], lines)
  if done.returncode:
    raise RuntimeError(done.stderr)
  return [json.loads(line) for line in done.stdout.splitlines()]


def record_help() -> dict[str, Any]:
  """Lines of each command's help page."""
  pages = {}
  for command, *rest in adapter.HELP:
    done = call(command, [*rest, '--help'])
    text = clean(done.stdout if not done.returncode else done.stderr)
    pages[' '.join([command, *rest])] = text.splitlines()
  return pages


def record_errors() -> list[Any]:
  """[arguments, error line] of every bad command line of training."""
  rows = []
  for arguments, _ in json.loads((RECORDS / 'errors.json').read_text()):
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream):
      try:
        workdir = f'--workdir={tempfile.gettempdir()}/refused'
        train.main([workdir, *map(adapter.renamed, arguments)])
        stream.write('accepted')
      except SystemExit as stop:
        stream.write(f' (exit code {stop.code})')
    rows.append([arguments, clean(' '.join(stream.getvalue().split()))])
  return rows


def record_columns(
  root: pathlib.Path, runs: dict[str, pathlib.Path]
) -> dict[str, Any]:
  """Columns of every CSV file that a benchmark writes."""
  columns: dict[str, Any] = {}
  for name, arguments in adapter.BENCHMARKS.items():
    out = root / f'benchmark_{name}'
    out.mkdir()
    places = {key: str(path) for key, path in runs.items()}
    given = [item.format(**places) for item in arguments]
    where = out if name == 'eat' else out / 'rows.csv'
    done = call('benchmark', [*given, f'--out={where}'])
    if done.returncode:
      columns[name] = clean(done.stderr[-400:], str(root))
      continue
    for file in sorted(out.rglob('*.csv')):
      header = file.read_text().splitlines()[0]
      columns[f'{name}: {file.name}'] = header.split(',')
  return columns


def main(argv: list[str]) -> None:
  """Writes one JSON file for each subject that is asked for."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--out', required=True, type=pathlib.Path)
  parser.add_argument('--only', default='', help='words of subjects')
  arguments = parser.parse_args(argv)
  arguments.out.mkdir(parents=True, exist_ok=True)

  def write(subject: str, function: Any, *given: Any) -> None:
    if not any(word in subject for word in arguments.only.split(',')):
      return
    record = function(*given)
    text = json.dumps(record, separators=(',', ':'), ensure_ascii=False)
    path = arguments.out / f'{subject.replace(" ", "_")}.json'
    path.write_text(text.replace('],[', '],\n[') + '\n')
    print(subject, flush=True)

  with tempfile.TemporaryDirectory() as name:
    root = pathlib.Path(name)
    with contextlib.redirect_stdout(io.StringIO()):
      folders = standin.write_all(root)
    runs = {
      subject: root / 'runs' / subject.replace(' ', '_')
      for subject in adapter.configs()
    }
    for subject, run in runs.items():
      write(subject, record_config, subject, folders, run)
    for subject, (config, serve) in adapter.ANSWERS.items():
      if runs[config].is_dir():
        write(f'answers {subject}', record_answers, runs[config], serve)
    write('help', record_help)
    write('errors', record_errors)
    if runs['eat sst2'].is_dir():
      places = {'eat': runs['eat sst2'], 'dense': runs['eat sst2 dense']}
      write('columns', record_columns, root, places)


if __name__ == '__main__':
  jax.config.update('jax_platforms', 'cpu')
  os.environ['JAX_PLATFORMS'] = 'cpu'  # of its commands
  os.environ['XLA_FLAGS'] = XLA_FLAGS
  main(sys.argv[1:])
