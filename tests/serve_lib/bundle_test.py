"""Bundles of a small chain: what comes back, damage, foreign code."""

import dataclasses
import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from jax import export

from core.errors import ConfigError
from launch import serving
from serve_lib import bundle
from serve_lib import manifest as manifest_lib
from serve_lib.chain import Grid
from serve_lib.decisions import ClassifierPolicy, OneStage
from serve_lib.engine import Engine
from serve_lib.items import TokenReader
from serve_lib.programs import Programs
from tests import wrong_values

DTYPES = {'U8': np.uint8, 'F32': np.float32, 'BF16': jnp.bfloat16}
CLASSES = ('no', 'maybe', 'yes')
ITEMS = np.random.default_rng(0).integers(0, 10, (5, 4)).astype(np.int32)
TABLE = np.random.default_rng(1).normal(size=(10, 3)).astype(np.float32)


def write(path, **fields):
  """Writes the bundle of a table of logits; returns an engine of the same."""
  reader = TokenReader(1, 4, 10)

  def apply(variables, batch):
    return variables['used'][batch['tokens']].mean(1, dtype=jnp.float32)

  table = jnp.asarray(TABLE, jnp.bfloat16)
  chain = OneStage(apply, {'used': table, 'unused': table}, reader)
  fields |= {'warnings': ('careful',)}
  policy = ClassifierPolicy(chain, reader, CLASSES, (1,), **fields)
  programs = Programs(chain, Grid((1,), (1, 4)))
  assert bundle.write(path, programs, policy, {'step': 3}) == 2
  return Engine(chain, policy, (1,), (1, 4))


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  path = tmp_path_factory.mktemp('bundles') / 'new' / 'model.bundle'
  return path, write(path)


def content(path):
  """The arrays of a bundle, in a dict that may be changed."""
  found = safetensors.deserialize(path.read_bytes().partition(b'\n')[2])
  return {
    name: np.frombuffer(one['data'], DTYPES[one['dtype']]).reshape(one['shape'])
    for name, one in found
  }


def of_bytes(text):
  return np.frombuffer(text, np.uint8)


def warm(path):
  """Reads a bundle and compiles its programs."""
  chain, policy, grid = bundle.read(path)
  Programs(chain, grid).compile(progress=False)
  return chain, policy


def refused(path, expected):
  with pytest.raises(bundle.BundleError, match=expected) as caught:
    warm(path)
  assert caught.value.exit_code == 6
  return caught.value


def test_answers_are_equal_and_only_what_is_read_is_stored(written, tmp_path):
  path, engine = written
  chain, policy, grid = bundle.read(path)
  assert policy.warnings == ('careful',)
  manifest = json.loads(bytes(content(path)['manifest.json']))
  assert manifest['about'] == {'step': 3}
  assert [array.dtype for array in chain.variables.values()] == [jnp.bfloat16]
  with Engine(chain, policy, grid.lengths, grid.batches) as other, engine:
    answers, same = (one.predict(ITEMS) for one in (other, engine))
  rows = jnp.asarray(TABLE, jnp.bfloat16)[ITEMS].astype(jnp.float32).mean(1)
  shares = jax.nn.softmax(rows)
  for answer, equal, row in zip(answers, same, shares, strict=True):
    assert answer == equal
    found = list(answer.probabilities.values())
    np.testing.assert_allclose(found, row, atol=1e-6)
  write(tmp_path / 'again')
  assert (tmp_path / 'again').read_bytes() == path.read_bytes()


def test_every_changed_byte_is_refused(written, tmp_path):
  path, changed = written[0], tmp_path / 'changed'
  data = path.read_bytes()
  head = data.index(b'\n') + 1
  places = [*range(head + 40), *range(head, len(data), 97), len(data) - 1]
  for place in places:
    for bit in (1, 32, 128):
      other = bytearray(data)
      other[place] ^= bit
      changed.write_bytes(other)
      with pytest.raises(bundle.BundleError, match='changed: expected'):
        bundle.read(changed)
  for other in (data[:-1], data + b'\0', b'', data[head:]):
    changed.write_bytes(other)
    with pytest.raises(bundle.BundleError, match='changed: expected'):
      bundle.read(changed)
  changed.unlink()
  refused(changed, 'expected a bundle, got')


@pytest.mark.parametrize('as_text', [False, True])
def test_a_program_that_calls_other_code_is_refused(written, tmp_path, as_text):
  shape = jax.ShapeDtypeStruct((2, 2), jnp.float32)
  calling = export.export(jax.jit(jnp.linalg.cholesky))(shape)  # of LAPACK
  code, text = calling.mlir_module_serialized, calling.mlir_module()
  assert 'custom_call' in text
  if as_text:  # in which a name may be written with escapes
    code = text.replace('custom_call', 'custom\\5Fcall').encode()
  changed = dataclasses.replace(calling, mlir_module_serialized=code)
  arrays = content(written[0]) | {'program_0': of_bytes(changed.serialize())}
  bundle._write(tmp_path / 'signed', arrays)
  expected = 'bytecode of' if as_text else 'without custom calls'
  refused(tmp_path / 'signed', expected)


def test_a_policy_of_another_kind_is_not_written(written, tmp_path):
  policy = written[1].policy
  other = type('Other', (ClassifierPolicy,), {})  # needs code of a user
  other = other(policy.chain, policy.reader, CLASSES, (1,))
  with pytest.raises(ConfigError, match=r'policy: .* of an installed'):
    bundle.write(tmp_path / 'new', written[1]._programs, other, {})


@pytest.mark.parametrize(('change', 'words'), [
  (lambda old: {'manifest.json': None}, 'manifest'),
  (lambda old: {'manifest.json': of_bytes(b'{')}, 'JSON'),
  (lambda old: {'manifest.json': of_bytes(b'{}')}, 'manifest.about: expected'),
  (lambda old: {'../evil': of_bytes(b'')}, 'unknown arrays'),
  (lambda old: {'program_1': None}, 'program_1'),
  (lambda old: {'program_0': old['program_0'][:9].copy()}, ''),
  (lambda old: {'program_0': old['program_1']}, 'rows in batches of'),
  (lambda old: {'variables/used': old['variables/used'][:, :2].copy()},
   'the variables it reads'),
])  # fmt: skip
def test_other_arrays_are_refused(written, tmp_path, change, words):
  arrays = content(written[0])
  arrays = {k: v for k, v in (arrays | change(arrays)).items() if v is not None}
  bundle._write(tmp_path / 'signed', arrays)
  refused(tmp_path / 'signed', f'content of a bundle, got .*{words}')


def test_a_program_that_does_not_compile_is_refused(written, tmp_path):
  arrays = content(written[0])
  code = bytes(arrays['program_0']).replace(b'divide_v1', b'divide_v0')
  bundle._write(tmp_path / 'signed', arrays | {'program_0': of_bytes(code)})
  flags = serving.Flags(bundle=str(tmp_path / 'signed'))
  engine = serving.load_engine(flags)
  with pytest.raises(bundle.BundleError, match='cannot be compiled'):
    serving.warm_up(engine, flags)


# Outside of the annotated types, and what these do not say.
PARTS = {
  '': manifest_lib._Manifest, 'chain.': manifest_lib._Chain, 'grid.': Grid,
  'reader.': TokenReader, 'policy.': ClassifierPolicy,
}  # fmt: skip
ILLEGAL = [
  *((part + name, value) for part, kind in PARTS.items()
    for name, value in wrong_values.wrong_fields(kind, manifest_lib.BUILT)),
  ('policy.warnings', [[]]), ('policy.class_names', [None]),
  ('policy.several', 1), ('policy.other', 1), ('policy.lengths', [21]),
  ('policy.temperatures', [1e300]), ('policy.temperatures', [1.0, 1.0]),
  ('policy.certified', {'': 'other'}), ('policy.kind', []),
  ('policy.kind', 'eat.policy:ExitPolicy'), ('policy.kind', 'os:system'),
  ('policy.kind', 'serve_lib.engine:Engine'), ('policy.kind', 'plain'),
  ('reader.kind', 'pickle'), ('reader.kind', []), ('reader.length', 21),
  ('reader.kind', 'os:system'), ('reader.kind', 'serve_lib.items:Reader'),
  ('reader.kind', 'serve_lib.decisions:ClassifierPolicy'),
  ('reader.kind', 'looped.policy:PuzzleReader'), ('reader.puzzle', 1),
  ('chain.variants', [{}]), ('chain.num_stages', 2),
  ('chain.num_stages', 10**9),
  ('chain.loop', {'stage': 1, 'limit': 10**18}),
  ('chain.loop', {'stage': 1, 'limit': 4, 'iterations': -1}),
  ('drift', {'': {}}), ('drift', {'': 7}),
  ('drift', {'': {'confidences': ['x'], 'threshold': 0.5}}),
  ('grid.lengths', [2, 1]), ('grid.batches', [True]), ('grid.batches', [3]),
  ('grid.batches', [*range(1, 9000)]),
  ('variables', {'used': [[], 'float32']}), ('variables', {'used': 7}),
  ('variables', {'used': [9, 'bfloat16']}),
  ('variables', {'used': [0, 'other']}),
  ('programs', []), ('programs', [7, 7]),
  ('programs', [{'read': [0], 'runs': []}] * 2),
]  # fmt: skip


@pytest.mark.parametrize(('place', 'value', 'words'), [
  *((*row, '') for row in ILLEGAL),
  ('policy.class_names', ['a'], 'logits'),
  ('programs.0.read', [], 'program_0: expected'),
  ('about.contract', {'class_names': ('no', 'yes')}, 'class_names: expected'),
  ('about.contract', {'label_kind': 'classes'}, 'several: expected'),
  ('about.contract', {'num_classes': 4}, 'class_names: expected 4, got 3'),
  ('about.contract', 'none', 'AttributeError'),
])  # fmt: skip
def test_another_manifest_is_refused(written, tmp_path, place, value, words):
  arrays = content(written[0])
  manifest = json.loads(bytes(arrays['manifest.json']))
  *groups, name = place.split('.')
  node = manifest
  for key in groups:
    node = node[int(key) if key.isdigit() else key]
  node[name] = value
  arrays['manifest.json'] = of_bytes(json.dumps(manifest).encode())
  bundle._write(tmp_path / 'signed', arrays)
  error = refused(tmp_path / 'signed', f'content of a bundle, got .*{words}')
  assert '\n' not in str(error)
  assert 'ConfigError(' not in str(error)


def test_a_sparse_file_is_not_read(tmp_path):
  path = tmp_path / 'sparse'
  path.write_bytes(bundle.MAGIC + b'0' * 64 + b'\n')
  with path.open('r+b') as file:
    file.truncate(2**33)
  tracemalloc.start()
  refused(path, 'the file was changed or cut off')
  assert tracemalloc.get_traced_memory()[1] < 2**20
  tracemalloc.stop()
