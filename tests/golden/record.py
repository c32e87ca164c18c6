"""Records what the program computes, as JSON files.

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
import sys
import tempfile
import zlib
from typing import Any

import jax
import numpy as np

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
ITEMS = 6  # that the engine answers
TIMES = ('seconds', 'share_waiting', 'steps_this_process')


def rounded(values: Any) -> Any:
  """Numbers with nine digits, which is what float32 has; others as they are."""

  def number(digits: str) -> float:
    return float(f'{float(digits):.9g}')

  text = json.dumps(values, default=lambda x: np.asarray(x, float).tolist())
  return json.loads(text, parse_float=number, parse_int=number)


def record_config(
  name: str, folders: dict[str, str], workdir: pathlib.Path
) -> dict[str, Any]:
  """Trains `adapter.STEPS` steps of one config; returns its record."""
  flag, overrides = adapter.configs()[name]
  config = adapter.load(flag, overrides, folders)
  record = record_model(config, name)
  quiet = contextlib.redirect_stdout(io.StringIO())
  with adapter.fixed_parameters(config), quiet:
    result = trainer.train(config, str(workdir))
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  rows = [row for row in map(json.loads, lines) if 'train/loss' in row]
  record['losses'] = rounded([row['train/loss'] for row in rows])
  last = {key: v for key, v in rows[-1].items() if key.startswith('train/')}
  record['last step'] = rounded(last)
  numbers = {k: v for k, v in result.items() if isinstance(v, int | float)}
  for name in [k for k in numbers if k.startswith(TIMES)]:
    del numbers[name]
  return record | {'result': rounded(numbers)}


def record_model(config: Any, name: str) -> dict[str, Any]:
  """Parameters, and what model and engine compute of the first batch."""
  task, batch = adapter.first_batch(config)
  params, state = adapter.initial_parameters(task)
  record: dict[str, Any] = {
    'parameters': adapter.parameter_shapes(params),
    'first batch': {
      key: [str(value.dtype), list(value.shape), zlib.crc32(value.tobytes())]
      for key, value in sorted(batch.items())
    },
  }
  if 'image' in batch:
    shape, rng = batch['image'].shape, np.random.default_rng(0)
    batch['image'] = rng.integers(0, 255, shape, dtype=np.uint8)
  rows = {key: value[:4] for key, value in batch.items()}
  record['rows'] = {
    key: [str(value.dtype), rounded(value)]
    for key, value in rows.items()
    if key != 'image'
  }
  if name in adapter.SERVED:
    items = adapter.items_of(batch)[:ITEMS]
    answers = adapter.answers(task, params, state, name, items)
    record['answers'] = rounded(answers)
  case = task, params, state, jax.tree.map(jax.numpy.asarray, rows)
  loss, norm = adapter.loss_and_gradient(*case)
  arrays = {'costs': adapter.costs(*case), 'logits': adapter.logits(*case)}
  record |= {
    kind: {name: digest(np.asarray(x)) for name, x in values.items()}
    for kind, values in arrays.items()
  }
  return record | rounded({'loss of rows': loss, 'gradient norm': norm})


def digest(values: np.ndarray) -> Any:
  """The values; of more than 64, some and the moments of all."""
  if values.size <= 64:
    return rounded(values)
  flat = values.ravel().astype(np.float64)
  return {
    'shape': list(values.shape),
    'some': rounded(flat[:: -(-flat.size // 32)]),
    'mean': rounded(flat.mean()),
    'rms': rounded(np.sqrt(np.square(flat).mean())),
  }


def main(argv: list[str]) -> None:
  """Writes a JSON file of each config that is asked for."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--out', required=True, type=pathlib.Path)
  parser.add_argument('--only', default='', help='words of names')
  arguments = parser.parse_args(argv)
  arguments.out.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory() as name:
    root = pathlib.Path(name)
    with contextlib.redirect_stdout(io.StringIO()):
      folders = standin.write_all(root)
    for subject in adapter.configs():
      if not any(word in subject for word in arguments.only.split(',')):
        continue
      file = f'{subject.replace(" ", "_")}.json'
      record = record_config(subject, folders, root / 'runs' / file)
      text = json.dumps(record, separators=(',', ':'), ensure_ascii=False)
      (arguments.out / file).write_text(text.replace('],[', '],\n[') + '\n')
      print(subject, flush=True)
      jax.clear_caches()  # gigabytes of programs


if __name__ == '__main__':
  jax.config.update('jax_platforms', 'cpu')
  os.environ['XLA_FLAGS'] = XLA_FLAGS
  main(sys.argv[1:])
