"""Manifests: every kind of damage is found and named."""

import json
import zlib

from train_lib import checkpoint_io


def folder(tmp_path):
  (tmp_path / 'sub').mkdir()
  (tmp_path / 'a').write_bytes(b'first')
  (tmp_path / 'sub' / 'b').write_bytes(b'')
  for name in checkpoint_io.WRITTEN_LATER:
    (tmp_path / name).write_bytes(b'not listed')
  checkpoint_io.finish(tmp_path, {'step': 1})
  return tmp_path


def test_lists_size_and_crc_of_every_file(tmp_path):
  text = (folder(tmp_path) / checkpoint_io.MANIFEST).read_text()
  listed = json.loads(text)['files']
  assert sorted(listed) == ['a', 'checkpoint.json', 'sub/b']
  assert listed['a'] == {'crc32': f'{zlib.crc32(b"first"):08x}', 'size': 5}
  assert listed['sub/b'] == {'crc32': '00000000', 'size': 0}
  for name in (*checkpoint_io.WRITTEN_LATER, 'new'):
    (tmp_path / name).write_bytes(b'changed')
  assert checkpoint_io.verify(tmp_path) == ()


def test_names_every_damaged_file(tmp_path):
  folder(tmp_path)
  (tmp_path / 'a').write_bytes(b'firsT')
  (tmp_path / 'sub' / 'b').unlink()
  first, second = checkpoint_io.verify(tmp_path)
  assert str(tmp_path / 'a') in first
  assert f'{zlib.crc32(b"firsT"):08x}' in first
  assert str(tmp_path / 'sub' / 'b') in second
  assert 'no readable file' in second


def test_every_bit_of_the_manifest_counts(tmp_path):
  path = folder(tmp_path) / checkpoint_io.MANIFEST
  good = path.read_bytes()
  for position in range(len(good)):
    damaged = bytearray(good)
    damaged[position] ^= 1 << position % 8
    path.write_bytes(damaged)
    assert checkpoint_io.verify(tmp_path), position


def test_missing_and_foreign_manifests_are_damage(tmp_path):
  path = folder(tmp_path) / checkpoint_io.MANIFEST
  for text in ('', '[]', '{"files": 3}', '{"files": {"a": 1}}'):
    path.write_text(text)
    assert str(path) in checkpoint_io.verify(tmp_path)[0]
  path.unlink()
  assert 'missing' in checkpoint_io.verify(tmp_path)[0]


def test_a_manifest_with_names_outside_the_folder_is_refused(tmp_path):
  path = folder(tmp_path) / checkpoint_io.MANIFEST
  files = json.loads(path.read_text())['files']
  outside = {f'../{tmp_path.name}/{name}': files[name] for name in files}
  body = json.dumps(outside, sort_keys=True)
  crc = f'{zlib.crc32(body.encode()):08x}'
  path.write_text(json.dumps({'crc32': crc, 'files': outside}, sort_keys=True))
  assert 'differs from the one written' in checkpoint_io.verify(tmp_path)[0]
