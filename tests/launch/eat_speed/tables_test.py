"""The arithmetic of the speed table, against numbers by hand."""

import numpy as np
import pytest
import rich.console

from eval_lib.timing import Estimate
from launch.eat_speed import lineup, tables
from launch.eat_speed.lineup import Settings

SETTINGS = Settings(batches=(4,), groups=('dense', 'eat', 'torch'))


def table(samples, settings=SETTINGS):
  contenders = lineup.contenders(settings)
  samples = {
    (name, 4): np.array(values, np.float64) for name, values in samples.items()
  }
  devices = dict.fromkeys([name for name, _ in samples], 'cpu')
  rows = tables.rows(contenders, samples, settings, devices)
  return {row.contender: row for row in rows}


SAMPLES = {
  # The best by median, though not in every round.
  'dense scanned': [0.2, 0.4, 0.2],
  'dense unrolled': [0.3, 0.3, 0.3],
  'EAT 0 %': [0.1, 0.4, 0.1],
  'EAT 95 %': [0.05, 0.1, 0.1],
  'PyTorch BERT': [0.1, 0.2, 0.3],
}


def test_ratios_are_within_rounds_against_the_best_dense():
  rows = table(SAMPLES)
  assert list(rows) == [  # the order of the table, whoever is there
    'dense unrolled', 'dense scanned', 'EAT 0 %', 'EAT 95 %', 'PyTorch BERT',
  ]  # fmt: skip
  assert [row.is_best_dense for row in rows.values()] == [0, 1, 0, 0, 0]
  assert rows['dense scanned'].speedup == Estimate(1.0, 1.0, 1.0)
  # 2, 1, 2 and 4, 4, 2; a ratio of medians would be 2 and 2.
  assert rows['EAT 0 %'].speedup.median == pytest.approx(2.0)
  assert rows['EAT 0 %'].speedup.low == pytest.approx(1.5)
  assert rows['EAT 95 %'].speedup.median == pytest.approx(4.0)
  # 2/3, 4/3, 2/3
  assert rows['dense unrolled'].speedup.median == pytest.approx(2 / 3)
  # PyTorch over EAT: 1, 0.5, 3
  assert rows['EAT 0 %'].over_torch.median == pytest.approx(1.0)
  assert rows['EAT 0 %'].over_torch_distil is None
  assert rows['EAT 0 %'].seconds.median == pytest.approx(0.1)
  share = rows['EAT 0 %'].share
  assert share == pytest.approx(2.0 / rows['EAT 0 %'].flop_limit)


def test_flop_limits_of_the_paper_protocol():
  """Length 128, 12 layers: what the project's notes state, by other means."""
  names = [f'EAT {rate} %' for rate in (0, 50, 80, 95)]
  rows = table(SAMPLES | dict.fromkeys(names, [0.1] * 3))
  limits = [rows[name].flop_limit for name in names]
  np.testing.assert_allclose(limits, [1.63, 2.24, 2.87, 3.34], atol=0.005)
  assert rows['dense scanned'].flop_limit == 1.0
  assert rows['PyTorch BERT'].flop_limit == 1.0


def block(tokens, width=768, mlp_dim=3072):
  """Projections, scores and values, network: 2 for a multiply-add."""
  projections = 4 * 2 * tokens * width * width
  attention = 2 * 2 * tokens * tokens * width
  return projections + attention + 2 * 2 * tokens * width * mlp_dim


def test_flops_by_hand():
  contenders = {one.name: one for one in lineup.contenders(Settings())}
  head = 2 * 768 * (768 + 2)
  dense = 12 * block(128) + head
  flops = {
    name: tables.flops(one, Settings()) for name, one in contenders.items()
  }
  assert flops['dense unrolled'] == (dense, dense)
  assert flops['PyTorch BERT'] == (dense, dense)
  assert flops['distil chunked'][0] == 6 * block(128) + head
  # 1 + ceil(.7 * 127) = 90, 1 + ceil(.7 * 89) = 64
  first = 2 * block(128) + 2 * block(90) + head
  last = 8 * block(64) + head
  np.testing.assert_allclose(flops['EAT 0 %'][0], first + last)
  np.testing.assert_allclose(flops['EAT 80 %'][0], first + last / 5)
  # Of the last block and the one under the exit [CLS] alone is computed, but
  # rows that stay run that one in full too, which costs keys and values twice.
  full, computed = flops['dense engine chain']
  assert full == dense
  assert 11 * block(128) < computed < 11.3 * block(128)
  assert flops['EAT 95 %'][1] < flops['EAT 95 %'][0]


def test_without_a_dense_form_there_is_nothing_to_compare():
  with pytest.raises(ValueError, match='no dense form'):
    table({'EAT 0 %': [0.1]})


def test_length_table_by_hand():
  settings = Settings(length_buckets=(64, 128), row_lengths=(3, 64, 65, 128))
  samples = {
    ('padded', 0): np.array([4.0, 8.0]),
    ('buckets', 0): np.array([2.0, 2.0]),
  }
  padded, buckets = tables.length_rows(samples, settings)
  assert padded.speedup == Estimate(1.0, 1.0, 1.0)
  assert padded.flop_limit == 1.0
  assert buckets.speedup.median == 3.0
  # Half of the rows take a little less than half the time: 2 / 1.49.
  half = block(64) / block(128)
  assert buckets.flop_limit == pytest.approx(2 / (1 + half), rel=1e-2)
  assert tables.length_rows({}, settings) == []


def test_tables_are_printed_whole(capsys):
  rows = table(SAMPLES)
  console = rich.console.Console(width=128, highlight=False, markup=False)
  tables.print_rows(list(rows.values()), console)
  text = capsys.readouterr().out
  for cell in (
    'batch 4; best dense form: dense scanned',
    '100 [100, 250]',
    '2.00 [1.50, 2.00]',
    '1.63',
    '1.22',  # 2 / 1.634
    'PyTorch BERT',
    '/ PyTorch',
    '-',
  ):
    assert cell in text
  assert '…' not in text
