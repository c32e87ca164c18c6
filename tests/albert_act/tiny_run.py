"""Runs of a tiny ALBERT on a made corpus; each once in a process of tests.

Their parameters are chosen so that texts differ and tokens halt at different
times.
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp

from albert_act import published
from albert_act.model import AlbertClassifier, AlbertPretraining
from core import files
from dataset_lib import builder, tokenizer
from halting.token_rules import ACT, Fixed
from launch import command_line
from model_lib import convert
from tests.albert_act import small
from tests.dataset_lib import corpora
from train_lib import build
from train_lib.checkpoint import Checkpointer
from train_lib.phases import Phase
from train_lib.run_directory import RunDirectory

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / 'configs' / 'albert_act'
LENGTH = corpora.MAX_LENGTH
SIZES = small.FIELDS | dict(
  vocab_size=len(corpora.VOCABULARY), max_positions=64
)  # fmt: skip
MODEL = [f'model.{name}={size}' for name, size in SIZES.items()]
OVERRIDES = [
  'mesh.data=1', 'tensorboard=false', 'loader.num_threads=1', 'log_every=1',
  'optimizer.name=adamw', 'optimizer.lr=0.001', 'optimizer.warmup_steps=0',
  'checkpoint.every_steps=0', 'model.classifier_dropout=0.0',
]  # fmt: skip
STEP = 4  # of every run


def load(name, overrides=(), batch=32, **arguments):
  """A configuration of configs/albert_act, without evaluation."""
  text = ','.join(f'{key}={value}' for key, value in arguments.items())
  config = command_line.load_config(
    f'{CONFIGS / name}.py:{text}',
    [f'batch_size={batch}', *OVERRIDES, *overrides],
  )
  with config.unlocked():
    config.phases = (Phase(steps=STEP),)
    config.evals = {}
  return config


def _once(tmp_path_factory, name, make):
  """The directory of this name; `make(directory)` writes it."""
  root = tmp_path_factory.getbasetemp() / 'tiny_albert'
  root.mkdir(exist_ok=True)
  if not (root / name).exists():
    make(root / name)
  return root / name


def corpus(tmp_path_factory):
  """The directory of a prepared corpus."""

  def make(path):
    corpora.prepare(path.parent, corpora.documents(20), name=path.name)

  return _once(tmp_path_factory, 'corpus', make)


def texts(tmp_path_factory):
  """The folder of TSV files of `text`."""

  def make(path):
    path.mkdir()
    rows = ['{}\t{}'.format(*text(number)) for number in range(40)]
    for name in ('train', 'dev'):
      (path / f'{name}.tsv').write_text('\n'.join(['sentence\tlabel', *rows]))

  return _once(tmp_path_factory, 'texts', make)


def text(number):
  """A text of words of the corpus, and its class."""
  words = [f'w{(7 * number + 3 * n) % 50}' for n in range(1 + number % 25)]
  return ' '.join(words), number % 2


def parameters(kind, halting='act'):
  """Random parameters; tokens halt after one to six iterations."""
  rule = Fixed() if halting == 'fixed' else ACT()
  model, variables = small.build(kind, **SIZES, num_classes=2, rule=rule)
  params = jax.tree_util.tree_map_with_path(_livelier, variables['params'])
  if rule.SCORED:
    tokens, types, length = small.batch(
      (16, 12, 9, 5), 16, vocab_size=SIZES['vocab_size']
    )
    if kind is AlbertClassifier:  # of single texts
      types = jnp.zeros_like(types)
    rows = (tokens, types, length)
    params['score'] = small.spread_score(model, {'params': params}, rows, -0.5)
  return params


def _livelier(path, leaf):
  """Random layers, applied again and again, forget what they were given.

  With small biases and sharper attention the logits of texts differ by about
  0.1; with more of it they would differ by more, and rounding errors as well.
  """
  name = jax.tree_util.keystr(path)
  if 'bias' in name:
    return 0.1 * leaf
  return 2.0 * leaf if 'query' in name or 'key' in name else leaf


def _pretraining(tmp_path_factory, halting):
  return load(
    'pretrain', ['loss.ponder_weight=0.0', *MODEL],
    corpus=corpus(tmp_path_factory), variant='micro', length=LENGTH, batch=8,
    halting=halting,
  )  # fmt: skip


def _glue(tmp_path_factory, overrides, **arguments):
  overrides = ['dataset.max_length=32', 'dataset.length_buckets=16', *overrides]
  data = texts(tmp_path_factory)
  return load('glue', overrides, task='sst2', data=data, batch=8, **arguments)


def made(tmp_path_factory, name, halting='act'):
  """The directory of a run 'pretrain' or 'glue' with `parameters`."""
  if name == 'pretrain':
    config, kind = _pretraining(tmp_path_factory, halting), AlbertPretraining
  else:
    words = corpus(tmp_path_factory) / 'tokenizer.json'
    overrides = [*MODEL, f'dataset.tokenizer={words}']
    config = _glue(tmp_path_factory, overrides, halting=halting)
    kind = AlbertClassifier

  def make(path):
    info = builder.build_source(config.dataset, 'train').info
    contract = dataclasses.asdict(info)
    with RunDirectory(path, config.to_dict()) as run:
      run.write('dataset_info.json', contract)
      build.build_task(config, info).save_assets(run.workdir)
    with Checkpointer(path / 'checkpoints') as checkpointer:
      state = {'params': parameters(kind, halting)}
      checkpointer.save(STEP, state, {'phase': 0, 'contract': contract})

  return _once(tmp_path_factory, f'made_{name}_{halting}', make)


def hugging_face(tmp_path_factory):
  """The directory of a Hugging Face ALBERT with the words of the corpus."""

  def make(path):
    words = corpus(tmp_path_factory) / 'tokenizer.json'
    fields = published.ALBERT.defaults | SIZES
    model = AlbertPretraining(rule=Fixed(), **fields)
    params = parameters(AlbertPretraining, 'fixed')
    convert.save_model(path, model, params, tokenizer=words)

  return _once(tmp_path_factory, 'hugging_face', make)


def bare(directory, vocabulary, **arguments):
  """A run that has not begun: its configuration and its tokenizer."""
  directory.mkdir()
  words = [f'dataset.tokenizer={vocabulary}']
  config = load('glue', words, task='sst2', data='/nowhere', **arguments)
  files.write_json(directory / 'config.json', config.to_dict())
  tokenizer.load(vocabulary).save(directory / 'tokenizer.json')
  return directory
