"""Runs of ALBERT and EAT answer lines."""

import io
import json
import random
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from dataset_lib import tokenizer
from dataset_lib.source import pad_rows
from launch import command_line, predict, serving
from tests.launch import toy_runs

BAD = {
  3: (b'{"text": ""}', 'text: expected at least one readable token'),
  9: (b'\xff\x00', 'line: expected one JSON value'),
  17: (b'{"text": "w1", "pair": "w2"}', 'pair: expected none'),
  21: (b'{"txt": "w1"}', 'item: expected a text'),
}


@pytest.mark.nightly
def test_an_albert_from_raw_text_to_answers(runs):
  run, draw = runs('albert sst2'), random.Random(0)
  texts = [
    ' '.join(draw.choices(toy_runs.WORDS, k=1 + number % 25))
    for number in range(40)
  ]
  lines = [json.dumps({'text': text}).encode() for text in texts]
  lines[5] = json.dumps(texts[5]).encode()  # just a string
  for number, (line, _) in BAD.items():
    lines[number] = line
  source, written = predict.read_lines(io.BytesIO(b'\n'.join(lines))), []
  flags = predict.main.parse([
    f'--workdir={run.folder}', '--compilation_cache=none', '--lengths=32',
    '--batches=2', '--serve=iterations=5',
  ])  # fmt: skip
  with serving.build_engine(flags) as engine:
    predict.answer_all(engine, source, written.append, 8)
  statistics = engine.monitor.snapshot()
  answers = list(map(json.loads, written))
  assert [answer['id'] for answer in answers] == list(range(1, 41))
  assert statistics['answers'] == 40 - len(BAD)
  assert statistics['failures'] == {'encode': len(BAD)}
  # A plain call of the model.
  rows = tokenizer.load(run.folder / 'tokenizer.json').encode(texts, None, 32)
  tokens = pad_rows(np.split(rows.tokens, rows.offsets[1:-1]), (40, 32))
  length = np.asarray(rows.lengths, np.int32)
  batch = {'tokens': tokens, 'token_types': 0 * tokens, 'length': length}
  logits, out = jax.jit(run.task.apply)(run.variables['params'], {}, batch)
  shares = np.asarray(jax.nn.softmax(logits))
  assert np.ptp(shares, 0).min() > 0.001  # rows differ
  every = np.asarray(out['ponder']['steps'])
  assert len(np.unique(every)) > 2  # tokens halt at different times
  for number, answer in enumerate(answers):
    if number in BAD:
      assert set(answer) == {'id', 'error'}
      assert BAD[number][1] in answer['error']
      continue
    steps = every[number, : length[number]]
    found = answer['probabilities']
    assert list(found) == ['negative', 'positive']
    np.testing.assert_allclose([*found.values()], shares[number], atol=1e-4)
    assert answer['label'] == max(found, key=found.get)
    assert (answer['tokens'][0], answer['tokens'][-1]) == ('[CLS]', '[SEP]')
    assert answer['token_iterations'] == steps.tolist()
    assert answer['depth'] == steps.max()


@pytest.mark.slow
def test_train_and_predict(tmp_path):
  """Two-stage training, calibration, then answers to many lines."""
  toy_runs.write_data(tmp_path)
  workdir = tmp_path / 'run'

  def run(module, *flags, **options):
    command = [sys.executable, '-m', f'launch.{module}', *flags]
    done = subprocess.run(command, capture_output=True, check=False, **options)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout, done.stderr.decode()

  changes = [
    *toy_runs.SMALL, 'model.depth=5', 'batch_size=16',
    'dataset.max_length=16', 'dataset.length_buckets=8,16',
  ]  # fmt: skip
  run(
    'train', f'--workdir={workdir}',
    f'--config=configs/eat/glue.py:data={tmp_path},vocabulary={tmp_path},'
    'epochs=2', *(f'--config.{change}' for change in changes),
  )  # fmt: skip
  assert 'dev/accuracy' in json.loads((workdir / 'result.json').read_text())
  assert (workdir / 'calibration.json').is_file()
  # Serving needs neither the data nor the vocabulary.
  for name in ('vocab.txt', 'train.tsv', 'dev.tsv'):
    (tmp_path / name).unlink()
  draw, bad = random.Random(0), {3, 77, 501}
  texts = [
    ' '.join(draw.choices(toy_runs.WORDS, k=draw.randrange(3, 20)))
    for _ in range(600)
  ]
  lines = [json.dumps({'text': text}).encode() for text in texts]
  for number in bad:
    lines[number] = b'\xff\x00'
  out, log = run(
    'predict', f'--workdir={workdir}', '--batches=1,8', '--serve=tau=0.7',
    input=b'\n'.join(lines) + b'\n',
  )  # fmt: skip
  # The parameters that training calibrated are those of its last checkpoint.
  assert 'warning' not in log
  assert 'tests' in json.loads(log.splitlines()[-1])['drift']
  answers = [json.loads(line) for line in out.splitlines()]
  assert [answer['id'] for answer in answers] == list(range(1, 601))
  assert {n for n, answer in enumerate(answers) if 'error' in answer} == bad
  good = [answer for answer in answers if 'error' not in answer]
  assert {answer['depth'] for answer in good} <= {4, 5}
  assert all(answer['retention'] <= 1 for answer in good)
  _interrupt_while_idle(workdir)


def _interrupt_while_idle(workdir):
  """Ctrl-C ends the command though its input stays open."""
  program = (
    'import signal, sys; from launch import predict; '
    # Ignored where the tests run in the background of a shell.
    'signal.signal(signal.SIGINT, signal.default_int_handler); '
    'sys.exit(predict.main(sys.argv[1:]))'
  )
  command = [sys.executable, '-c', program, f'--workdir={workdir}']
  pipes = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.PIPE)
  with subprocess.Popen([*command, '--batches=1'], **pipes) as process:
    try:
      process.stdin.write(b'{"text": "w1"}\n')
      process.stdin.flush()
      assert json.loads(process.stdout.readline())['id'] == 1
      process.send_signal(signal.SIGINT)
      assert process.wait(30.0) == command_line.INTERRUPTED
      assert process.stderr.read().splitlines()[-1] == b'error: interrupted'
    finally:
      process.kill()
