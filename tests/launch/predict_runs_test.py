"""Runs of all families answer lines, also from a bundle without their code."""

import json
import pathlib
import random
import signal
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest

from albert_act import compaction, packed_attention
from core import files
from launch import command_line, export, predict, serving
from tests import shell
from tests.launch import toy_runs


@pytest.mark.slow
def test_many_lines_are_answered_in_order(runs):
  draw, bad, workdir = random.Random(0), {3, 77, 501}, runs('eat sst2').folder
  texts = [
    ' '.join(draw.choices(toy_runs.WORDS, k=draw.randrange(3, 20)))
    for _ in range(600)
  ]
  lines = [json.dumps({'text': text}) for text in texts]
  for number in bad:
    lines[number] = '{'
  done = shell.python(
    '-m', 'launch.predict', f'--workdir={workdir}', '--batches=1,8',
    '--serve=tau=0.7', input='\n'.join(lines) + '\n',
  )  # fmt: skip
  assert json.loads(done.stderr.splitlines()[-1])['answers'] == 597
  answers = [json.loads(line) for line in done.stdout.splitlines()]
  assert [answer['line'] for answer in answers] == list(range(1, 601))
  assert {n for n, answer in enumerate(answers) if 'error' in answer} == bad
  good = [answer for answer in answers if 'error' not in answer]
  assert {answer['depth'] for answer in good} <= {1, 2}
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
      assert json.loads(process.stdout.readline())['line'] == 1
      process.send_signal(signal.SIGINT)
      assert process.wait(30.0) == command_line.INTERRUPTED
      assert process.stderr.read().splitlines()[-1] == b'error: interrupted'
    finally:
      process.kill()


# -- from a bundle

FLAGS = {
  'eat sst2': ['--serve=tau=0.9', '--thresholds=forum=0.55',
               '--minimum_retention=news=0.78'],
  'eat sst2 dense': [],
  'albert sst2': ['--serve=iterations=3', '--lengths=16'],
  'digits input': [],
}  # fmt: skip
# Rows leave at different depths, by different rules, at different lengths.
VARIED = (
  ('eat sst2', 'depth'), ('eat sst2', 'retention'), ('albert sst2', 'depth'),
  ('digits input', 'tape_length'),
)  # fmt: skip
ASK = """
import json, sys
from launch import predict, serving

for line in sys.stdin:
  path, items = json.loads(line)
  flags = predict.main.parse([f'--bundle={path}', '--compilation_cache=none'])
  with serving.build_engine(flags) as engine:
    print(json.dumps([answer.as_dict() for answer in engine.predict(items)]))
found = {name.removesuffix('.policy') for name in sys.modules}
families = {'eat', 'albert_act', 'adatape', 'recurrent_act'}
assert {one for one in found if one.partition('.')[0] in families} <= families
assert 'flax' not in found and 'train_lib' not in found, found
"""


def items(directory, name, folders):
  if name == 'digits input':
    pixels = np.random.default_rng(1).integers(0, 256, (8, 20, 24, 3), np.uint8)
    for number, image in enumerate(pixels):
      PIL.Image.fromarray(image).save(directory / f'{number}.png')
    return [{'image': f'{directory}/{number}.png'} for number in range(8)]
  rows = pathlib.Path(folders['glue'], 'sst2', 'dev.tsv').read_text()
  texts = [row.partition('\t')[0] for row in rows.splitlines()[21:33]]
  sources = ('', 'forum', 'news') if name == 'eat sst2' else ('',)
  return [
    {'text': text, 'source': sources[number % len(sources)]}
    for number, text in enumerate(texts)
  ]


@pytest.mark.slow
def test_all_families_answer_the_same_without_their_code(
  runs, folders, tmp_path, capsys, monkeypatch
):
  # Smaller programs of ALBERT.
  monkeypatch.setattr(compaction, 'SHARES', (0.5, 1.0))
  monkeypatch.setattr(compaction, 'FEW_TOKENS', (8,))
  monkeypatch.setattr(packed_attention, 'SHARES', (1.0,))
  asked, expected = [], {}
  for name, flags in FLAGS.items():
    rows = items(tmp_path, name, folders)
    run = runs(name, *['model.rule.epsilon=0.5'] * ('albert' in name))
    if name == 'eat sst2':
      drift = {'confidences': [0.5, 0.6, 0.9], 'threshold': 0.6}
      content = {'temperatures': [1.5] * len(run.task.model.heads())}
      path = run.folder / 'calibration.json'
      files.write_json(path, content | {'drift': drift})
    path, flags = tmp_path / f'{name}.bundle', ['--batches=2', *flags]
    given = predict.main.parse(
      [f'--workdir={run.folder}', '--compilation_cache=none', *flags]
    )
    with serving.build_engine(given) as engine:
      expected[name] = [one.as_dict() for one in engine.predict(rows)]
    flags += f'--workdir={run.folder}', f'--bundle={path}'
    assert export.main(flags) == 0
    assert f'step 1, written: {path}, ' in capsys.readouterr().out
    asked.append(json.dumps([str(path), rows]))
  lines = shell.python('-c', ASK, input='\n'.join(asked)).stdout.splitlines()
  for (name, answers), line in zip(expected.items(), lines, strict=True):
    for answer, want in zip(json.loads(line), answers, strict=True):
      shares = pytest.approx(want.pop('probabilities'), rel=0, abs=1e-5)
      assert answer.pop('probabilities') == shares, name
      assert answer == json.loads(json.dumps(want)), name
  for name, field in VARIED:
    assert len({answer[field] for answer in expected[name]}) > 1


def test_what_is_no_bundle_is_one_line(refused):
  words = ['README.md: expected a file of']
  refused(predict.main, ['--bundle=README.md'], words, command_line.CHECKPOINT)
