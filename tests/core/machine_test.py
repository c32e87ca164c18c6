"""Processors and memory of a process under limits of cgroups."""

import os

import pytest

from core import machine
from dataset_lib import builder


@pytest.mark.parametrize(
  ('member', 'files', 'expected'),
  [
    ('', {}, 64),
    ('0::/', {'cpu.max': 'max 100000'}, 64),
    ('0::/', {'cpu.max': '150000 100000'}, 2),
    ('0::/', {'cpu.max': '1000 100000'}, 1),
    ('0::/', {'cpu.max': 'damaged'}, 64),
    # The quota of a parent counts, and that of a sibling does not.
    ('0::/a/b', {'a/cpu.max': '300000 100000', 'c/cpu.max': '1 100000'}, 3),
    ('0::/host/path', {'cpu.max': '200000 100000'}, 2),
    ('4:cpu,cpuacct:/\n0::/', {'cpu/cpu.cfs_quota_us': '-1',
                               'cpu/cpu.cfs_period_us': '100000'}, 64),
    ('4:cpuacct,cpu:/docker/1\n3:cpuset:/', {
      'cpu/cpu.cfs_quota_us': '400000', 'cpu/cpu.cfs_period_us': '100000'}, 4),
  ],
)  # fmt: skip
def test_quotas_count(monkeypatch, tmp_path, member, files, expected):
  (tmp_path / 'member').write_text(member)
  for name, text in files.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
  monkeypatch.setattr(machine, 'CGROUPS', tmp_path)
  monkeypatch.setattr(machine, 'MEMBERSHIP', tmp_path / 'member')
  monkeypatch.setattr(os, 'sched_getaffinity', lambda _: {*range(64)})
  monkeypatch.setattr(os, 'environ', {})
  monkeypatch.setattr(machine, '_chosen', [])
  assert machine.cores() == expected
  assert builder.default_num_threads() == min(expected, 32)
  machine.use_threads(0)
  limits = {} if expected == 64 else {'PJRT_NPROC': f'{expected}'}
  assert limits.items() <= os.environ.items()
  machine.use_threads(3)  # by a flag
  assert machine.cores() == 3


@pytest.mark.parametrize(
  ('member', 'name', 'text', 'expected'),
  [
    ('', 'memory.max', '4096', 2**40),
    ('0::/a/b', 'a/memory.max', '4096', 4096),
    ('0::/', 'memory.max', 'max', 2**40),
    ('0::/', 'memory.max', f'{2**50}', 2**40),
    ('4:memory:/', 'memory/memory.limit_in_bytes', '4096', 4096),
    ('4:cpu:/', 'memory/memory.limit_in_bytes', '4096', 2**40),
  ],
)
def test_limits_of_memory_count(
  monkeypatch, tmp_path, member, name, text, expected
):
  (tmp_path / 'member').write_text(member)
  (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
  (tmp_path / name).write_text(text)
  monkeypatch.setattr(machine, 'CGROUPS', tmp_path)
  monkeypatch.setattr(machine, 'MEMBERSHIP', tmp_path / 'member')
  monkeypatch.setattr(os, 'sysconf', lambda _: 2**20)
  assert machine.memory() == expected


@pytest.mark.parametrize('case', ['no TPU', 'TPU', 'plugin', 'chosen'])
def test_libtpu_is_skipped_where_there_is_no_tpu(monkeypatch, tmp_path, case):
  (tmp_path / 'libtpu.py').touch()
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setenv('JAX_PLATFORMS', 'tpu' if case == 'chosen' else '')
  (tmp_path / 'accel0').touch()
  files = 'accel*' if case == 'TPU' else 'nothing*'
  monkeypatch.setattr(machine, 'TPU_FILES', (f'{tmp_path}/{files}',))
  if case == 'plugin':  # as of jax-cuda13-plugin
    (tmp_path / 'gpu-1.dist-info').mkdir()
    text = '[jax_plugins]\ngpu = gpu\n'
    (tmp_path / 'gpu-1.dist-info' / 'entry_points.txt').write_text(text)
  machine.skip_absent_tpu()
  expected = {'no TPU': 'cpu', 'chosen': 'tpu'}.get(case, '')
  assert os.environ['JAX_PLATFORMS'] == expected
