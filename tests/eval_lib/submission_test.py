"""Files of the GLUE server, written by hand, and GLUE's average."""

import zipfile

import numpy as np
import pytest

from core.errors import InvalidDataError, MissingDataError
from eval_lib import glue, submission

# Answers, and the lines of the file as in the server's sample.
FILES = {
  'CoLA': ([1, 0], ['1', '0']),
  'SST-2': ([1, 0], ['1', '0']),
  'MRPC': ([0, 1], ['0', '1']),
  'QQP': ([0, 1], ['0', '1']),
  'STS-B': ([-0.5, 2.34567, 7.0], ['0.000', '2.346', '5.000']),
  'MNLI-m': ([0, 1, 2], ['entailment', 'neutral', 'contradiction']),
  'MNLI-mm': ([2, 0], ['contradiction', 'entailment']),
  'QNLI': ([0, 1], ['entailment', 'not_entailment']),
  'RTE': ([1, 0], ['not_entailment', 'entailment']),
  'WNLI': ([0, 1], ['0', '1']),
  'AX': ([1, 2], ['neutral', 'contradiction']),
}


@pytest.mark.parametrize('name', FILES)
def test_files_by_hand(tmp_path, name):
  answers, cells = FILES[name]
  path = submission.write(tmp_path / 'new', name, np.array(answers))
  text = 'index\tprediction\n'
  text += ''.join(f'{n}\t{cell}\n' for n, cell in enumerate(cells))
  assert path == tmp_path / 'new' / f'{name}.tsv'
  assert path.read_text() == text
  expected = [0.0, 2.346, 5.0] if name == 'STS-B' else answers
  assert submission.read(path, len(answers)).tolist() == expected
  # As a spreadsheet on Windows saves it.
  path.write_bytes(text.replace('\n', '\r\n').encode())
  assert submission.read(path).tolist() == expected


def test_every_task_has_a_file():
  assert FILES.keys() == submission.ROWS.keys()


@pytest.mark.parametrize(
  ('name', 'lines', 'words'),
  [
    ('RTE', ['id\tlabel', '0\tentailment'], "line 1: .*index.tprediction'"),
    ('RTE', ['0\tentailment', '2\tentailment'], 'line 3: .*index 1, got .2.'),
    ('RTE', ['0\tentailment', '0\tentailment'], 'line 3: .*index 1, got .0.'),
    ('RTE', ['0\tneutral'], "line 2: .*entailment, not_entailment, got 'neut"),
    ('RTE', ['0\t0'], 'line 2: .*entailment'),
    ('WNLI', ['0\tentailment'], 'line 2: expected one of 0, 1, got'),
    ('SST-2', ['0\t2'], 'line 2: expected one of 0, 1, got'),
    ('SST-2', ['0 1'], "line 2: expected index 0, got '0 1'"),
    ('SST-2', ['0\t1\t'], 'line 2: expected one of 0, 1, got'),
    ('STS-B', ['0\t5.1'], r'line 2: expected a number in \[0, 5.0\], got'),
    ('STS-B', ['0\tnan'], r'line 2: expected a number in \[0, 5.0\], got'),
    ('SST-2', ['0\t1'], 'line 2: expected 2 rows, got 1'),
    ('SST', ['0\t1'], "expected a file of CoLA, .*got 'SST'"),
  ],
)  # fmt: skip
def test_wrong_files_are_refused_with_the_line(tmp_path, name, lines, words):
  path = tmp_path / f'{name}.tsv'
  header = [] if lines[0].startswith('id') else ['index\tprediction']
  path.write_text('\n'.join([*header, *lines]) + '\n')
  with pytest.raises(InvalidDataError, match=words) as error:
    submission.read(path, 2)
  assert str(path) in str(error.value)


def test_the_archive_has_all_files_and_all_rows(tmp_path):
  for name, rows in submission.ROWS.items():
    submission.write(tmp_path, name, np.zeros(rows, int))
  archive = tmp_path / 'submission.zip'
  submission.zip_files(tmp_path, archive)
  with zipfile.ZipFile(archive) as found:
    assert found.namelist() == [f'{name}.tsv' for name in submission.ROWS]
    lines = found.read('QQP.tsv').splitlines()
    assert (len(lines), lines[-1]) == (390_966, b'390964\t0')
  archive.unlink()
  submission.write(tmp_path, 'AX', np.zeros(1103, int))
  with pytest.raises(InvalidDataError, match=r'AX.tsv.*1104 rows, got 1103'):
    submission.zip_files(tmp_path, archive)
  (tmp_path / 'RTE.tsv').unlink()
  with pytest.raises(MissingDataError, match=r'RTE\.tsv'):
    submission.zip_files(tmp_path, archive)
  assert not archive.exists()


# BERT-large on the leaderboard, whose printed average is 80.5.
BERT = {
  'CoLA': {'matthews': 60.5}, 'SST-2': {'accuracy': 94.9},
  'MRPC': {'f1': 89.3, 'accuracy': 85.4},
  'STS-B': {'pearson': 87.6, 'spearman': 86.5},
  'QQP': {'f1': 72.1, 'accuracy': 89.3}, 'MNLI-m': {'accuracy': 86.7},
  'MNLI-mm': {'accuracy': 85.9}, 'QNLI': {'accuracy': 92.7},
  'RTE': {'accuracy': 70.1}, 'WNLI': {'accuracy': 65.1},
}  # fmt: skip


def test_the_average_of_the_leaderboard():
  *rows, whole, without = glue.average(BERT)
  assert {row['task'] for row in rows} == BERT.keys()
  by_task = {row['task']: row for row in rows}
  assert by_task['MRPC'] == {
    'task': 'MRPC', 'f1': 89.3, 'accuracy': 85.4,
    'score': pytest.approx(87.35),
  }  # fmt: skip
  assert round(whole['score'], 1) == 80.5
  assert without['score'] == pytest.approx((9 * whole['score'] - 65.1) / 8)
  assert whole['absent'] == without['absent'] == ''


def test_the_average_names_absent_tasks():
  few = {name: BERT[name] for name in ('MNLI-mm', 'WNLI', 'CoLA')}
  *rows, whole, without = glue.average(few)
  assert len(rows) == 3
  assert whole['score'] == pytest.approx((85.9 + 65.1 + 60.5) / 3)
  assert whole['absent'] == 'SST-2, MRPC, QQP, STS-B, QNLI, RTE'
  assert without['score'] == pytest.approx((85.9 + 60.5) / 2)
  assert glue.average({})[0]['score'] is None
