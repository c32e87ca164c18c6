"""A trained EAT and dense models under load as it comes.

  python -m benchmarks.serve --workdir=/tmp/sst2_eat --dense=/tmp/sst2

The rows of the split, with their lengths, are sent as token ids, in turn, to
the EAT and the dense run in the engine, and to the dense run in other
libraries; see `benchmarks.load`.
"""

import contextlib
import dataclasses
import functools
import sys
import tempfile
from typing import Any

from benchmarks import command, load, peers, recorded_runs
from benchmarks.timing import Hosts
from dataset_lib.fields import flag
from eval_lib import adaptive_plots, report
from launch.command_line import Positive, Sizes
from model_lib import convert


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(command.Served):
  """Flags of this command."""

  workdir: str = flag('a run of an EAT', metavar='DIRECTORY')
  dense: str = flag('a dense run on the same data', metavar='DIRECTORY')
  out: command.File = flag(
    'writes the rows here, a picture beside it', '', 'FILE.csv'
  )
  split: str = flag("split; default: that of the run's evaluation dev", '')
  rows: Positive = flag('first rows of the split to send, in turn', 1000)
  loads: Sizes = flag('% of capacity', (10, 30, 50, 70, 80, 90, 100, 110, 120))
  seconds: command.Seconds = flag('of each measurement', 10.0)
  deadline_ms: command.Seconds = flag('of the goodput', 200.0, 'MILLISECONDS')


def write(flags: Any) -> None:
  """Measures, prints, writes and draws what the flags describe."""
  given: dict[str, Any] = {'split': flags.split, 'limit': flags.rows}
  given['lengths'] = flags.lengths
  servers: dict[str, Any] = {}
  rows: list[Any] = []
  with contextlib.ExitStack() as stack:
    for name, flag, options in (
      ('EAT', 'workdir', {'tau': flags.tau}), ('dense', 'dense', {})
    ):  # fmt: skip
      given['serve'], directory = options, getattr(flags, flag)
      run = recorded_runs.load(name, directory, given, f'--{flag}', None)
      run.policy.monitor.drift = None  # it would send rows to full depth
      rows = rows or run.items(range(len(run.fitted)))
      submit = stack.enter_context(run.start(flags.batch_size)).submit
      offer = functools.partial(load.offer, submit, rows)
      servers[f'{name}, engine'] = '', offer
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    params = run.policy.chain.variables['params']
    convert.save_model(folder, run.module, params)
    for library in peers.usable(flags.peers):
      name = f'dense, {peers.TITLES[library]}'
      server = functools.partial(load.offer_library, library, folder)
      offer = functools.partial(server, flags.batch_size, rows)
      servers[name] = name, offer
    table = load.measure(
      servers, stack.enter_context(Hosts()), loads=flags.loads, rows=len(rows),
      seconds=flags.seconds, deadline=flags.deadline_ms / 1e3,
    )  # fmt: skip
  report.print_table('under load', table, columns=list(table[0]))
  if flags.out:
    report.write_csv(flags.out, table, {'deadline_ms': flags.deadline_ms})
    with adaptive_plots.if_installed():
      load.draw(flags.out, table)


main = command.reporting('serve', __doc__, Flags, write)

if __name__ == '__main__':
  # Guard for spawned processes, which import this module again.
  sys.exit(main())
