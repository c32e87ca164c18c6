"""Prints the largest difference between the two forms of a run."""

import sys

import numpy as np

from core import registry
from train_lib import loading

registry.trust('depths')
run = loading.restore(sys.argv[1], loading.load_config(sys.argv[1]))
images = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), np.uint8)
logits = []
for masked in (False, True):
  run.task.model = run.task.model.clone(masked=masked)
  logits.append(run.task.apply(**run.variables, batch={'image': images})[0])
assert np.ptp(logits[0], axis=0).max() > 1e-3
print(np.abs(logits[0] - logits[1]).max())
