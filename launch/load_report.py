"""A trained EAT and dense models under load: `launch.benchmark serve`.

The rows of the split, with their lengths, are sent as token ids, in turn, to
the EAT and the dense run in the engine, and to the dense run in other
libraries; see `eval_lib.load`.
"""

import contextlib
import functools
import tempfile
from typing import Any

from dataset_lib import builder
from dataset_lib.errors import ConfigError
from eat.serving import EatChain
from eval_lib import adaptive_plots, load, peers, report
from eval_lib.benchmark import Hosts
from model_lib import convert
from serve_lib.chain import doubling
from serve_lib.engine import Engine
from train_lib import loading


def write(flags: Any) -> None:
  """Measures, prints, writes and draws what the flags describe."""
  config, batch = loading.load_config(flags.workdir), flags.batch_size
  split = flags.split or config.evals.get('dev', {}).get('split', 'validation')
  source: Any = builder.build_source(config.dataset.to_dict(), split)
  count, names = min(flags.rows, len(source)), ('tokens', 'token_types')
  records = map(source.record, range(count))
  rows = [{name: record[name] for name in names} for record in records]
  candidates: dict[str, Any] = {}
  with contextlib.ExitStack() as stack:
    for name, flag, options in (
      ('EAT', 'workdir', {'tau': flags.tau}), ('dense', 'dense', {})
    ):  # fmt: skip
      served = loading.serve(getattr(flags, flag), options=options)
      chain, policy, lengths = served
      if not isinstance(chain, EatChain):
        raise ConfigError(f'--{flag}', type(chain).__name__, 'a run of a BERT')
      policy.monitor.drift = None  # it would send rows to full depth
      engine = Engine(
        chain, policy, lengths, doubling(batch), max_pending=10**7
      )
      made = stack.enter_context(engine), rows
      candidates[f'{name}, engine'] = '', lambda made=made: made
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    convert.save_model(folder, chain.model, chain.variables['params'])
    for library in peers.usable(flags.peers):
      name = f'dense, {peers.TITLES[library]}'
      candidates[name] = (
        name,
        functools.partial(load.library_server, library, folder, rows, batch),
      )
    table = load.measure(
      candidates, stack.enter_context(Hosts()), loads=flags.loads,
      seconds=flags.seconds, deadline=flags.deadline_ms / 1e3, rows=len(rows),
    )  # fmt: skip
  report.print_table('under load', table, columns=list(table[0]))
  if flags.out:
    report.write_csv(flags.out, table, {'deadline_ms': flags.deadline_ms})
    with adaptive_plots.if_installed():
      load.draw(flags.out, table)
