"""Steps compiled for TPUs that are not here; skipped without libtpu."""

import importlib.util

import pytest

from dataset_lib.builder import sketch
from launch import command_line
from launch import compile as program
from train_lib import build

HAS_TPU_COMPILER = importlib.util.find_spec('libtpu') is not None
needs_compiler = pytest.mark.skipif(
  not HAS_TPU_COMPILER, reason='libtpu is not installed (extra [tpu])'
)
DIGITS = '--config=configs/adatape/digits.py:model=learn'


@pytest.mark.skipif(HAS_TPU_COMPILER, reason='libtpu is installed')
def test_without_libtpu_the_extra_is_named(refused):
  refused(program.main, [DIGITS], ["pip install -e '.[tpu]'"])


def compiled(topology, *overrides):
  """(plan, program) of the digits."""
  given = [DIGITS, f'--topology={topology}']
  flags = program.main.parse([*given, *(f'--config.{o}' for o in overrides)])
  config = command_line.load_config(flags.config, flags.overrides)
  plan, rows = program.plan_of(config, flags)
  [(_, step, *_)] = program.steps(plan, rows)
  return plan, step


def parameter_bytes(plan):
  import jax

  leaves = jax.tree.leaves(plan.abstract.params)
  return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@needs_compiler
@pytest.mark.nightly
@pytest.mark.parametrize('mesh', ['data', 'fsdp'])
def test_weak_scaling(mesh):
  found = []
  for chips, topology in ((4, 'v5e:2x2'), (16, 'v5e:4x4')):
    sizes = [f'mesh.{name}={chips if name == mesh else 1}' for name in
             ('data', 'fsdp')]  # fmt: skip
    overrides = [*sizes, f'batch_size={8 * chips}', 'model.depth=2']
    plan, one = compiled(topology, *overrides)
    traffic = sum(size for _, size in one.traffic().values())
    found.append((one.flops, traffic))
    if mesh == 'fsdp':
      assert traffic <= 3.1 * parameter_bytes(plan)
  (flops, traffic), (more_flops, more_traffic) = found
  assert more_flops == pytest.approx(flops, rel=0.02)
  if mesh == 'data':
    assert more_traffic == pytest.approx(traffic, rel=0.1)


ADVICE = {
  'mesh.data=8': (
    'blocks.remat=dots', 'mesh.data=1 --config.mesh.fsdp=8', 'num_micro=2',
    'batch_size=32'),
  'mesh.data=2;mesh.fsdp=2;mesh.tensor=2;blocks.scan=True;num_micro=16': (
    'blocks.scan=False', 'blocks.remat=dots', 'mesh.data=1 --config.mesh.fsdp=4'
  ),
  'mesh.fsdp=8;mesh.data=1;blocks.remat=dots;num_micro=8': (
    'blocks.remat=full',),
  'mesh.fsdp=8;mesh.data=1;blocks.remat=full;batch_size=8': (),
}  # fmt: skip


@pytest.mark.parametrize('overrides', ADVICE)
def test_advice_is_legal(overrides):
  """Each change of a run of 64 rows on 8 devices is one that can be run."""
  changes = [DIGITS, '--config.batch_size=64']
  changes += [f'--config.{one}' for one in overrides.split(';')]
  assert tuple(program.advice(plan_here(changes))) == ADVICE[overrides]
  for change in ADVICE[overrides]:
    plan_here([*changes, *f'--config.{change}'.split()])


def plan_here(arguments):
  """The plan of a run on the devices of the tests."""
  flags = program.main.parse(arguments)
  config = command_line.load_config(flags.config, flags.overrides)
  info, _ = sketch(config.dataset, config.train_split, 1, 1)
  return build.Plan(config, info, 1)


@pytest.mark.parametrize(
  ('error', 'words'),
  [
    # Errors of two compilers, shortened.
    ('Ran out of memory in memory space hbm. Used 31.25G of 15.75G hbm. '
     'Exceeded hbm capacity by 15.50G.', '31.25G of 15.75G'),
    ('Ran out of memory on HBM, the total memory required for HLO temporaries '
     '(20.42G) exceeds available HBM (15.75G).', '20.42G of 15.75G'),
    ('RESOURCE_EXHAUSTED: something new', 'RESOURCE_EXHAUSTED: something new'),
  ],
)  # fmt: skip
def test_memory_is_read_from_an_error(error, words):
  assert program.sizes(error) == words


@needs_compiler
@pytest.mark.nightly
def test_the_report(capsys):
  given = [DIGITS, '--topology=v5e:2x2', '--config.model.depth=2']
  with pytest.warns(UserWarning, match="10 'classes' of an activation are"):
    code = program.main([*given, '--config.mesh.tensor=4'])
  assert code == command_line.OK
  out = capsys.readouterr().out
  assert "4 chips as {'data': 1, 'fsdp': 1, 'tensor': 4}" in out
  assert "not split, as they do not divide: ['10 of tensor=4 in head" in out
  for text in ('memory, of 16 GiB', 'all-reduce', 'model_lib/layers.py:'):
    assert text in out


@needs_compiler
@pytest.mark.nightly
def test_too_much_memory_is_refused_with_advice(refused):
  given = DIGITS, '--topology=v5e:2x2', '--config.batch_size=1048576'
  words = '--config.num_micro=2', '--config.mesh.data=1 --config.mesh.fsdp=4'
  more = '--config.model.width=1024'
  refused(program.main, [*given, more], words, command_line.MEMORY)
