"""Differences from the golden records that are intended, with their reasons.

One row for each: (pattern of the subject, pattern of the quantity, reason). A
row that matches no difference is out of date, and `compare.py` prints it.
Reasons of texts repeat the line of CHANGELOG.md.
"""

TRAINED = 'losses|last step|result'
COMPUTED = f'logits|loss of rows|gradient norm|{TRAINED}'
EAT_CONFIG = (
  'CHANGELOG: configs/eat/<task>.py -> configs/eat/glue.py:task=<task>; '
  'legal values follow from annotated fields'
)

INTENDED: list[tuple[str, str, str]] = [
  (
    'albert_pretrain_.*', TRAINED,
    'fixed: the trust ratio of LAMB leaves out biases and norms',
  ),
  (
    'image_folder_learn', TRAINED,
    'fixed: bank_drop draws which tokens to keep',
  ),
  (
    'parity_(paper_)?adatape|image_folder_input', 'last step',
    'CHANGELOG: bank_share is measured in evaluation only',
  ),
  (
    'digits_(learn|input)', COMPUTED,
    'fixed: tape weights scale the query before the product (1e-6)',
  ),
  (
    'columns',
    r'(adatape|eat_speed): rows\.csv|albert: rows(_train)?\.csv|'
    r'eat: (calibration|examples|settings|timings)\.csv',
    'all benchmarks have the same columns, see CHANGELOG',
  ),
  ('errors', '.*configs/eat/sst2.py.*', EAT_CONFIG),
  (
    'errors', '.*parity.py:m=16',
    'CHANGELOG: arguments are for what changes the shape of a config; others '
    'became fields',
  ),
  (
    'errors', r'.*parity.py(:model=ut)? --config\.model\..*',
    'CHANGELOG: LOSS_FIELDS -> annotated fields; legal ranges follow from them',
  ),
  (
    'errors', '.*--coordinator=host:1',
    'fixed: processes that JAX finds itself need no --coordinator',
  ),
  (
    'errors',
    r'.*(parity|digits)\.py --config\.(optim|batch|seed|dtype|tensor|log|'
    r'stages|warm|loss|dataset\.aug).*',
    'CHANGELOG: an override is read as the type of its field; errors name the '
    'legal range instead of the type, and the field as on the command line',
  ),
  ('errors', '.*adatape/parety.py', 'the example is the nearest file'),
  (
    'help', 'predict',
    'CHANGELOG: AdaTape and plain models are served by the engine, images too',
  ),
  (
    'errors', '.*dataset.name=parety',
    'CHANGELOG: data set graves -> recurrent_act.data:Graves',
  ),
  (
    'help', 'train|evaluate|sweep|prepare_corpus|export|analyze',
    'rewritten in field English',
  ),
  ('help', 'benchmark.*', 'CHANGELOG: benchmarks share one measuring core'),
]  # fmt: skip
