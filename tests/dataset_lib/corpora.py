"""Small corpora, prepared, for the tests of what reads them."""

import numpy as np
import rich.progress

from dataset_lib import builder
from dataset_lib.corpus import preparation

WORDS = [f'w{number}' for number in range(200)]
SPECIAL = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
VOCABULARY = [*SPECIAL, '.', *WORDS, '##a', '##b']

MAX_LENGTH = 32
PRETRAINING_KEYS = {
  'tokens', 'token_types', 'length', 'label', 'mlm_positions', 'mlm_labels',
  'mlm_weights', 'mlm_kind',
}  # fmt: skip


def tokenizer(folder, names=VOCABULARY):
  """The folder of a WordPiece vocabulary."""
  folder.mkdir(exist_ok=True)
  (folder / 'vocab.txt').write_text('\n'.join(names), encoding='utf-8')
  return folder


def sentence(rng, longest):
  words = [
    str(rng.choice(WORDS)) + str(rng.choice(['', '', 'a', 'ab']))
    for _ in range(rng.integers(2, longest + 1))
  ]
  return ' '.join(words) + '.'


def documents(count, seed=0, sentences=20, longest=12):
  """Documents as lists of paragraphs of some sentences."""
  rng = np.random.default_rng(seed)
  result = []
  for _ in range(count):
    paragraphs = []
    for _ in range(max(1, int(rng.integers(1, sentences)) // 4)):
      # The next sentence begins with a digit, so that the full stop ends one.
      size = rng.integers(1, 5)
      paragraph = [f'W{sentence(rng, longest)[1:]}' for _ in range(size)]
      paragraphs.append(' '.join(paragraph))
    result.append(paragraphs)
  return result


def write(folder, texts):
  """One file of documents, with empty lines between them."""
  folder.mkdir(parents=True, exist_ok=True)
  lines = '\n\n'.join('\n'.join(paragraphs) for paragraphs in texts)
  (folder / 'texts.txt').write_text(lines + '\n')
  return folder


def prepare(root, texts, name='out', **options):
  """Prepares documents; returns the directory and its manifest."""
  given = dict(
    input=(str(write(root / 'in', texts)),), out=str(root / name), processes=1,
    tokenizer=str(tokenizer(root / 'vocabulary')), max_length=MAX_LENGTH,
    validation_share=0.1,
  )  # fmt: skip
  bar = rich.progress.Progress(disable=True)
  given = preparation.Options(**given | options)
  return root / name, preparation.prepare(given, bar)


def pretraining_config(directory, **others):
  given = dict(directory=str(directory), max_length=MAX_LENGTH)
  return dict(name='pretraining') | given | others


def pretraining_source(directory, split='train', **others):
  return builder.build_source(pretraining_config(directory, **others), split)


def draw(given, epoch=0, seed=0, indices=None):
  """Rows of one epoch, all of them or those given."""
  indices = np.arange(len(given)) if indices is None else indices
  indices = np.array(indices, np.int64)
  return given.draw(seed, np.full(len(indices), epoch), indices)
