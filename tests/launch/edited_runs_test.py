"""Files of a run that were edited: one line of every command that reads it."""

import json
import re

import pytest

from dataset_lib import builder
from launch import evaluate, export, predict

IMAGES, TEXTS = 'digits vit', 'eat sst2 dense'
COMMANDS = {
  'evaluate': (evaluate.main, ()),
  'few-shot': (evaluate.main, ('--evals=fewshot',)),
  'predict': (predict.main, ('--compilation_cache=none',)),
  'export': (export.main, ('--bundle={}/b',)),
}
# Edits of a run's own files, and what the line names.
EDITS = (
  (IMAGES, 'config.json', 'dataset.image_size', 12,
   'image_size: expected 16, as'),
  (TEXTS, 'config.json', 'dataset.max_length', 8, 'max_length'),
  (TEXTS, 'config.json', 'phases', [], 'phases: expected at least one'),
  (TEXTS, 'tokenizer.json', 'truncation',
   {'direction': 'Left', 'max_length': 9, 'strategy': 'LongestFirst',
    'stride': 0}, 'truncation_side: expected right'),
  (TEXTS, 'tokenizer.json', 'post_processor.single.1.Sequence.type_id', 1,
   'type_id'),
  *((IMAGES, 'config.json', name, value, name) for name, value in {
    'dtype': 0, 'dataset': '', 'model': {}, 'model.extra': 1,
    'model.patch_size': '8', 'model.dropout': 1.5, 'model.pool': 'x',
    'phases.0.model': 0}.items()),
  (IMAGES, 'dataset_info.json', 'mean', [], 'mean'),
  (IMAGES, 'dataset_info.json', 'input_dtype', '', 'input_dtype'),
)  # fmt: skip


@pytest.mark.parametrize(('family', 'file', 'key', 'value', 'words'), EDITS)
def test_an_edited_file_is_refused(
  family, file, key, value, words, runs, refused
):
  folder = runs(family).folder
  before = (folder / file).read_text()
  content = node = json.loads(before)
  *groups, name = (int(k) if k.isdecimal() else k for k in key.split('.'))
  for group in groups:
    node = node[group]
  node[name] = value
  (folder / file).write_text(json.dumps(content))
  try:
    for main, flags in COMMANDS.values():
      given = f'--workdir={folder}', *(flag.format(folder) for flag in flags)
      line = refused(main, given, code=None)
      assert re.search(words, line), line
  finally:
    (folder / file).write_text(before)


@pytest.mark.parametrize(
  ('given', 'expected'),
  [
    ({'name': 'folder', 'root': '/a', 'image_size': 16}, 18),
    ({'name': 'folder', 'root': '/a', 'image_size': 16, 'resize_small': 40},
     40),
    ({'name': 'digits'}, None),
  ],
)  # fmt: skip
def test_a_configuration_says_how_it_prepares_inputs(given, expected):
  found = builder.preprocessing(builder.validate(given))
  assert found.get('resize_small') == expected
