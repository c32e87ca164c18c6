"""Each part of a run's contract, changed, where the run is used.

A user refuses the change (R), maps it (M), or the part is not its concern (.).
"""

import contextlib
import copy
import dataclasses
import json

import numpy as np
import pytest

from core.errors import ConfigError, InvalidDataError
from dataset_lib import builder, contract
from dataset_lib.source import DatasetInfo
from eval_lib import evaluator
from launch import evaluate, export, predict, serve, serving
from serve_lib import bundle
from tests import contexts
from tests.launch.refused import TABLE
from train_lib import build, run_directory, warm_start
from train_lib.distillation import Student
from train_lib.phases import Phase
from train_lib.run_directory import ConfigChangedError, RunDirectory

REFUSALS = ConfigError, InvalidDataError, ConfigChangedError, SystemExit
IMAGES, TEXTS = 'digits vit', 'eat sst2 dense'
NIGHTLY = 'digits input', 'eat sst2', 'albert sst2', 'parity adatape'


@contextlib.contextmanager
def saved(run, info):
  """Writes another contract into the folder of a run, for a while."""
  file = run.folder / run_directory.DATASET_INFO
  before = file.read_text()
  file.write_text(json.dumps(dataclasses.asdict(info)))
  try:
    yield
  finally:
    file.write_text(before)


def resume_on(run, config, info):
  with RunDirectory(run.folder, config.to_dict(), info=info):
    pass


def resume(run, info, patch):
  with saved(run, run.info):
    resume_on(run, run.config, info)


def opened(run, info, patch, kind, **splits):
  """Builds an evaluator on data with another contract."""
  real = builder.build_source

  def build_source(*given, **more):
    source = real(*given, **more)
    rows = source.info.num_examples
    source.info = dataclasses.replace(info, num_examples=rows)
    return source

  patch.setattr(builder, 'build_source', build_source)
  context = contexts.eval_context(run.config.dataset, info=run.info)
  return evaluator.build('x', dict(type=kind, **splits), context)


def evaluate_on(run, info, patch):
  built = opened(run, info, patch, 'classification', split='train')
  data = built.splits['split']
  assert data.info.class_names == run.info.class_names
  batch = next(data.batches())
  raw = [data.source.record(int(row))['label'] for row in batch['index']]
  names = [run.info.class_names[label] for label in batch['label']]
  assert names == [info.class_names[label] for label in raw]
  return 'mapped' if batch['label'].tolist() != raw else None


def few_shot(run, info, patch):
  other = 'validation' if 'sst2' in run.folder.name else 'test'
  opened(run, info, patch, 'fewshot', test_split=other)


def engine_of(command):
  def load(run, info, patch):
    flags = [f'--workdir={run.folder}', '--compilation_cache=none']
    with saved(run, info):
      serving.load_run(command.main.parse(flags))

  return load


def bundled(run, info, patch):
  flags = export.main.parse(
    [f'--workdir={run.folder}', f'--bundle={run.folder}/b', '--batches=1']
  )
  patch.setattr(bundle, 'write', lambda path, *_: path.write_bytes(b'') or 1)
  with saved(run, info):
    export.export_bundle(flags)


def teach(run, info, patch):
  student = Student.__new__(Student)  # without a model
  student.config, student.info = {'loss': {'teacher': str(run.folder)}}, info
  assert student.teacher.task.info == run.info
  if student._class_ids is None:
    return None
  own = student.teacher.task.example()
  given = run.variables['params'], run.variables['model_state'], own
  logits = student.teacher.task.apply(*given)[0]
  mapped = student.teacher_logits(run.variables, own)
  for label, name in enumerate(info.class_names):
    theirs = run.info.class_names.index(name)
    np.testing.assert_array_equal(mapped[:, label], logits[:, theirs])
  return 'mapped'


def begin(run, info, patch, skip=()):
  task = copy.copy(run.task)
  task.info = info
  config = copy.deepcopy(run.config.warm_start).unlock()
  config.workdir, config.skip = str(run.folder), skip
  warm_start._check_source(config, task)


USERS = {
  'resume': resume,
  'evaluate': evaluate_on,
  'few-shot': few_shot,
  'predict': engine_of(predict),
  'serve': engine_of(serve),
  'bundle': bundled,
  'teacher': teach,
  'warm start': begin,
  'without its head': lambda *given: begin(*given, skip=('^(head|exit_)',)),
}
# Of each part the change, the field that is named, and what each user does.
PARTS = {
  'nothing': (lambda info: {}, '', '.........'),
  'a name': (
    lambda info: {'class_names': (*info.class_names[:-1], 'other')},
    'class_names', 'RR.RRRRR.'),
  'order': (
    lambda info: {'class_names': info.class_names[::-1]},
    'class_names', 'RM.RRRMR.'),
  'a class more': (
    lambda info: {'num_classes': info.num_classes + 1,
                  'class_names': (*info.class_names, 'other')},
    'class', 'RR.RRRRR.'),
  'normalisation': (lambda info: {'mean': (0.4,)}, 'mean', 'R..RRRRRR'),
  'size': (
    lambda info: {'input_shape': (2 * info.input_shape[0],
                                  *info.input_shape[1:])},
    'input_shape', 'RRRRRRR..'),
  'resizing': (
    lambda info: {'preprocessing': {**info.preprocessing, 'resize_small': 99}},
    'resize_small', 'R..RRRR..'),
  'tokenizer': (
    lambda info: {'preprocessing': {**info.preprocessing, 'tokenizer': 'x'}},
    'tokenizer', 'RRRRRRRRR'),
  'truncation': (
    lambda info: {
      'preprocessing': {**info.preprocessing, 'truncation_side': 'left'}},
    'truncation_side', 'RRRRRRRRR'),
  'pairs': (
    lambda info: {'token_types': info.token_types and 2},
    'token_types', '.RR...R..'),
  'kind': (
    lambda info: {'label_kind': 'number'}, 'label_kind', 'RRRRRRRR.'),
  'rows': (
    lambda info: {'num_examples': info.num_examples + 1},
    'num_examples', 'R........'),
  'other rows': (lambda info: {'digest': 'x'}, 'digest', 'R........'),
}  # fmt: skip


@pytest.mark.parametrize('part', PARTS)
@pytest.mark.parametrize('family', [IMAGES, TEXTS, *(
  pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY
)])  # fmt: skip
def test_each_part_is_refused_or_mapped(family, part, runs, capsys):
  run, (change, field, expected) = runs(family), PARTS[part]
  of_others = {'resize_small', *contract.TOKENS} - {*run.info.preprocessing}
  of_others |= {'token_types'} if run.info.token_types != 1 else set()
  of_others |= {'digest'} if not run.info.digest else set()
  expected = '.' * len(USERS) if field in of_others else expected
  info = dataclasses.replace(run.info, **change(run.info))
  found = {}
  for name, use in USERS.items():
    with pytest.MonkeyPatch.context() as patch:
      try:
        found[name] = {'mapped': 'M'}.get(use(run, info, patch), '.')
      except REFUSALS as error:
        found[name] = 'R' if field in str(error) else error
  assert found == dict(zip(USERS, expected, strict=True))


@pytest.mark.parametrize('kind', sorted({*evaluator.EVALUATORS} - {'fewshot'}))
def test_no_evaluator_reads_other_classes(kind, runs, monkeypatch, tmp_path):
  run = runs(TEXTS)
  (tmp_path / 'SST-2.tsv').write_text('index\tprediction\n')
  fields = {
    'calibration': {'calibration_split': 'validation[:50%]'},
    'submitted': {'path': str(tmp_path / 'SST-2.tsv')},
  }.get(kind, {})
  info = dataclasses.replace(run.info, class_names=('negative', 'other'))
  with pytest.raises(
    ConfigError, match=r'^evals.x.dataset.class_names: .*other'
  ):
    opened(run, info, monkeypatch, kind, split='validation[50%:]', **fields)


OWN = {'name': 'folder', 'root': '/a', 'image_size': 16, 'resize_small': 40}
PAIRS = {
  'name': 'glue', 'task': 'sst2', 'directory': '/a', 'tokenizer': '/run/t.json',
  'max_length': 48, 'length_buckets': (16,),
}  # fmt: skip


@pytest.mark.parametrize(
  ('run', 'given', 'expected'),
  [
    (OWN, {'name': 'folder', 'root': '/b'}, {'resize_small': 40}),
    (OWN, {'name': 'folder', 'root': '/b', 'resize_small': 0},
     {'resize_small': 0, 'image_size': 16}),
    (OWN, {'name': 'tfds', 'builder': 'cifar10'}, {'resize_small': 40}),
    (OWN, {'name': 'digits'}, {'image_size': 16}),
    # A run on whole images.
    ({'name': 'digits', 'image_size': 16}, {'name': 'folder', 'root': '/b'},
     {'resize_small': 16}),
    (PAIRS, {'name': 'glue', 'task': 'sst2', 'directory': '/b'},
     {'tokenizer': '/run/t.json', 'max_length': 48, 'length_buckets': (16,)}),
    (PAIRS, {'name': 'probing', 'task': 'x', 'directory': '/b',
             'max_length': 16, 'tokenizer': '/mine'},
     {'tokenizer': '/mine', 'max_length': 16}),
  ],
)  # fmt: skip
def test_other_data_are_prepared_as_those_of_the_run(run, given, expected):
  entries = {'x': {'type': 'fewshot', 'dataset': given}}
  complete = evaluator.validate(
    {'dataset': builder.validate(run), 'evals': entries}
  )
  assert complete['x']['dataset'].items() >= expected.items()


def test_what_an_older_run_did_not_save_is_not_compared(runs):
  run = runs(TEXTS)
  new = ('label_kind', 'unlabelled', 'mean', 'std', 'preprocessing')
  old = dataclasses.asdict(run.info)
  for name in (*new, 'steps_per_epoch'):
    del old[name]
  old = DatasetInfo(**old)
  every = *contract.ALL, 'num_examples'
  assert not contract.differences(old, run.info, every)
  contract.check_inputs(old, run.info)
  assert contract.class_ids(old, run.info) is None


@pytest.mark.parametrize(
  ('known', 'names', 'expected'),
  [
    ('abc', 'abc', None), ('abc', 'ab', None), ('abc', 'cb', [2, 1]),
    ('abc', 'cab', [2, 0, 1]), ('', 'abc', None), ('abc', '', None),
    # Equal names decide nothing, unless all are in order.
    ('aab', 'aab', None), ('aab', 'aba', 'class_names'),
    ('abc', 'abd', 'class_names'), ('', 'ab', 'num_classes'),
  ],
)  # fmt: skip
def test_classes_are_matched_by_name(known, names, expected):
  run, data = (
    DatasetInfo('image', (2, 2, 3), 'uint8', len(one) or 3, tuple(one), 5)
    for one in (known, names)
  )
  if isinstance(expected, str):
    with pytest.raises(ConfigError, match=f'^dataset.{expected}: '):
      contract.class_ids(run, data)
    return
  ids = contract.class_ids(run, data)
  assert (ids if ids is None else ids.tolist()) == expected


def test_other_rows_are_allowed_by_a_field_and_keep_the_schedule(runs):
  run = runs(IMAGES)
  config = copy.deepcopy(run.config).unlock()
  config.allow_other_rows = True
  longer = copy.deepcopy(config)
  longer.phases = (Phase(epochs=3.0),)
  fewer = run.info.num_examples - 640
  with saved(run, dataclasses.replace(run.info, num_examples=fewer)):
    setup = build.Setup(longer, str(run.folder))
    assert setup.dataset.steps_per_epoch != 7
    assert setup.total_steps == 7 * 3
    with pytest.raises(ConfigChangedError, match=f'num_examples: .* {fewer}, '):
      resume_on(run, run.config, setup.info)
    resume_on(run, config, setup.info)
    # Later resumes know the new rows, and still the schedule.
    resume_on(run, run.config, setup.info)
    assert run_directory.load_info(run.folder).steps_per_epoch == 7


# -- files of a run that were edited

COMMANDS = {
  'evaluate': (evaluate.main, ()),
  'few-shot': (evaluate.main, ('--evals=fewshot',)),
  'predict': (predict.main, ('--compilation_cache=none',)),
  'export': (export.main, ('--bundle={}/b',)),
}


@pytest.mark.parametrize(('edit', 'words'), TABLE['edited run'])
def test_an_edited_file_is_refused(edit, words, runs, refused):
  kind, file, key, value = edit.split(maxsplit=3)
  folder = runs(IMAGES if kind == 'images' else TEXTS).folder
  before = (folder / file).read_text()
  content = node = json.loads(before)
  *groups, name = (int(k) if k.isdecimal() else k for k in key.split('.'))
  for group in groups:
    node = node[group]
  node[name] = json.loads(value)
  (folder / file).write_text(json.dumps(content))
  try:
    for main, flags in COMMANDS.values():
      given = f'--workdir={folder}', *(flag.format(folder) for flag in flags)
      refused(main, given, words, code=None)
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
