"""`GET /`, OpenAPI and ids, of a classifier and of its bundle."""

import json
import pathlib
import re

import jsonschema
import pytest

from core import VERSION
from serve_lib import bodies, bundle, description
from serve_lib.engine import Engine
from serve_lib.items import ImageReader
from tests.serve_lib import bundle_test, toy

pytestmark = pytest.mark.anyio
ITEM, BAD = {'tokens': [0, 1, 2, 3]}, {'tokens': [99, 1, 2, 3]}
ABOUT = {'model': 'a.b:Model', 'task': 'a.b:Task', 'step': 7}


@pytest.fixture(scope='module', params=['run', 'bundle'])
def engine(request, tmp_path_factory):
  path = tmp_path_factory.mktemp('bundle') / 'one'
  engine = bundle_test.write(path, about=ABOUT, certified={'': 'whole'})
  if request.param == 'bundle':
    chain, policy, grid = bundle.read(path)
    engine = Engine(chain, policy, grid.lengths, grid.batches)
  with engine:
    yield engine


@pytest.fixture
async def client(engine):
  async with toy.started(engine, 'sst2') as client:
    yield client


async def test_a_server_says_what_it_serves(client):
  text = (await client.get('/')).text
  about = json.loads(text)
  assert about.items() >= ABOUT.items()
  assert (about['name'], about['version']) == ('sst2', VERSION)
  assert (about['labels'], about['ready']) == (['no', 'maybe', 'yes'], True)
  assert about['options']['setting'] == 'guaranteed'
  assert {'label', 'probabilities', 'exit_reason'} <= {*about['answer']}
  assert about['options']['reader']['vocab_size'] == 10
  assert 'careful' not in text  # warnings have paths
  for endpoint in about['endpoints']:
    body = about['example'].get(endpoint)
    found = await client.request(*endpoint.split(), json=body)
    assert found.status_code == 200, endpoint


@pytest.mark.parametrize(('body', 'status'), [
  (ITEM, 200), (ITEM | {'id': 'x', 'deadline_ms': 1e6}, 200),
  ({'items': [ITEM, BAD], 'deadline_ms': 9000}, 200),
  (ITEM | {'deadline_ms': 0}, 422), (ITEM | {'id': [1]}, 422),
  ({'tokens': 'text'}, 422), ({'items': []}, 422), ({'items': ITEM}, 422),
  ({'items': [ITEM | {'tokens': 7}]}, None),
])  # fmt: skip
async def test_the_schema_is_that_of_requests_and_answers(client, body, status):
  about = (await client.get('/openapi.json')).json()
  predict = about['paths']['/predict']['post']

  def check(part):
    schema = part['content']['application/json']['schema']
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)

  found = await client.post('/predict', json=body)
  assert check(predict['requestBody']).is_valid(body) == (status == 200)
  assert found.status_code == (status or 200)
  kind = '200' if found.status_code == 200 else 'default'
  check(predict['responses'][kind]).validate(found.json())
  assert not check(predict['responses'][kind]).is_valid({})


async def test_the_id_of_an_item_comes_back(client):
  one = (await client.post('/predict', json=ITEM | {'id': 'x'})).json()
  assert one.pop('id') == 'x'
  bad = (await client.post('/predict', json=BAD | {'id': 7})).json()
  assert (bad['id'], 'tokens: expected' in bad['error']) == (7, True)
  illegal = [ITEM | {'id': True}, ITEM | {'id': 'x' * 1001}]
  items = [ITEM | {'id': 0}, ITEM, BAD | {'id': 'b'}, *illegal]
  many = (await client.post('/predict', json={'items': items})).json()
  first, second, third, last, long = many['answers']
  assert last == long
  assert (first, second) == ({'id': 0} | one, one)
  assert (third['id'], [*last]) == ('b', ['error'])
  assert last['error'].startswith('item: expected an id: a number, or a text')


def test_the_metrics_of_the_page_exist():
  page = pathlib.Path(__file__).parents[2] / 'docs' / 'serving.md'
  named = {*re.findall(r'`((?:engine|http)_\w+)', page.read_text())}
  known = {name.partition('{')[0] for name in description.METRICS}
  known |= {name.replace('drift_', 'drift_by_source_') for name in known}
  assert named <= known | {'http_latency_seconds_bucket'}


def test_the_example_of_images_is_an_image():
  reader = ImageReader(1, image_size=8, resize_small=8)
  item = bodies.read_item(description.sample(reader))
  assert reader.read(item, '').inputs['image'].tolist() == [[[0] * 3] * 8] * 8
