"""Runs of all families answer the same from a bundle, without their code."""

import dataclasses
import json
import subprocess
import sys

import flax.linen as nn
import jax
import numpy as np
import PIL.Image
import pytest

from albert_act import compaction, packed_attention
from dataset_lib import builder
from launch import command_line, export, predict, serving
from tests.albert_act import tiny_run as tiny_albert
from tests.launch import toy_runs
from train_lib import build, config_schema
from train_lib.checkpoint import Checkpointer
from train_lib.run_directory import RunDirectory

TEXTS = [' '.join(toy_runs.WORDS[n : 30 : n // 3 + 1]) for n in range(12)]
COMMON = [
  'mesh.data=1', 'tensorboard=false', 'model.width=16', 'model.mlp_dim=16',
  'model.num_heads=2',
]  # fmt: skip
TOKENS = ['model.vocab_size=44', 'model.max_positions=30']
GLUE = 'data={0},vocabulary={0}'
RUNS = {
  'eat': (
    f'eat/glue.py:variant=tiny,model=eat,{GLUE}',
    [*TOKENS, 'model.depth=3', 'model.exit_layers=1,2', 'model.window=4',
     'model.prune_layers=1', 'model.prune_ratios=0.4'],
  ),
  'dense': (f'eat/glue.py:variant=tiny,model=dense,{GLUE}', TOKENS),
  'tape': ('adatape/digits.py:model=input', ['model.query_dim=8']),
}  # fmt: skip
FLAGS = {
  'eat': ['--serve=tau=0.66', '--thresholds=forum=0.55',
          '--minimum_retention=news=0.99'],
  'albert': ['--serve=iterations=3', '--lengths=16'],
}  # fmt: skip


def make(directory, name):
  """The directory of a run with random parameters, so that rows differ."""
  argument, changes = RUNS[name]
  config = command_line.load_config(
    f'configs/{argument.format(directory)}', [*COMMON, *changes]
  )
  if name != 'tape':
    with config.unlocked():
      config.dataset.max_length, config.dataset.length_buckets = 16, (16,)
  config_schema.validate(config)
  info = builder.build_source(config.dataset, 'train').info
  task = build.build_task(config, info)
  draw = np.random.default_rng(0)
  params = jax.tree.map(
    lambda leaf: leaf + 0.3 * draw.standard_normal(leaf.shape).astype('f'),
    nn.unbox(task.init(jax.random.key(0))[0]),
  )
  with RunDirectory(directory / name, config.to_dict()) as run:
    run.write('dataset_info.json', dataclasses.asdict(info))
    task.save_assets(run.workdir)
    if name == 'eat':
      heads = len(task.model.heads())
      drift = {'confidences': [0.5, 0.6, 0.9], 'threshold': 0.6}
      content = {'temperatures': [1.5] * heads, 'drift': drift}
      run.write('calibration.json', content)
  with Checkpointer(directory / name / 'checkpoints') as checkpointer:
    checkpointer.save(4, {'params': params}, {'phase': 0})
  return directory / name


def items(directory, name):
  if name == 'albert':
    return [{'text': tiny_albert.text(number)[0]} for number in range(12)]
  if name != 'tape':
    sources = ('', 'forum', 'news')
    return [{'text': t, 'source': sources[n % 3]} for n, t in enumerate(TEXTS)]
  pixels = np.random.default_rng(1).integers(0, 256, (8, 20, 24, 3), np.uint8)
  for number, image in enumerate(pixels):
    PIL.Image.fromarray(image).save(directory / f'{number}.png')
  return [{'image': f'{directory}/{number}.png'} for number in range(8)]


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


@pytest.mark.slow
def test_all_families_answer_the_same_without_their_code(
  tmp_path, tmp_path_factory, capsys, monkeypatch
):
  # Smaller programs of ALBERT.
  monkeypatch.setattr(compaction, 'SHARES', (0.5, 1.0))
  monkeypatch.setattr(compaction, 'FEW_TOKENS', (8,))
  monkeypatch.setattr(packed_attention, 'SHARES', (1.0,))
  toy_runs.write_data(tmp_path)
  asked, expected = [], {}
  runs = {name: make(tmp_path, name) for name in RUNS}
  runs['albert'] = tiny_albert.made(tmp_path_factory, 'glue')
  for name, run in runs.items():
    path = tmp_path / f'{name}.bundle'
    rows, flags = items(tmp_path, name), ['--batches=2', *FLAGS.get(name, [])]
    given = predict.main.parse(
      [f'--workdir={run}', '--compilation_cache=none', *flags]
    )
    with serving.build_engine(given) as engine:
      expected[name] = [one.as_dict() for one in engine.predict(rows)]
    assert export.main([f'--workdir={run}', f'--bundle={path}', *flags]) == 0
    assert f'step 4, written: {path}, ' in capsys.readouterr().out
    asked.append(json.dumps([str(path), rows]))
  done = subprocess.run(
    [sys.executable, '-c', ASK], input='\n'.join(asked), capture_output=True,
    text=True, check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-2000:]
  lines = done.stdout.splitlines()
  for (name, answers), line in zip(expected.items(), lines, strict=True):
    for answer, want in zip(json.loads(line), answers, strict=True):
      shares = pytest.approx(want.pop('probabilities'), rel=0, abs=1e-5)
      assert answer.pop('probabilities') == shares, name
      assert answer == json.loads(json.dumps(want)), name
  # Rows leave at different depths, by different rules, at different lengths.
  varied = 'eat depth', 'eat retention', 'albert depth', 'tape tape_length'
  for name, field in map(str.split, varied):
    assert len({answer[field] for answer in expected[name]}) > 1


@pytest.mark.parametrize(
  ('main', 'flags', 'words'),
  [
    (predict.main, '', ['--workdir', '--bundle=FILE']),
    (predict.main, '--bundle=/b --workdir=/a', ['--workdir', '--bundle']),
    (predict.main, '--bundle=/b --serve=tau=1', ['--serve', 'determines']),
    (predict.main, '--bundle=/b --batches=3', ['--batches', '(3,)']),
    (predict.main, '--bundle=/b --step=best', ['--step', 'best']),
    (predict.main, '--bundle=README.md', ['README.md: expected a file of']),
    (export.main, '--workdir=/a', ['--out', '--bundle', 'required']),
    (export.main, '--workdir=/a --out=b --bundle=c', ['--out']),
    (export.main, '--workdir=/a --out=b --serve=tau=1', ['--serve']),
    (export.main, '--workdir=/a --bundle=b --dense', ['--dense']),
    (export.main, '--workdir=/a --bundle=/', ['--bundle', 'a file']),
    (export.main, '--workdir=/a --bundle=setup.py/b', ['a directory to']),
  ],
)
def test_wrong_flags_are_answered_in_one_line(main, flags, words, refused):
  codes = [command_line.CHECKPOINT] if 'README' in flags else []
  refused(main, flags.split(), words, *codes)
