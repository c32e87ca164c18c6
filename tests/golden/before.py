"""Names of the commit before the redesign, for its golden records."""


def configs(
  eat: list[str],
  albert: list[str],
  fine_tuned: list[str],
  glue_tasks: tuple[str, ...],
) -> dict[str, tuple[str, list[str]]]:
  """Flag and overrides of every config, by the subject's name.

  Args:
    eat: overrides of an EAT.
    albert: overrides of an ALBERT in pretraining.
    fine_tuned: overrides of an ALBERT in fine-tuning.
    glue_tasks: names of the tasks.
  """
  table: dict[str, tuple[str, list[str]]] = {}
  parity = 'configs/adatape/parity.py:n=8'
  paper = 'configs/adatape/parity_paper.py:n=8,depth=2,width=24,mlp_dim=32'
  for model in ('adatape', 'transformer', 'ut'):
    table[f'parity {model}'] = f'{parity},model={model}', []
    table[f'parity_paper {model}'] = f'{paper},model={model}', []
  folder = 'configs/adatape/image_folder.py:root={images},size=32,variant=Ti/16'
  for model in ('learn', 'input', 'vit'):
    table[f'digits {model}'] = f'configs/adatape/digits.py:model={model}', []
    arguments = ',bank_patch=4' if model == 'input' else ''
    small = ['model.depth=2'] + ['model.bank_size=60'] * (model == 'learn')
    table[f'image_folder {model}'] = f'{folder},model={model}{arguments}', small
  for name, arguments in (
    ('parity', ''), ('logic', ',rule=straight_through'),
    ('addition', ',digits=2,rule=skip'),
    ('sort', ',length=3,rule=fixed,cell=gru'), ('sparse_parity', ''),
    ('parity', ',cell=lstm,placement=scattered'),
  ):  # fmt: skip
    cell = ' lstm' if 'lstm' in arguments else ''
    flag = f'configs/recurrent_act/{name}.py:width=16{arguments}'
    table[f'recurrent {name}{cell}'] = flag, ['dataset.test_examples=16']
  common = 'data={glue},vocabulary={vocabulary},variant=tiny,max_length=32'
  for task in glue_tasks:
    flag = f'configs/eat/{task}.py:{common}'
    table[f'eat {task}'] = flag, [*eat, 'model.window=4']
  for model in ('dense', 'student'):
    flag = f'configs/eat/sst2.py:{common},model={model}'
    table[f'eat sst2 {model}'] = flag, eat
  table['eat sst2 pe'] = f'configs/eat/sst2.py:{common},parts=pe', eat
  for task in glue_tasks:
    flag = f'configs/albert_act/glue.py:task={task},data={{glue}}'
    table[f'albert {task}'] = flag, fine_tuned
  glue = 'configs/albert_act/glue.py:task=sst2,data={glue}'
  table['albert sst2 fixed'] = f'{glue},halting=fixed', fine_tuned
  probing = 'configs/albert_act/probing.py:data={probing},task='
  table['albert past_present'] = probing + 'past_present', fine_tuned
  table['albert tree_depth'] = (
    probing + 'tree_depth,halting=straight_through,tau=0.1', fine_tuned
  )  # fmt: skip
  pretrain = (
    'configs/albert_act/pretrain.py:corpus={corpus},variant=micro,length=32'
  )
  for halting in ('act', 'straight_through', 'fixed'):
    flag = f'{pretrain},halting={halting},tau=0.01'
    table[f'albert pretrain {halting}'] = flag, albert
  return table


def bad_command_lines() -> list[list[str]]:
  """Arguments of launch.train that are refused."""
  from tests.launch import bad_command_lines_test

  return [list(case[0]) for case in bad_command_lines_test.CASES]
