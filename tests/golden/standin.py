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
PAIR = 'sentence1', 'sentence2'
GLUE = {
  'cola': (('sentence',), '01'), 'sst2': (('sentence',), '01'),
  'mrpc': (PAIR, '01'), 'qqp': (('question1', 'question2'), '01'),
  'stsb': (PAIR, ('0.5', '2.25', '4.75')),
  'mnli': (('premise', 'hypothesis'), '012'),
  'qnli': (('question', 'sentence'), '01'), 'rte': (PAIR, '01'),
  'wnli': (PAIR, '01'),
}  # fmt: skip
# Labels of probing tasks; the others have numbers.
PROBING = {
  'past_present': ('PAST', 'PRES'), 'subj_number': ('NN', 'NNS'),
  'obj_number': ('NN', 'NNS'), 'tree_depth': '567', 'bigram_shift': 'IO',
  'coordination_inversion': 'IO', 'odd_man_out': 'CO',
  'sentence_length': '012', 'top_constituents': ('NP_VP_.', 'VP_.', 'OTHER'),
  'word_content': ('w1', 'w2', 'w3'),
}  # fmt: skip
ROWS = 48  # of every text task's train split


def write_lines(path: pathlib.Path, lines: list[str]) -> None:
  """Writes a text file, and the folders above it."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text('\n'.join(lines) + '\n')


def sentence(rng, longest: int = 12) -> str:
  return ' '.join(rng.choice(WORDS, rng.integers(2, longest + 1)))


def write_vocabulary(root: pathlib.Path) -> pathlib.Path:
  """Writes vocab.txt; returns the directory, as all functions below."""
  write_lines(root / 'vocabulary/vocab.txt', VOCABULARY)
  return root / 'vocabulary'


def write_glue(root: pathlib.Path) -> pathlib.Path:
  """Writes `<task>/{train,dev}.tsv` with named columns."""
  for number, (task, (columns, labels)) in enumerate(GLUE.items()):
    rng = np.random.default_rng(number)
    for split in ('train', 'dev'):
      lines = ['\t'.join([*columns, 'label'])]
      for row in range(ROWS):
        texts = [sentence(rng) for _ in columns]
        lines.append('\t'.join([*texts, labels[row % len(labels)]]))
      matched = '_matched' if (task, split) == ('mnli', 'dev') else ''
      write_lines(root / 'glue' / task / f'{split}{matched}.tsv', lines)
  return root / 'glue'


def write_tags(root: pathlib.Path) -> pathlib.Path:
  """Writes `{train,dev}.conll` of words and names of persons or places."""
  rng = np.random.default_rng(0)
  for split in ('train', 'dev'):
    lines = []
    for row in range(ROWS):
      kind = ('PER', 'LOC')[row % 2]
      tags = [f'B-{kind}', f'I-{kind}', *'O' * 12]
      words = sentence(rng).split()
      lines += [*map(' '.join, zip(words, tags, strict=False)), '']
    write_lines(root / f'tags/{split}.conll', lines)
  return root / 'tags'


def write_probing(root: pathlib.Path) -> pathlib.Path:
  """Writes SentEval's `<task>.txt`."""
  for number, (task, labels) in enumerate(PROBING.items()):
    rng = np.random.default_rng(number)
    lines = [
      '\t'.join((split, labels[row % len(labels)], sentence(rng)))
      for split, rows in (('tr', ROWS), ('va', 12), ('te', 12))
      for row in range(rows)
    ]
    write_lines(root / f'probing/{task}.txt', lines)
  return root / 'probing'


def write_own(root: pathlib.Path) -> pathlib.Path:
  """Writes the rows of past_present as `{train,validation,test}.tsv`.

  The column 'size' is of a second task; every third row has no such label.
  """
  lines = (write_probing(root) / 'past_present.txt').read_text().splitlines()
  for split in ('train', 'validation', 'test'):
    rows = [x.split('\t', 1)[1] for x in lines if x.startswith(split[:2])]
    rows = [
      row + '\t' + ('', 'long', 'short')[n % 3] for n, row in enumerate(rows)
    ]
    write_lines(root / f'own/{split}.tsv', ['label\tsentence\tsize', *rows])
  return root / 'own'


def write_texts(root: pathlib.Path, documents: int = 20) -> pathlib.Path:
  """Writes a file of documents with empty lines between them."""
  rng = np.random.default_rng(0)
  texts = []
  for _ in range(documents):
    paragraphs = [
      ' '.join(f'W{sentence(rng)[1:]}.' for _ in range(rng.integers(1, 5)))
      for _ in range(rng.integers(1, 5))
    ]
    texts += [*paragraphs, '']
  write_lines(root / 'texts/texts.txt', texts[:-1])
  return root / 'texts'


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


def write_sudoku(root: pathlib.Path) -> pathlib.Path:
  """Writes train.csv and test.csv of one grid with other digits."""
  from looped.sudoku import Sudoku  # after the import hook

  rows, columns = np.indices((9, 9))
  grid = (3 * rows + rows // 3 + columns).ravel() % 9
  rng = np.random.default_rng(0)
  for split in ('train', 'test'):
    lines = ['source,question,answer,rating']
    for number in range(16):
      answer = 1 + rng.permutation(9)[grid]
      solutions = [None] * 2
      while len(solutions) > 1:
        question = np.where(rng.random(81) < 0.6, answer, 0)
        solutions, _ = Sudoku().solutions(np.int32(question + 1))
      pair = (''.join(map(str, x)) for x in (question, answer))
      lines.append(','.join(['standin', *pair, str(number)]))
    write_lines(root / f'sudoku/{split}.csv', lines)
  return root / 'sudoku'


def prepare_corpus(root: pathlib.Path) -> pathlib.Path:
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
  writers = dict(
    vocabulary=write_vocabulary, glue=write_glue, probing=write_probing,
    own=write_own, tags=write_tags, images=write_images, records=write_records,
    sudoku=write_sudoku, corpus=prepare_corpus,
  )  # fmt: skip
  return {name: str(write(root)) for name, write in writers.items()}
