"""Manifests: every kind of damage is found and named."""

import json
import zlib

from train_lib import manifest


def _folder(tmp_path):
  (tmp_path / 'sub').mkdir()
  (tmp_path / 'a').write_bytes(b'first')
  (tmp_path / 'sub' / 'b').write_bytes(b'')
  (tmp_path / 'later').write_bytes(b'not listed')
  manifest.write(tmp_path, exclude=('later',))
  return tmp_path


def test_lists_size_and_crc_of_every_file(tmp_path):
  text = (_folder(tmp_path) / manifest.NAME).read_text()
  crc = f'{zlib.crc32(b"first"):08x}'
  assert json.loads(text)['files'] == {
    'a': {'crc32': crc, 'size': 5},
    'sub/b': {'crc32': '00000000', 'size': 0},
  }
  assert manifest.verify(tmp_path) == ()


def test_excluded_and_new_files_are_not_looked_at(tmp_path):
  folder = _folder(tmp_path)
  (folder / 'later').write_bytes(b'changed')
  (folder / 'new').write_bytes(b'')
  assert manifest.verify(folder) == ()


def test_names_every_damaged_file(tmp_path):
  folder = _folder(tmp_path)
  (folder / 'a').write_bytes(b'firsT')
  (folder / 'sub' / 'b').unlink()
  first, second = manifest.verify(folder)
  assert str(folder / 'a') in first
  assert f'{zlib.crc32(b"firsT"):08x}' in first
  assert str(folder / 'sub' / 'b') in second
  assert 'no readable file' in second


def test_every_bit_of_the_manifest_counts(tmp_path):
  path = _folder(tmp_path) / manifest.NAME
  good = path.read_bytes()
  for position in range(len(good)):
    for bit in range(8):
      damaged = bytearray(good)
      damaged[position] ^= 1 << bit
      path.write_bytes(damaged)
      assert manifest.verify(tmp_path), (position, bit)
  path.write_bytes(good)
  assert not manifest.verify(tmp_path)


def test_missing_and_foreign_manifests_are_damage(tmp_path):
  folder = _folder(tmp_path)
  path = folder / manifest.NAME
  for text in ('', '[]', '{"files": 3}', '{"files": {"a": 1}}'):
    path.write_text(text)
    assert str(path) in manifest.verify(folder)[0]
  path.unlink()
  assert 'missing' in manifest.verify(folder)[0]


def test_names_that_lead_out_of_the_folder_are_not_read(tmp_path):
  folder = _folder(tmp_path)
  (tmp_path / 'sub' / 'x').write_bytes(b'')
  outside = {'../a': {'crc32': f'{zlib.crc32(b"first"):08x}', 'size': 5}}
  inner = folder / 'sub'
  (inner / manifest.NAME).write_text(manifest._encode(outside))
  assert 'not what was written' in manifest.verify(inner)[0]
