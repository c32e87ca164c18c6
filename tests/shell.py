"""Commands in processes of their own, and what they write."""

import csv
import json
import subprocess
import sys


def python(*arguments, **options):
  """Runs Python; returns the process, or fails with what it printed."""
  command = [sys.executable, *map(str, arguments)]
  options = dict(capture_output=True, text=True, timeout=900) | options
  done = subprocess.run(command, check=False, **options)
  assert done.returncode == 0, done.stdout + done.stderr
  return done


def launch(command, *flags, **options):
  """Runs `python -m launch.COMMAND`; returns what it printed."""
  return python('-m', f'launch.{command}', *flags, **options).stdout


def rows(workdir):
  """The rows of the log of a run."""
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


def result(workdir):
  return json.loads((workdir / 'result.json').read_text())


def table(path):
  """The rows of a CSV file."""
  return [*csv.DictReader(path.read_text().splitlines())]
