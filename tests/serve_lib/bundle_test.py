"""Bundles of a small chain: what comes back, damage, foreign code."""

import dataclasses
import functools
import io
import json
import math
import re
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from dataset_lib import tokenizer
from dataset_lib.errors import ConfigError
from serve_lib import bundle
from serve_lib.chain import Grid
from serve_lib.decisions import ClassifierPolicy, OneStage
from serve_lib.engine import Engine
from serve_lib.exits import Rule
from serve_lib.items import TextReader, token_rows
from serve_lib.monitor import DriftCheck, Monitor
from serve_lib.policies import ExitOptions, ExitPolicy
from serve_lib.programs import Programs

CLASSES = ('no', 'maybe', 'yes')
ITEMS = np.random.default_rng(0).integers(0, 10, (5, 4)).astype(np.int32)
TABLE = np.random.default_rng(1).normal(size=(10, 3)).astype(np.float32)


def write(path):
  """Writes the bundle of a table of logits; returns an engine of the same."""
  reader = token_rows(4, 10, 1)

  def apply(variables, batch):
    return variables['used'][batch['tokens']].mean(1, dtype=jnp.float32)

  table = jnp.asarray(TABLE, jnp.bfloat16)
  chain = OneStage(apply, {'used': table, 'unused': table}, reader)
  policy = ClassifierPolicy(chain, reader, CLASSES, (1,), warnings=('careful',))
  programs = Programs(chain, Grid((1,), (1, 4)))
  assert bundle.write(path, programs, policy, {'step': 3}) == 2
  return Engine(chain, policy, (1,), (1, 4))


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  path = tmp_path_factory.mktemp('bundles') / 'new' / 'model.bundle'
  return path, write(path)


def content(path):
  """The members of a bundle, in a dict that may be changed."""
  with zipfile.ZipFile(path) as archive:
    return {name: archive.read(name) for name in archive.namelist()}


def warm(path):
  """Reads a bundle and compiles its programs."""
  chain, policy, grid = bundle.read(path)
  Programs(chain, grid).compile(progress=False)
  return chain, policy


def refused(path, expected):
  with pytest.raises(bundle.BundleError, match=expected) as caught:
    warm(path)
  assert caught.value.exit_code == 6


def test_answers_are_equal_and_only_what_is_read_is_stored(written, tmp_path):
  path, engine = written
  chain, policy, grid = bundle.read(path)
  assert policy.warnings == ('careful',)
  assert [array.dtype for array in chain.variables] == [jnp.bfloat16]
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


def calling(path, as_text):
  """The program of a bundle, changed to call Python, and the calls."""
  artifact = content(path)['program_0']
  exported, calls = export.deserialize(bytearray(artifact)), []
  shapes = [*exported.in_avals], [*exported.out_avals]

  @functools.partial(jax.jit, keep_unused=True)
  def run(*arguments):
    return jax.pure_callback(calls.append, shapes[1][0], arguments[-1])

  module = run.lower(*shapes[0]).compiler_ir('stablehlo')
  # Portable StableHLO has no mesh.
  text = re.sub(r', sdy\.sharding = .*?\]>\]>', '', str(module))
  text = re.sub(r'.*sdy\.mesh.*', '', text)
  with module.context:
    module = ir.Module.parse(text)
    code = stablehlo.serialize_portable_artifact(module, '1.0.0')
    if as_text:  # in which a name may be written with escapes
      code = module.operation.get_asm(print_generic_op_form=True)
      assert '"vhlo.custom_call_v1"' in code
      code = code.replace('custom_call', 'custom\\5Fcall').encode()
  changed = dataclasses.replace(exported, mlir_module_serialized=code)
  return bytes(changed.serialize()), calls


@pytest.mark.parametrize('as_text', [False, True])
def test_a_program_that_calls_python_is_refused(written, tmp_path, as_text):
  members = content(written[0])
  members['program_0'], calls = calling(written[0], as_text)
  bundle._write_members(tmp_path / 'signed', members)
  expected = 'bytecode of' if as_text else 'without custom calls'
  refused(tmp_path / 'signed', expected)
  assert not calls


class Other(ClassifierPolicy):
  """A policy of a user, whose code a bundle would need."""


def test_a_policy_of_another_kind_is_not_written(written, tmp_path):
  policy = written[1]._policy
  other = Other(policy.chain, policy.reader, CLASSES, (1,))
  with pytest.raises(ConfigError, match=r'policy: expected .* plain, exits'):
    bundle.write(tmp_path / 'new', written[1]._programs, other, {})


def without(name):
  return lambda members: members.pop(name)


def packed(members):
  """A member that a few bytes expand to."""
  archive = io.BytesIO()
  with zipfile.ZipFile(archive, 'w', zipfile.ZIP_DEFLATED) as file:
    file.writestr('manifest.json', b'0' * 10**6)
  members.clear()
  return archive.getvalue()


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    (without('manifest.json'), 'manifest'),
    (without('program_1'), 'program_1'),
    (lambda members: members.update({'../evil': b''}), 'members'),
    (lambda members: members.update({'manifest.json': b'{'}), 'JSON'),
    (lambda members: members.update({'manifest.json': b'{}'}), 'KeyError'),
    (packed, 'members'),
  ],
)
def test_other_content_is_refused(written, tmp_path, change, words):
  members = content(written[0])
  data = change(members)
  if members:
    bundle._write_members(tmp_path / 'signed', members)
  else:
    (tmp_path / 'signed').write_bytes(bundle._header(data) + data)
  refused(tmp_path / 'signed', f'content of a bundle, got .*{words}')


class Heads:
  """A chain with two heads, one of which sees pruned rows."""

  num_stages, heads, variants = 2, (3, 6), ('pruned', 'unpruned')

  def __init__(self, reader):
    self.variables, self.pad = {'scale': np.float32([2.0])}, reader.pad

  def stage(self, index, variant, length):
    def run(variables, carry):
      total = carry['tokens'].sum(1) if index == 0 else carry
      scaled = total * variables['scale']
      logits = jnp.stack([scaled, -scaled], axis=1)
      return total, {'logits': logits, 'kept': total * 0 + 2}

    return run

  def kept(self, length):
    return 1 + length // 2


def test_a_policy_of_exits_comes_back(tmp_path):
  (tmp_path / 'vocab.txt').write_text('[PAD]\n[UNK]\n[CLS]\n[SEP]\nfilm')
  words = tokenizer.load(tmp_path / 'vocab.txt')
  reader = TextReader(words, 8, 100, 1, 5, padding_tokens=0)
  drift = DriftCheck(np.array([0.5, 0.9]), 0.8)
  policy = ExitPolicy(
    Heads(reader), reader, CLASSES[:2], (4, 8), Rule('margin', 0.3, 3),
    temperatures=(0.1, 1.5), monitor=Monitor(drift=drift),
    options=ExitOptions(0.25, {'a': math.inf}, {'b': 0.9}),
  )  # fmt: skip
  programs, path = (
    Programs(policy.chain, Grid((4, 8), (1,), (2, 8))),
    tmp_path / 'x',
  )
  bundle.write(path, programs, policy, {'calibration.json': {'rows': 3}})
  about = json.loads(content(path)['manifest.json'])['about']
  assert about == {'calibration.json': {'rows': 3}}
  turned = []
  chain, found, grid = bundle.read(path, lambda *given: turned.append(given))
  assert grid == programs.grid
  assert (chain.heads, chain.variants) == (Heads.heads, Heads.variants)
  assert [chain.kept(n) for n in range(1, 9)] == [1, 2, 2, 3, 3, 4, 4, 5]
  for name in ('rule', 'options', 'class_names', 'lengths', 'warnings'):
    assert getattr(found, name) == getattr(policy, name), name
  np.testing.assert_array_equal(found.temperatures, policy.temperatures)
  assert found.temperatures.dtype == np.float32
  again = found.monitor.drift
  assert (again.confidences.tolist(), again.threshold) == ([0.5, 0.9], 0.8)
  assert again.on_drift is not None
  encoded = found.encode({'text': 'film film', 'source': 'b'})
  assert (encoded.variant, encoded.inputs['tokens'].tolist()) == (
    'unpruned', [2, 4, 4, 3]
  )  # fmt: skip
  assert found.reader.recipe == reader.recipe
