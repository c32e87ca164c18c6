"""An ALBERT that halts, from raw text over pretraining to answered lines."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dataset_lib import tokenizer
from launch import command_line, predict
from tests.albert_act import tiny_run
from train_lib import loading, sharding

BAD = {
  3: (b'{"text": ""}', 'text: expected at least one readable token'),
  9: (b'\xff\x00', 'line: expected one JSON value'),
  17: (b'{"text": "w1", "pair": "w2"}', 'pair: expected none'),
  21: (b'{"txt": "w1"}', 'item: expected a text'),
}


def masked_form(run, texts):
  """(probabilities, iterations of each token) by a plain call of the model."""
  task = loading.load_task(run, loading.load_own_config(run))
  mesh = sharding.make_mesh({'data': 1})
  with jax.set_mesh(mesh):
    variables = loading.load_params(run, task, mesh).variables
  rows = tokenizer.load(run / 'tokenizer.json').encode(texts, None, 32)
  tokens = np.zeros((len(texts), 32), np.int32)
  for number, length in enumerate(rows.lengths):
    start = rows.offsets[number]
    tokens[number, :length] = rows.tokens[start : start + length]
  logits, out = jax.jit(task.model.apply)(
    variables, jnp.asarray(tokens), jnp.zeros_like(tokens),
    jnp.asarray(rows.lengths),
  )  # fmt: skip
  steps = np.asarray(out['ponder']['steps'])
  return np.asarray(jax.nn.softmax(logits)), [
    row[:length].tolist()
    for row, length in zip(steps, rows.lengths, strict=True)
  ]


@pytest.mark.slow
def test_from_raw_text_to_answers(tmp_path_factory, repository):
  run = tiny_run.fine_tuned(tmp_path_factory)
  texts = [tiny_run.text(number)[0] for number in range(40)]
  lines = [json.dumps({'text': text}).encode() for text in texts]
  lines[5] = json.dumps(texts[5]).encode()  # just a string
  for number, (line, _) in BAD.items():
    lines[number] = line
  done = subprocess.run(
    [sys.executable, '-m', 'launch.predict', f'--workdir={run}',
     '--lengths=32', '--batches=2', '--serve=iterations=5',
     '--compilation_cache=none'],
    cwd=repository, capture_output=True, input=b'\n'.join(lines), check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr.decode()[-2000:]
  answers = [json.loads(line) for line in done.stdout.splitlines()]
  assert [answer['id'] for answer in answers] == list(range(1, 41))
  shares, steps = masked_form(run, texts)
  # Rows of different lengths and classes, tokens that halt at different times.
  assert np.ptp(shares, 0).min() > 0.005
  assert len({n for row in steps for n in row}) > 2
  for number, answer in enumerate(answers):
    if number in BAD:
      assert set(answer) == {'id', 'error'}
      assert BAD[number][1] in answer['error']
      continue
    found = answer['probabilities']
    assert list(found) == ['negative', 'positive']
    np.testing.assert_allclose(list(found.values()), shares[number], atol=1e-4)
    assert answer['label'] == max(found, key=found.get)
    assert len(answer['tokens']) == len(steps[number])
    assert (answer['tokens'][0], answer['tokens'][-1]) == ('[CLS]', '[SEP]')
    assert answer['token_iterations'] == steps[number]
    assert answer['depth'] == max(steps[number])
    assert answer['iterations'] == pytest.approx(np.mean(steps[number]))
    assert answer['exit_reason'] == (
      'last iteration' if answer['depth'] == 6 else 'all tokens halted'
    )
    assert answer['truncated'] is False
  log = done.stderr.decode().splitlines()
  statistics = json.loads(log[-1])
  assert statistics['answers'] == 40 - len(BAD)
  assert statistics['failures'] == {'encode': len(BAD)}
  assert not any('warning' in line for line in log)


@pytest.mark.nightly
def test_what_cannot_be_served_is_refused_in_one_line(tmp_path_factory, capsys):
  runs = {
    name: tiny_run.made(tmp_path_factory, *arguments)
    for name, arguments in (
      ('glue', ['glue']),
      ('fixed', ['glue', 'fixed']),
      ('pretrain', ['pretrain']),
    )
  }
  for run, flag, words in (
    ('fixed', '', ['model.halting', "'act' or 'straight_through'"]),
    ('pretrain', '', ['task: ', 'Pretraining', 'fine-tuned']),
    ('glue', '--serve=tau=0.9', ['serve.tau', 'iterations']),
    ('glue', '--serve=iterations=0', ['serve.iterations', '[1, ']),
    ('glue', '--thresholds=forum=0.9', ['serve.thresholds', 'forum']),
    ('glue', '--minimum_retention=a=0.5', ['serve.minimum_retention', "'a'"]),
    ('glue', '--lengths=8,64', ['lengths', 'from 1 to 32']),
  ):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
      predict.main([f'--workdir={runs[run]}', *filter(None, [flag])])
    error = capsys.readouterr().err
    assert stop.value.code == command_line.USAGE
    assert len(error.strip().splitlines()) == 1, error
    for word in words:
      assert word in error
    assert not (runs[run] / predict.CACHE).exists()
