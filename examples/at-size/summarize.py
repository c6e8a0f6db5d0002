# SPDX-License-Identifier: Apache-2.0
"""summarize.py DIR: what examples/at-size/run left in DIR, as tables in Markdown."""
import hashlib
import json
import os
import re
import statistics
import sys


def lines(*path):
    with open(os.path.join(*path)) as file:
        return [json.loads(line) for line in file]


def training(directory, name):
    """The lines of steps, and (peak, predicted) of anonymous memory in GB."""
    steps = [line for line in lines(directory, name, 'metrics.jsonl') if 'loss' in line]
    with open(os.path.join(directory, {'whole': 'train'}.get(name, name) + '.log')) as file:
        memory = re.findall(r'memory measured: peak (\S+) GB anonymous, predicted (\S+) GB', file.read())[-1]
    return steps, memory


def md5(directory, name):
    with open(os.path.join(directory, name, 'adapter_model.safetensors'), 'rb') as file:
        return hashlib.md5(file.read()).hexdigest()


def print_table(head, rows):
    print('| %s |\n|%s' % (' | '.join(head), '---|' * len(head)))
    for row in rows:
        print('| %s |' % ' | '.join(row))
    print()


def main(directory):
    small, _ = training(directory, 'small')
    grown, memory = training(directory, 'whole')
    with open(os.path.join(directory, 'plan.json')) as file:
        plan = json.load(file)
    differences = [abs(b['loss'] / a['loss'] - 1) for a, b in zip(small, grown)]
    print_table(['optimizer step', 'loss, small model', 'loss, grown model', 'relative difference'],
                [[str(a['step']), '%.6f' % a['loss'], '%.6f' % b['loss'], '%.1e' % d] for a, b, d in zip(small, grown, differences)])
    step_s = statistics.median(s['step_s'] for s in grown)
    planned_s = plan.get('expected', {}).get('step_s', plan['time']['step_seconds'])
    print_table(['training', 'measured', 'planned'], [
        ['parameters', '%.2f B' % (plan['model']['parameters'] / 1e9), ''],
        ['tokens/s, all steps', '%.1f' % (sum(s['tokens'] for s in grown) / sum(s['step_s'] for s in grown)), ''],
        ['seconds per step, median', '%.2f' % step_s, '%.2f' % planned_s],
        ['peak of anonymous memory, GB', *memory],
        ['read from disk per step, GB', '%.3f' % (statistics.median(s['disk_bytes'] for s in grown) / 1e9), ''],
        ['adapter, MD5', '`%s`' % md5(directory, 'whole'), ''],
        ['adapter after SIGKILL and resume, MD5', '`%s`' % md5(directory, 'killed'), '']])
    if os.path.exists(os.path.join(directory, 'peft.json')):
        peft = lines(directory, 'peft.json')[0]
        print_table(['transformers and PEFT, bf16, base in memory', ''], [
            ['tokens/s, median step', '%.1f' % peft['tokens_per_s']], ['peak resident, GB', '%.2f' % (peft['peak_rss_mib'] * 2 ** 20 / 1e9)],
            ['versions', ', '.join('%s %s' % v for v in peft['versions'].items())]])
    with open(os.path.join(directory, 'merge.log')) as file:
        kept = re.search(r'(\S+) % of it kept', file.read()).group(1)
    evals = {name: lines(directory, 'eval-%s.json' % name)[0]['eval_loss'] for name in ('small', 'grown', 'quantized', 'stored', 'merged')}
    print_table(['validation loss', ''], [[text, '%.8g' % evals[name]] for name, text in (
        ('small', 'small model and adapter, fp8_row'), ('grown', 'grown model and adapter, fp8_row'),
        ('quantized', 'quantized directory and adapter'), ('stored', 'grown model and adapter, as stored'), ('merged', 'merged model, f16; %s %% of the adapter kept' % kept))])


if __name__ == '__main__':
    main(sys.argv[1])
