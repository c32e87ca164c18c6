"""From a folder of photographs to a certified AdaTape and its page."""

import csv
import json
import shutil

import cv2
import numpy as np
import PIL.Image
import pytest
from matplotlib import figure

from core.errors import ConfigError
from dataset_lib import builder
from eval_lib import certificate
from launch import classify, classify_data, command_line, evaluate
from launch import classify_page as page
from train_lib.run_directory import RunDirectory

STEPS = 40
OVERRIDES = [
  f'--config.{change}'
  for change in (
    'mesh.data=1', 'tensorboard=false', 'loader.num_threads=1', 'batch_size=16',
    'model.depth=2', 'phases.0.epochs=0', f'phases.0.steps={STEPS}',
    'phases.0.least_steps=0', 'optimizer.lr=0.001',
  )
]  # fmt: skip


def write_photos(root, count, seed=0):
  """Writes noisy images of two classes, which differ in brightness."""
  draw = np.random.default_rng(seed)
  for label, name in enumerate(('dark', 'light')):
    (root / name).mkdir(parents=True)
    for number in range(count):
      image = draw.integers(60, size=(40, 48, 3)) + 120 * label
      path = root / name / f'{number}.png'
      assert cv2.imwrite(str(path), image.astype(np.uint8))
  return root


@pytest.mark.nightly
def test_a_folder_becomes_a_certified_tape_and_a_page(tmp_path, capfd):
  photos, out = write_photos(tmp_path / 'photos', 150), tmp_path / 'my out'
  command = [
    str(photos), '--model=adatape', f'--out={out}', '--timed_rows=4',
    '--size=64', *OVERRIDES,
  ]  # fmt: skip
  assert classify.main(command) == 0
  printed = capfd.readouterr().out
  assert f"'--workdir={out}/adaptive' --serve=setting=guaranteed" in printed
  assert f" >> '{out}/measured.txt'\n" in printed
  found = json.loads((out / 'report.json').read_text())
  assert found['rows'] == {'train': 180, 'validation': 60, 'test': 60}
  assert [*found['accuracy']] == [
    'dense',
    'adaptive, as trained',
    'adaptive, as served',
  ]
  assert min(found['accuracy'].values()) > 0.9
  # Of 45 rows: 5 % would need 75.
  assert found['certificate']['rows'] == 45
  assert found['certificate']['epsilon'] == 0.1
  names = {row['candidate'] for row in found['speed']}
  assert {'dense, XLA', 'dense, ONNX Runtime'} <= names
  with (out / 'test_answers.csv').open(newline='') as file:
    rows = [*csv.DictReader(file)]
  served = sum(row['label'] == row['answer'] for row in rows) / len(rows)
  assert served == pytest.approx(found['accuracy']['adaptive, as served'])
  assert all(1 <= int(row['tape_length']) <= 10 for row in rows)
  for name in ('report.png', 'tapes/tape.png'):
    assert (out / name).stat().st_size > 10_000

  assert classify.main(command) == 0  # what is there is not made again
  assert '\n$ ' not in capfd.readouterr().out

  new = write_photos(tmp_path / 'new', 150, seed=1)
  workdir = f'--workdir={out / "adaptive"}'
  evaluate.main([workdir, f'--labelled={new}'])
  again = json.loads((out / 'adaptive/certificate.json').read_text())
  entry = again['sources']['']
  assert entry['rows'] == 300
  assert entry['dataset']['root'] == str(new)
  assert entry['epsilon'] < 0.1  # that of the number of its rows


def flags(data='photos', **others):
  return classify.Flags(data=data, out='out', **others)


@pytest.mark.parametrize(('given', 'words'), [
  (dict(model='adatape', pair='b'), '--pair: expected none with --model=adat'),
  (dict(size=32), '--size: expected none with --model=eat'),
])  # fmt: skip
def test_flags_of_another_kind_of_data_are_refused(given, words):
  with pytest.raises(ConfigError, match=words):
    classify_data.columns(flags(**given))


@pytest.mark.parametrize(('given', 'dense'), [
  ({}, {'model': 'vit', 'variant': 'Ti/16', 'size': '64'}),
  ({'size': 96}, {'model': 'vit', 'variant': 'Ti/16', 'size': '96'}),
  ({'pretrained': 'deit'},  # whose files have the size
   {'model': 'vit', 'pretrained': 'deit', 'finetune': '1'}),
])  # fmt: skip
def test_an_adatape_starts_from_the_dense_run(tmp_path, given, dense):
  runs = classify_data.trainings(flags(model='adatape', **given), tmp_path)
  assert runs['dense'][0] == dense
  assert runs['adaptive'][0] == {
    'model': 'input', 'pretrained': str(tmp_path), 'finetune': '1',
    'certify': '1',
  }  # fmt: skip
  assert 'warm_start.skip=()' in runs['adaptive'][1]  # also from its head


def test_what_an_adatape_cannot_read_is_refused_before_a_training(
  tmp_path, capfd
):
  photos = write_photos(tmp_path / 'photos', 10)
  command = [str(photos), '--model=adatape', f'--out={tmp_path}/out']
  # Of each split at least one; the headers are whole.
  for name in ('dark', 'light'):
    for number in range(9):
      path = photos / name / f'{number}.png'
      path.write_bytes(path.read_bytes()[: -12 - number])
  for more, words in (
    (('--size=32',), '--size: expected 64 or more'),
    ((), 'all splits: 18 of 20 records are bad, tolerated are 0'),
    (('--dry_run',), 'truncated: 18'),
  ):
    with pytest.raises(SystemExit):
      classify.main([*command, *more])
    printed = capfd.readouterr()
    assert words in printed.err
    assert 'training' not in printed.out
  write_photos(tmp_path / 'train', 1)
  given = flags(data=str(tmp_path), model='adatape')
  with pytest.raises(ConfigError, match='data: expected a folder of classes'):
    classify_data.trainings(given, tmp_path)


def test_a_page_shows_photos_upright(tmp_path):
  exif = PIL.Image.Exif()
  exif[0x0112] = 6
  path = tmp_path / 'turned.jpg'
  PIL.Image.new('RGB', (40, 20)).save(path, exif=exif)
  row = {'answer': 'a', 'label': 'a', 'confidence': 1.0, 'tape_length': 1}
  drawn, kind = figure.Figure(), classify_data.KINDS['adatape']
  parts = {'all': [row | {'image': str(path)}], 'wrong': []}
  page._images(drawn, parts, kind)
  assert drawn.subfigs[0].axes[0].images[0].get_size() == (40, 20)


def test_a_photo_more_is_refused_after_a_training(tmp_path, capfd):
  photos, out = write_photos(tmp_path / 'photos', 10), tmp_path / 'out'
  config = f'configs/images.py:data={photos},model=vit'
  config = command_line.load_config(config, ())
  info = builder.build_source(config.dataset, 'train').info
  with RunDirectory(out / 'dense', config.to_dict(), info=info) as run:
    run.write('result.json', {})
  write_photos(photos / 'more', 1)
  (photos / 'more/dark/0.png').rename(photos / 'dark/new.png')
  shutil.rmtree(photos / 'more')
  with pytest.raises(SystemExit):
    classify.main([str(photos), '--model=adatape', f'--out={out}'])
  printed = capfd.readouterr()
  assert 'dense was trained on; restore the data' in printed.err
  assert 'training' not in printed.out


def test_folders_of_images_need_the_model_that_reads_them(tmp_path, capfd):
  photos = write_photos(tmp_path / 'photos', 1)
  (photos / 'labels.csv').write_text('path,label\ndark/0.png,dark')
  for data in (photos, photos / 'labels.csv'):
    with pytest.raises(ConfigError, match='images; add --model=adatape'):
      classify_data.trainings(flags(data=str(data)), tmp_path)
  with pytest.raises(SystemExit) as stopped:
    classify.main([f'{photos}/dark', '--model=adatape', f'--out={tmp_path}/o'])
  printed = capfd.readouterr()
  assert stopped.value.code == 4
  assert 'has no folders of classes; images' in printed.err
  assert 'training' not in printed.out


def test_weights_that_are_not_installed_are_named(tmp_path, capfd, monkeypatch):
  monkeypatch.setattr('model_lib.convert.MINILM', 'no_such_package')
  with pytest.raises(SystemExit) as stopped:
    classify.main([f'{tmp_path}/x.csv', f'--out={tmp_path}/o'])
  assert stopped.value.code == 4
  assert 'no_such_package' in capfd.readouterr().err


def test_what_the_certificate_of_a_tape_says():
  entry = dict(
    risk='accuracy', rows=60, epsilon=0.05, delta=0.1, tau=0.0, early=0.0,
    saved=0.125, model={'threshold': 1.5},
  )  # fmt: skip
  said = 'shorter tapes lose at most 5 points of accuracy against the model as '
  said += (
    'trained (threshold 1.5, certified on 60 rows); this saves 12.5% of its '
  )
  said += 'FLOPs as trained.'
  assert said in certificate.words(entry, 'shorter tapes')
