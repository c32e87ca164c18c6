"""What is legal in a JobSet: a schema of its own, and Kubernetes' of the Job.

The schema has the fields that we write, by the Go types of
jobset.x-k8s.io/v1alpha2 and its webhook.
"""

import jsonschema
import pytest


def closed(**properties):
  """A JSON schema of an object with these fields only."""
  return dict(
    type='object', properties=properties, additionalProperties=False
  )  # fmt: skip


TEXT = {'type': 'string'}
LABELS = {'type': 'object', 'additionalProperties': TEXT}
REASONS = [
  'BackoffLimitExceeded', 'DeadlineExceeded', 'FailedIndexes',
  'MaxFailedIndexesExceeded', 'PodFailurePolicy',
]  # fmt: skip
RULE = closed(
  name=TEXT | {'pattern': '^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$'},
  action={'enum': ['FailJobSet', 'RestartJobSet', 'RestartJob']},
  onJobFailureReasons={'type': 'array', 'items': {'enum': REASONS}},
)
REPLICATED = closed(name=TEXT, template=closed(spec={'type': 'object'}))
FAILURE = closed(
  maxRestarts={'type': 'integer', 'minimum': 0},
  rules={'type': 'array', 'items': RULE},
)
JOBSET = closed(
  apiVersion={'const': 'jobset.x-k8s.io/v1alpha2'},
  kind={'const': 'JobSet'},
  metadata=closed(name=TEXT, labels=LABELS, annotations=LABELS),
  spec=closed(
    replicatedJobs={'type': 'array', 'items': REPLICATED, 'minItems': 1},
    failurePolicy=FAILURE,
  ),
)


def validate(manifest):
  """Raises if a manifest is none of a JobSet of a batch/v1 Job."""
  kubernetes_validate = pytest.importorskip('kubernetes_validate')
  jsonschema.validate(manifest, JOBSET)
  (one,) = manifest['spec']['replicatedJobs']
  job = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': {'name': 'x'}}
  kubernetes_validate.validate(job | one['template'], '1.32', strict=True)
  return one['template']['spec']
