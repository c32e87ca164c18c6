"""A run of a tiny EAT; trained once in a process of tests."""

from tests.launch import toy_runs


def train(tmp_path_factory):
  """Returns the run's directory; texts are those of `toy_runs`."""
  directory = tmp_path_factory.getbasetemp() / 'tiny_run'
  if not directory.exists():
    directory.mkdir()
    toy_runs.write_data(directory)
    toy_runs.train(directory, 'run', 'model=eat', 'model.window=4')
  return directory / 'run'
