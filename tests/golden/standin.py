"""Small data sets for golden records and contract tests, written to a folder.

Everything is a function of fixed seeds, and nothing of the program is used but
the command that prepares a corpus.
"""

import pathlib

import numpy as np

SPECIAL = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
WORDS = [f'w{number}' for number in range(40)]
VOCABULARY = [*SPECIAL, '.', '##a', *WORDS]

# Columns of each GLUE task, and its labels.
GLUE = {
  'cola': (('sentence',), ('0', '1')),
  'sst2': (('sentence',), ('0', '1')),
  'mrpc': (('sentence1', 'sentence2'), ('0', '1')),
  'qqp': (('question1', 'question2'), ('0', '1')),
  'stsb': (('sentence1', 'sentence2'), ('0.5', '2.25', '4.75')),
  'mnli': (('premise', 'hypothesis'), ('0', '1', '2')),
  'qnli': (('question', 'sentence'), ('0', '1')),
  'rte': (('sentence1', 'sentence2'), ('0', '1')),
  'wnli': (('sentence1', 'sentence2'), ('0', '1')),
}
# Labels of probing tasks; the others have numbers.
PROBING = {
  'past_present': ('PAST', 'PRES'),
  'subj_number': ('NN', 'NNS'),
  'obj_number': ('NN', 'NNS'),
  'tree_depth': ('5', '6', '7'),
  'bigram_shift': ('I', 'O'),
  'coordination_inversion': ('I', 'O'),
  'odd_man_out': ('C', 'O'),
  'sentence_length': ('0', '1', '2'),
  'top_constituents': ('NP_VP_.', 'VP_.', 'OTHER'),
  'word_content': ('w1', 'w2', 'w3'),
}
ROWS = 48  # of every text task's train split


def sentence(rng, longest: int = 12) -> str:
  """A sentence of random words."""
  return ' '.join(rng.choice(WORDS, rng.integers(2, longest + 1)))


def write_vocabulary(root: pathlib.Path) -> pathlib.Path:
  """Writes vocab.txt; returns the directory."""
  folder = root / 'vocabulary'
  folder.mkdir(parents=True)
  (folder / 'vocab.txt').write_text('\n'.join(VOCABULARY) + '\n')
  return folder


def write_glue(root: pathlib.Path) -> pathlib.Path:
  """Writes `<task>/{train,dev}.tsv` with named columns."""
  folder = root / 'glue'
  for number, (task, (columns, labels)) in enumerate(GLUE.items()):
    rng = np.random.default_rng(number)
    (folder / task).mkdir(parents=True)
    for split in ('train', 'dev'):
      lines = ['\t'.join([*columns, 'label'])]
      for row in range(ROWS):
        texts = [sentence(rng) for _ in columns]
        lines.append('\t'.join([*texts, labels[row % len(labels)]]))
      matched = '_matched' if (task, split) == ('mnli', 'dev') else ''
      file = folder / task / f'{split}{matched}.tsv'
      file.write_text('\n'.join(lines) + '\n')
  return folder


def write_tags(root: pathlib.Path) -> pathlib.Path:
  """Writes `{train,dev}.conll` of words and names of persons or places."""
  folder, rng = root / 'tags', np.random.default_rng(0)
  folder.mkdir(parents=True)
  for split in ('train', 'dev'):
    lines = []
    for row in range(ROWS):
      kind = ('PER', 'LOC')[row % 2]
      tags = [f'B-{kind}', f'I-{kind}', *'O' * 12]
      words = sentence(rng).split()
      lines += [*map(' '.join, zip(words, tags, strict=False)), '']
    (folder / f'{split}.conll').write_text('\n'.join(lines) + '\n')
  return folder


def write_probing(root: pathlib.Path) -> pathlib.Path:
  """Writes SentEval's `<task>.txt`."""
  folder = root / 'probing'
  folder.mkdir(parents=True)
  for number, (task, labels) in enumerate(PROBING.items()):
    rng = np.random.default_rng(number)
    lines = []
    for split, rows in (('tr', ROWS), ('va', 12), ('te', 12)):
      for row in range(rows):
        fields = (split, labels[row % len(labels)], sentence(rng))
        lines.append('\t'.join(fields))
    (folder / f'{task}.txt').write_text('\n'.join(lines) + '\n')
  return folder


def write_texts(root: pathlib.Path, documents: int = 20) -> pathlib.Path:
  """Writes a file of documents with empty lines between them."""
  rng = np.random.default_rng(0)
  texts = []
  for _ in range(documents):
    paragraphs = [
      ' '.join(f'W{sentence(rng)[1:]}.' for _ in range(rng.integers(1, 5)))
      for _ in range(rng.integers(1, 5))
    ]
    texts.append('\n'.join(paragraphs))
  folder = root / 'texts'
  folder.mkdir(parents=True)
  (folder / 'texts.txt').write_text('\n\n'.join(texts) + '\n')
  return folder


def write_images(root: pathlib.Path) -> pathlib.Path:
  """Writes `<split>/<class>/<number>.jpg` of random pixels."""
  import cv2

  folder, rng = root / 'images', np.random.default_rng(0)
  for split in ('train', 'test'):
    for name in ('cat', 'dog'):
      (folder / split / name).mkdir(parents=True)
      for number in range(8):
        image = rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / split / name / f'{number}.jpg'), image)
  return folder


def write_records(root: pathlib.Path) -> pathlib.Path:
  """Writes `<split>-*.tfrecord` of images with one or two of 5 labels."""
  from tests.dataset_lib import example_files

  folder = root / 'records'
  for split, rows in (('train', 16), ('validation', 8)):
    records = [
      example_files.example(example_files.jpeg(15 * n), [n % 4, 4][: 1 + n % 2])
      for n in range(rows)
    ]
    example_files.write(folder / f'{split}-00000-of-00001.tfrecord', records)
  return folder


def prepare_corpus(root: pathlib.Path) -> pathlib.Path:
  """Prepares the corpus of `write_texts`."""
  from launch import prepare_corpus as command

  vocabulary, texts = root / 'vocabulary', write_texts(root)
  out = root / 'corpus'
  code = command.main([
    f'--input={texts}', f'--out={out}', f'--tokenizer={vocabulary}',
    '--max_length=32', '--validation_share=0.1', '--processes=1',
  ])  # fmt: skip
  assert code == 0
  return out


def write_all(root: pathlib.Path) -> dict[str, str]:
  """Writes every data set; returns the directories by the names in flags."""
  return {
    'vocabulary': str(write_vocabulary(root)),
    'glue': str(write_glue(root)),
    'probing': str(write_probing(root)),
    'tags': str(write_tags(root)),
    'images': str(write_images(root)),
    'records': str(write_records(root)),
    'corpus': str(prepare_corpus(root)),
  }
