"""What is legal in a JobSet: a schema of its own, and Kubernetes' of the Job.

The schema follows the Go types of jobset.x-k8s.io/v1alpha2, and its webhook.
"""

import jsonschema
import pytest


def closed(required=(), **properties):
  """A JSON schema of an object without other fields."""
  return dict(
    type='object', properties=properties, required=list(required),
    additionalProperties=False,
  )  # fmt: skip


TEXT, FLAG = {'type': 'string'}, {'type': 'boolean'}
COUNT = {'type': 'integer', 'minimum': 0}
TEXTS = {'type': 'array', 'items': TEXT}
LABELS = {'type': 'object', 'additionalProperties': TEXT}
METADATA = closed(
  ['name'], name=TEXT, namespace=TEXT, labels=LABELS, annotations=LABELS
)
RULE = closed(
  ['name', 'action'],
  name={'type': 'string',
        'pattern': '^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$'},
  action={'enum': ['FailJobSet', 'RestartJobSet', 'RestartJob',
                   'RestartJobSetAndIgnoreMaxRestarts',
                   'RestartJobAndIgnoreMaxRestarts']},
  onJobFailureReasons={'type': 'array', 'items': {'enum': [
    'BackoffLimitExceeded', 'DeadlineExceeded', 'FailedIndexes',
    'MaxFailedIndexesExceeded', 'PodFailurePolicy']}},
  onJobFailureMessagePatterns=TEXTS,
  targetReplicatedJobs=TEXTS,
)  # fmt: skip
REPLICATED = closed(
  ['name', 'template'], name=TEXT, replicas=COUNT, groupName=TEXT,
  template=closed(['spec'], metadata={'type': 'object'},
                  spec={'type': 'object'}),
)  # fmt: skip
JOBSET = closed(
  ['apiVersion', 'kind', 'metadata', 'spec'],
  apiVersion={'const': 'jobset.x-k8s.io/v1alpha2'}, kind={'const': 'JobSet'},
  metadata=METADATA,
  spec=closed(
    ['replicatedJobs'],
    replicatedJobs={'type': 'array', 'items': REPLICATED, 'minItems': 1},
    network=closed(enableDNSHostnames=FLAG, subdomain=TEXT,
                   publishNotReadyAddresses=FLAG),
    successPolicy=closed(['operator'], operator={'enum': ['All', 'Any']},
                         targetReplicatedJobs=TEXTS),
    failurePolicy=closed(maxRestarts=COUNT,
                         rules={'type': 'array', 'items': RULE}),
    suspend=FLAG, ttlSecondsAfterFinished=COUNT,
  ),
)  # fmt: skip


def validate(manifest):
  """Raises if a manifest is none of a JobSet of a batch/v1 Job."""
  kubernetes_validate = pytest.importorskip('kubernetes_validate')
  jsonschema.validate(manifest, JOBSET)
  (one,) = manifest['spec']['replicatedJobs']
  job = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': {'name': 'x'}}
  kubernetes_validate.validate(job | one['template'], '1.32', strict=True)
  return one['template']['spec']
